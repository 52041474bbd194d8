import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.selection_stores import select, sums_entry, sums_store

from selfcal_lightning.adaptation.evaluation import cost_in_samples, round_labels
from selfcal_lightning.adaptation.runs import Adaptation, QuestionSlice, check_learnt, fit_settings
from selfcal_lightning.adaptation.selection_files import read_selection
from selfcal_lightning.commands.adapt import _round_rows, run_adapt
from selfcal_lightning.core import processes
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.records import Question, SamplingSettings

ADAPTED = QuestionSlice("word_problems", split="test_id", limit=3)
OTHERS = QuestionSlice("word_problems", split="test_id", offset=3, limit=2)


def adapt(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "inductive": OTHERS, "reward": "vote_share", "target": "anchor", "num_samples": 4, "batch_size": 12, "lr": 1e-3,
        "evaluation_samples": 2, "temperatures": [], "sampling": SamplingSettings(max_new_tokens=80),
        "guard": {"agreement": 1.0, "unreadable": 1.0, "logprob_fall": 9.0},
        "fit_options": {"trainer": {"accelerator": "cpu"}, "data": {"max_length": 320}}, **changes,
    }  # fmt: skip
    return run_adapt(ADAPTED, str(folder), **settings)


def of(reward: str = "majority", **changes: Any) -> Adaptation:
    settings: dict[str, Any] = {
        "base_model": "m", "revision": None, "questions": ADAPTED, "reward": reward, "target": None, "selection": None,
        "store_dir": None, "rounds": 1, "num_samples": 4, "batch_size": 8, "lr": 1e-3, "max_new_tokens": 9, "seed": 0,
        **changes,
    }  # fmt: skip
    return Adaptation(**settings)


def test_rounds_are_drawn_from_the_policy_and_options_override(tmp_path: Path) -> None:
    options = {"model": {"kl": 0.1}, "trainer.devices": 2}
    settings = fit_settings(of(rounds=3), tmp_path, engine=EngineSettings(), guard={"agreement": 0.3}, options=options)
    generation, guard, *_ = settings["trainer"]["callbacks"]
    assert generation["init_args"]["sampling"] == {
        "temperature": 1.0, "edt_scale": None, "top_p": 1.0, "max_new_tokens": 9,
    }  # fmt: skip
    assert guard["init_args"]["agreement"] == 0.3
    assert settings["model"]["init_args"]["kl"] == 0.1
    assert (settings["trainer"]["devices"], settings["trainer"]["max_epochs"]) == (2, 3)
    assert settings["data"]["init_args"]["regenerate_every_n_epochs"] == 1
    for section, name, value in (
        ("model", "reward", "ssc"), ("model", "lr", 2e-3), ("model", "revision", "abc"), ("model", "seed", 1),
        ("data", "batch_size", 3), ("data", "seed", 1), ("trainer", "max_epochs", 9),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"`fit_options` without `{section}\.{name}`"):
            fit_settings(of(), tmp_path, engine=EngineSettings(), guard={}, options={section: {name: value}})
    one = fit_settings(of("entropy"), tmp_path, engine=EngineSettings(), guard={}, options={})["data"]["init_args"]
    assert (one["train"], one["regenerate_every_n_epochs"]) == ([], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "entropy", "rounds": 2}, "`rounds: 1`"),
        ({"reward": "none"}, "`selection`"),
        ({"reward": "entropy", "rounds": 1, "store_dir": "s"}, "`store_dir`.*'s'"),
        ({"inductive": ADAPTED}, r"share \d+ questions"),
        ({"reward": "votes"}, "vote_share"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_written(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        adapt(tmp_path / "adapt", **changes)
    assert not (tmp_path / "adapt").exists()


def test_settings_that_fit_refuses_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written settings cannot be changed, so nobody could correct them."""
    started: list[list[str]] = []

    def refuse(arguments: list[str]) -> int:
        started.append(arguments)
        assert Path(arguments[2]).exists()
        return 1

    monkeypatch.setattr(processes, "run_step", refuse)
    for changes in ({"num_samples": 1}, {"num_samples": 4}, {"num_samples": 4, "check": True}):
        with pytest.raises(RunError, match="did not pass their check"):
            adapt(tmp_path / "adapt", **changes)
    assert [one[-2:] for one in started] == [["--check", "true"]] * 3
    assert not (tmp_path / "adapt").exists()
    assert not Path(started[0][2]).exists()


def test_settings_that_passed_are_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "run_step", lambda one: started.append(one) or int("--check" not in one))
    for _ in range(2):
        with pytest.raises(RunError, match="Step adapt"):
            adapt(tmp_path)
    assert ["--check" in one for one in started] == [True, False, False]


def of_sums(start: int, stop: int, *, reference: bool = True) -> list[Question]:
    questions = [sums_entry(number).question for number in range(start, stop)]
    return questions if reference else [replace(question, reference=None) for question in questions]


def test_a_selection_teaches_the_questions_that_are_adapted_on_alone(tmp_path: Path) -> None:
    store = sums_store(tmp_path / "store")
    chosen = str(select(store.path, tmp_path / "chosen", keep_count=6, threshold=None).path)
    kept = {row.question_id for row in read_selection(chosen).kept}
    everything = of_sums(0, 12, reference=False)
    own = [question for question in everything if question.id in kept]
    others = [question for question in everything if question.id not in kept]

    def check(learns: bool, **sets: list[Question]) -> None:
        check_learnt(chosen, str(store.path), sets, learns_confidence=learns)

    check(True, transductive=everything)
    check(False, transductive=own, inductive=others)
    with pytest.raises(InputError, match="6 that are not, 6 of them in"):
        check(True, transductive=own, inductive=others)
    with pytest.raises(InputError, match="among the 5 of `questions`"):
        check(False, transductive=own[1:], inductive=others, out_of_domain=own[:1])
    with pytest.raises(InputError, match="1 that are not, 0 of them in"):
        check(False, transductive=own[1:])
    with pytest.raises(InputError, match="among the 3 of `questions`"):
        adapt(tmp_path / "adapt", reward="none", selection=chosen, store_dir=str(store.path), check=True)


def test_a_selection_of_another_store_is_refused_by_the_check(tmp_path: Path) -> None:
    store = sums_store(tmp_path / "store")
    chosen = str(select(store.path, tmp_path / "chosen", threshold=0.5).path)
    other = sums_store(tmp_path / "other", num_questions=3)
    with pytest.raises(InputError, match=r"sampled again|but got another one"):
        adapt(tmp_path / "adapt", reward="none", selection=chosen, store_dir=str(other.path), check=True)


def test_tokens_of_other_questions_are_no_cost(tmp_path: Path) -> None:
    store = sums_store(tmp_path / "store")
    own = of_sums(0, 3)
    rows = round_labels(store.path, own)
    assert rows["0"]["tokens"] == sum(
        len(sample.token_ids) for n in range(3) for sample in sums_entry(n, right=n).samples
    )
    assert cost_in_samples(store.path, own, rows) == 4
    assert cost_in_samples(store.path, of_sums(90, 92), {}) == 0


def test_a_round_without_samples_says_so() -> None:
    """After the last update the guard reads the tokens of round 0 alone."""
    rounds = {"1": {"tokens": 9, "pass@1": 0.5, "logprob_fall": -0.0001}, "2": {"logprob_fall": 0.007}}
    sampled, last = _round_rows({"rounds": rounds})
    assert (sampled[0], sampled[1], sampled[-1]) == ("1", "0.500", "0.000")
    assert (last[0], last[1], last[-1]) == ("2, not sampled", "-", "0.007")


@pytest.mark.slow
def test_an_adaptation_from_end_to_end_goes_on_from_what_is_there(tmp_path: Path, capsys: Any) -> None:
    result = adapt(tmp_path)
    assert json.loads((tmp_path / "adaptation.json").read_text()) == result
    assert list(result["sets"]) == ["transductive", "inductive"]
    assert (result["reads_reference"], result["stopped"]) == (False, [])
    assert result["not_measured"] == ["out_of_domain"]
    assert "no such questions were named: out_of_domain." in (tmp_path / "adaptation.md").read_text()
    assert list(result["rounds"]) == ["0", "1", "2"]
    assert result["rounds"]["1"]["label_accuracy"] is not None
    assert result["rounds"]["2"]["logprob_fall"] is not None
    assert SampleStore(tmp_path / "samples").index(round=1).correct.tolist() != []
    for round in (0, 1):
        index = SampleStore(tmp_path / "samples").index(round=round)
        assert all(value != value for value in index.correct), "no gold answer is written beside the rounds"
    rows = result["sets"]["transductive"]["rows"]
    assert any("as many tokens as the adaptation" in name for name in rows)
    assert "| transductive (3) | adapted |" in (tmp_path / "adaptation.md").read_text()

    (tmp_path / "adaptation.json").unlink()
    capsys.readouterr()
    assert adapt(tmp_path) == result
    assert "done before" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"`model.init_args.lr` was 0\.001 and is 0\.1"):
        adapt(tmp_path, lr=0.1)
