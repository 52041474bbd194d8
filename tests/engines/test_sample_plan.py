import json
from collections import Counter
from pathlib import Path

import pytest

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.manifest import StoreFingerprint, fingerprint_digest
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.sampling.plan import SamplePlan, load_plan
from selfcal_lightning.records import SamplingSettings

COUNTS = [3, 0, 1, 2, 0]
IDS = [f"word_problems/test_id/{number:06d}" for number in range(len(COUNTS))]


def generate(folder: Path, plan: Path | None = None, **options: object) -> None:
    settings = {"split": "test_id", "limit": len(COUNTS), "num_samples": 3, **options}
    run_generate(
        "bundled", str(folder), "word_problems", sampling=SamplingSettings(max_new_tokens=24),
        plan=None if plan is None else str(plan), **settings,
    )  # type: ignore[arg-type] # fmt: skip


def texts(folder: Path) -> dict[tuple[str, int], str]:
    found = SampleStore(folder).samples()
    return {(sample.question_id, sample.index): sample.text for entry in found for sample in entry.samples}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    SamplePlan(dict(zip(IDS, COUNTS, strict=True)), {"by": "hand"}).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_each_question_gets_what_was_planned(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "planned", plan)
    generate(tmp_path / "even")
    planned, even = texts(tmp_path / "planned"), texts(tmp_path / "even")
    assert Counter(name for name, _ in planned) == {IDS[0]: 3, IDS[2]: 1, IDS[3]: 2}
    assert planned == {key: text for key, text in even.items() if key in planned}, "child j of a seed is j"
    assert "the samples planned for 3 questions" in capsys.readouterr().err
    generate(tmp_path / "planned", plan)
    assert "nothing is sampled" in capsys.readouterr().err
    for share in ("0/2", "1/2"):
        generate(tmp_path / "shared", plan, shard=share)
    assert texts(tmp_path / "shared") == planned, "two workers make the same"


def test_the_plan_of_the_run_counts_what_was_planned(plan: Path, tmp_path: Path) -> None:
    counts = dict(zip(IDS, COUNTS, strict=True))
    whole = plan_sampling(str(tmp_path / "new"), None, num_samples=3, most_tokens=24, planned=counts)
    share = plan_sampling(str(tmp_path / "new"), {IDS[0], IDS[1]}, num_samples=3, most_tokens=24, planned=counts)
    assert (whole.responses, share.responses) == (6, 3)


def test_a_store_of_other_counts_is_refused(plan: Path, tmp_path: Path) -> None:
    generate(tmp_path / "even", limit=1)
    with pytest.raises(InputError, match=r"plan: None in the store, '\w+' asked for"):
        generate(tmp_path / "even", plan)
    generate(tmp_path / "planned", plan)
    with pytest.raises(InputError, match=r"plan: '\w+' in the store, None asked for"):
        generate(tmp_path / "planned")
    other = tmp_path / "other.json"
    SamplePlan(dict.fromkeys(IDS, 1), {}).save(other)
    with pytest.raises(InputError, match=r"plan: '\w+' in the store, '\w+' asked for"):
        generate(tmp_path / "planned", other)


def test_a_plan_of_other_questions_is_refused(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 questions that it does not name, such as 'word_problems/test_id/000005'"):
        generate(tmp_path / "store", plan, limit=6)
    with pytest.raises(InputError, match="1 that are not asked, such as 'word_problems/test_id/000004'"):
        generate(tmp_path / "store", plan, limit=4)
    SamplePlan({"line-1": 1}, {}).save(tmp_path / "file.json")
    with pytest.raises(InputError, match=r"'line-1'\. For a file of questions, score those of a store"):
        generate(tmp_path / "store", tmp_path / "file.json")
    assert not (tmp_path / "store").exists()


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`selfcal allocate` writes one"):
        load_plan(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(InputError, match="to be a plan of version 1"):
        load_plan(tmp_path / "other.json")
    with pytest.raises(InputError, match="a new file or an earlier plan"):
        SamplePlan({"a": 1}, {}).save(tmp_path / "other.json")
    for plan, said in (({"a": -1}, "but got -1 for question 'a'"), ({"a": True}, "got True"), ({"a": 0}, "got none")):
        with pytest.raises(InputError, match=said):
            SamplePlan(plan, {})


def test_fingerprints_of_stores_without_a_plan_are_what_they_were() -> None:
    content = {"model": {"model": "m"}, "prompt": {}, "sampling": {}, "seed": 0}
    plain = StoreFingerprint.from_json(content)
    assert "plan" not in plain.as_json()
    planned = StoreFingerprint.from_json({**content, "plan": "p"})
    assert planned.plan == planned.as_json()["plan"] == "p"
    assert fingerprint_digest(planned.as_json()) != fingerprint_digest(plain.as_json())
