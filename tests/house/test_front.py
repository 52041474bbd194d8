"""``sc.calibrate``, ``sc.answer`` and ``sc.evaluate``: the main job from Python, by the code of the verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.store_samples import write_lines

import selfcal_lightning as sc

SETTINGS = {"data.num_samples": 3, "trainer.accelerator": "cpu", "trainer.logger": False}


def problems(number: int, split: str = "train") -> list[dict[str, Any]]:
    found = sc.get_task("word_problems").load(split, limit=number)
    return [{"question": one.text, "answer": one.reference} for one in found]


@pytest.mark.slow
def test_calibrate_answer_and_evaluate(tmp_path: Path) -> None:
    made = sc.calibrate("bundled", problems(20), output_dir=tmp_path / "run", settings=SETTINGS)
    assert made.adapter == tmp_path / "run" / "adapter"
    assert (made.adapter / "selfcal_manifest.json").is_file()
    assert made.counts == {"train": 16, "validation": 2, "calibration": 2}
    assert len(made.store.question_ids()) == 18
    assert "val/calibration/ECE" in made.metrics
    sampling = sc.SamplingSettings(max_new_tokens=60)
    asked = problems(2, "test_id")
    found = sc.answer("bundled", asked, adapter=made.adapter, max_samples=3, max_new_tokens=60, engine="transformers")
    texts = sc.answer(
        "bundled", [row["question"] for row in asked], adapter=made.adapter, max_samples=3, sampling=sampling
    )
    assert [one.as_json()["answer"] for one in texts] == [one.verdict.answer for one in found]
    (alone,) = sc.answer("bundled", asked[0]["question"], adapter=made.adapter, max_samples=1, max_new_tokens=8)
    assert alone.question.text == asked[0]["question"]
    assert [one.question.text for one in found] == [row["question"] for row in asked]
    assert all(1 <= one.samples_used <= 3 and one.verdict.samples_used == one.samples_used for one in found)

    options = {"num_samples": 2, "sampling": sampling, "strategies": [], "num_resamples": 5}
    judged = sc.evaluate("bundled", problems(4, "test_id"), adapter=made.adapter, output_dir=tmp_path / "e", **options)
    assert json.loads((tmp_path / "e" / "results.json").read_text()).keys() == judged.results.keys()
    assert judged.results["own.test.num_questions.before"] == 4


def test_it_is_the_verbs_configuration(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfcal_lightning.commands import python as front
    from selfcal_lightning.commands.presets import as_arguments, common_case

    write_lines(here / "q.jsonl", *problems(12))
    asked: list[list[str]] = []

    class StoppedError(Exception):
        pass

    def record(arguments: list[str], **_: Any) -> None:
        asked.append(arguments)
        raise StoppedError

    monkeypatch.setattr(front, "run_trainer", record)
    with pytest.raises(StoppedError):
        sc.calibrate("bundled", "q.jsonl", preset="activated", settings={"model.lr": 0.5, "data.total_tuples": None})
    stated = common_case(["--model", "bundled", "--questions", "q.jsonl", "--preset", "activated"])
    assert stated is not None
    assert asked == [["fit", *as_arguments(stated[0]), "--model.lr", "0.5", "--data.total_tuples", "null"]]
    assert yaml.safe_load(asked[0][2])["model"]["init_args"]["base_model"] == "bundled"


def test_questions_may_be_a_file_mappings_or_records(tmp_path: Path) -> None:
    from selfcal_lightning.commands.python import _as_file

    rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(3)]
    records = sc.get_task("local_number").load("t", path=str(write_lines(tmp_path / "q.jsonl", *rows)))
    for given in (rows, records):
        assert _as_file(given, tmp_path / "out" / "q.jsonl", task="local_number") == tmp_path / "out" / "q.jsonl"
        read = sc.get_task("local_number").load("t", path=str(tmp_path / "out" / "q.jsonl"))
        assert [question.text for question in read] == ["0+1?", "1+1?", "2+1?"]
    assert _as_file(tmp_path / "q.jsonl", tmp_path / "never", task="local_number") == tmp_path / "q.jsonl"


def test_records_with_a_prompt_of_their_own_are_refused(tmp_path: Path) -> None:
    own = sc.Question("a", "local_number", (sc.Message("user", "Say it:"),), "2", "1+1?")
    with pytest.raises(sc.InputError, match=r"questions\[1\]: Expected the prompt of task 'local_number'"):
        sc.evaluate("bundled", [own], output_dir=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"questions": [{"question": "a"}]}, "at least 10 different questions"),
        ({"questions": [{"qestion": "a"}]}, r"questions\[1\]: .*Did you mean 'question'"),
        ({"questions": "no.jsonl"}, "there is none at no.jsonl"),
        ({"settings": {"data.num_sample": 3}}, "Did you mean"),
        ({"settings": {"data.num_samples": "many"}}, "Expected a int. Got value: many"),
        ({"preset": "smal"}, "Did you mean 'small'"),
        ({"model": ""}, "or 'bundled', but got ''"),
    ],
)
def test_a_mistake_is_raised_and_nothing_is_left(given: dict[str, Any], message: str, here: Path) -> None:
    arguments = {"model": "bundled", "questions": str(write_lines(here / "q.jsonl", *problems(12))), **given}
    with pytest.raises((sc.InputError, FileNotFoundError), match=message):
        sc.calibrate(arguments.pop("model"), arguments.pop("questions"), **arguments)
    assert [path.name for path in here.iterdir()] == ["q.jsonl"]
