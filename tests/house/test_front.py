import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from support.command_lines import Refused
from support.store_samples import write_lines

import selfcal_lightning as sc
from selfcal_lightning.cli import run
from selfcal_lightning.commands import python as front
from selfcal_lightning.commands.presets import CommonCase, as_arguments, common_case, prepare, split_arguments
from selfcal_lightning.models.folders import config_path


def problems(number: int, split: str = "train") -> list[dict[str, Any]]:
    found = sc.get_task("word_problems").load(split, limit=number)
    return [{"question": one.text, "answer": one.reference} for one in found]


@pytest.mark.slow
def test_calibrate_answer_and_evaluate(tmp_path: Path) -> None:
    settings = {"data.num_samples": 3, "trainer.accelerator": "cpu", "trainer.logger": False}
    made = sc.calibrate("bundled", problems(20), output_dir=tmp_path / "run", settings=settings)
    assert made.adapter == tmp_path / "run" / "adapter"
    assert (made.adapter / "selfcal_manifest.json").is_file()
    assert made.counts == {"train": 16, "validation": 2, "calibration": 2}
    assert len(made.store.question_ids()) == 18
    assert {"val/calibration/ECE", "val/discrimination/AUROC"} <= made.metrics.keys()
    assert f"ECE {made.metrics['val/calibration/ECE']:.3f}, AUROC " in repr(made)
    sampling = sc.SamplingSettings(max_new_tokens=60)
    asked = problems(2, "test_id")
    words = [row["question"] for row in asked]
    found = sc.answer("bundled", asked, adapter=made.adapter, max_samples=3, max_new_tokens=60, engine="transformers")
    texts = sc.answer("bundled", words, adapter=made.adapter, max_samples=3, sampling=sampling)
    assert [one.as_json()["answer"] for one in texts] == [one.verdict.answer for one in found]
    (alone,) = sc.answer("bundled", asked[0]["question"], adapter=made.adapter, max_samples=1, max_new_tokens=8)
    assert alone.question.text == asked[0]["question"]
    assert [one.question.text for one in found] == words
    assert all(1 <= one.samples_used <= 3 and one.verdict.samples_used == one.samples_used for one in found)

    options = {"num_samples": 2, "sampling": sampling, "strategies": [], "num_resamples": 5}
    judged = sc.evaluate("bundled", problems(4, "test_id"), adapter=made.adapter, output_dir=tmp_path / "e", **options)
    assert json.loads((tmp_path / "e" / "results.json").read_text()).keys() == judged.results.keys()
    assert judged.results["own.test.num_questions.before"] == 4


def test_it_is_the_verbs_configuration(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(here / "q.jsonl", *problems(12))
    asked = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(front, "run_trainer", asked)
    with pytest.raises(InterruptedError):
        sc.calibrate("bundled", "q.jsonl", preset="activated", settings={"model.lr": 0.5, "data.total_tuples": None})
    stated = common_case(["--model", "bundled", "--questions", "q.jsonl", "--preset", "activated"])
    (arguments,) = asked.call_args.args
    assert arguments == ["fit", *as_arguments(stated[0]), "--model.lr", "0.5", "--data.total_tuples", "null"]
    assert yaml.safe_load(arguments[2])["model"]["init_args"]["base_model"] == "bundled"


def test_questions_may_be_a_file_mappings_or_records_without_prompts_of_their_own(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(3)]
    records = sc.get_task("local_number").load("t", path=str(write_lines(tmp_path / "q.jsonl", *rows)))
    for given in (rows, records):
        assert front._as_file(given, tmp_path / "out" / "q.jsonl", task="local_number") == tmp_path / "out" / "q.jsonl"
        read = sc.get_task("local_number").load("t", path=str(tmp_path / "out" / "q.jsonl"))
        assert [question.text for question in read] == ["0+1?", "1+1?", "2+1?"]
    assert front._as_file(tmp_path / "q.jsonl", tmp_path / "never", task="local_number") == tmp_path / "q.jsonl"
    own = sc.Question("a", "local_number", (sc.Message("user", "Say it:"),), "2", "1+1?")
    with pytest.raises(sc.InputError, match=r"questions\[1\]: Expected the prompt of task 'local_number'"):
        sc.evaluate("bundled", [own], output_dir=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"questions": [{"qestion": "a"}]}, r"questions\[1\]: .*Did you mean 'question'"),
        ({"questions": "no.jsonl"}, "there is none at no.jsonl"),
        ({"settings": {"data.num_sample": 3}}, "Did you mean"),
    ],
)
def test_a_mistake_is_raised_and_nothing_is_left(given: dict[str, Any], message: str, here: Path) -> None:
    arguments = {"questions": str(write_lines(here / "q.jsonl", *problems(12))), **given}
    with pytest.raises((sc.InputError, FileNotFoundError), match=message):
        sc.calibrate("bundled", **arguments)
    assert [path.name for path in here.iterdir()] == ["q.jsonl"]


# ---- the common case on the command line, and what it says of bad input


@pytest.fixture
def questions(here: Path) -> str:
    rows = ({"question": f"What is {n}+1?", "answer": n + 1} for n in range(30))
    return str(write_lines(here / "q.jsonl", *rows))


def test_the_preset_follows_the_model_and_can_be_named(questions: str, tmp_path: Path) -> None:
    plain = CommonCase("some/model", questions)
    assert (plain.preset_name, plain.folder) == ("activated", Path("runs/model"))
    assert prepare(CommonCase("some/model", questions)).configuration["model"]["init_args"]["lora"]["r"] == 16
    assert prepare(CommonCase("m", questions, preset="joint")).configuration["model"]["init_args"]["lora"]["r"] == 32
    own = yaml.safe_load(Path(config_path("presets/small.yaml")).read_text())
    own["model"]["init_args"]["lr"] = 0.5
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    configuration = prepare(CommonCase("m", questions, preset=str(tmp_path / "own.yaml"))).configuration
    assert configuration["model"]["init_args"] == {**own["model"]["init_args"], "base_model": "m"}


def test_questions_of_several_tasks_are_a_source_each(questions: str, tmp_path: Path) -> None:
    rows = [{"question": f"Is it {n}? (A) yes (B) no", "answer": "A", "task": "local_choice"} for n in range(10)]
    rows += [{"question": f"{n}+1?", "answer": n + 1, "task": "local_number"} for n in range(10)]
    prepared = prepare(CommonCase("m", str(write_lines(tmp_path / "two.jsonl", *rows))))
    sources = prepared.configuration["data"]["init_args"]["train"]
    assert [source["task"] for source in sources] == ["local_choice", "local_number"]
    assert prepared.counts == {"train": 16, "validation": 2, "calibration": 2}


def test_other_options_are_left_to_lightning(questions: str) -> None:
    arguments = ["--questions", questions, "--data.num_samples", "4", "--model=bundled", "--model.lr", "1", "--check"]
    given, rest = split_arguments(arguments)
    assert given == {"questions": questions, "model": "bundled"}
    assert rest == ["--data.num_samples", "4", "--model.lr", "1", "--check"]
    assert common_case(["--config", "x.yaml", "--model", "some.module.Class", "--model.lr", "1"]) is None


def test_check_prints_the_plan_alone(questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trainer.accelerator", "cpu", "--data.num_samples", "3", "--output_dir", "out"]
    assert run(["fit", "--model", "bundled", "--questions", questions, "--check", *options]) == 0
    printed = capsys.readouterr()
    assert "train: 24 word_problems; validation: 3 word_problems" in printed.out
    assert "81 to sample" in printed.out, "the option overrides the preset"
    assert "24 to train on, 3 to validate on, 3 set aside" in printed.err
    assert "preset small" in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl"]


def test_engine_sampling_and_prompt_are_set_field_by_field(questions: str) -> None:
    options = ["--engine.name", "vllm", "--engine.dtype", "bfloat16", "--sampling.max_new_tokens", "77"]
    options += ["--prompt.format", "plain"]
    found = common_case(["--model", "m", "--questions", questions, *options])
    configuration, rest = found[0].configuration, found[1]
    assert not rest
    (sampled,) = (one for one in configuration["trainer"]["callbacks"] if one["class_path"].endswith("SSCGeneration"))
    engine = {"name": "vllm", "dtype": "bfloat16"}
    assert sampled["init_args"] == {"engine": engine, "sampling": {"max_new_tokens": 77}}
    assert configuration["model"]["init_args"]["prompt"]["format"] == "plain"


FILE = ["--questions", "q.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bundled", "--questions", "no.jsonl"], "there is none at no"),
        (FILE, "`--model`"),
        (["--model", "bundled", "--preset", "small"], "`--questions`"),
        (["--model", "bundled"], "`--questions FILE`"),
        (["--model", "bundled", *FILE, "--preset", "smal"], "Did you mean 'small'?"),
        (["--model", "bundled", "--questions", "few.jsonl"], "at least 10 different questions"),
        (["--model", "bundled", "--questions", "mixed.jsonl"], "mixed.jsonl:1: "),
        (["--model", "a", "--model", "b", *FILE], "`--model` once"),
        (["--model", "bundled", *FILE, "--engine.engine_args", "{a: b: c}"], "engine.engine_args"),
    ],
)
def test_a_bad_command_is_one_sentence(questions: str, arguments: list[str], message: str, refused: Refused) -> None:
    write_lines(Path("few.jsonl"), *({"question": f"{n}?"} for n in range(9)))
    rows = ({"question": f"{n}+1?", "answer": n + 1} for n in range(11))
    write_lines(Path("mixed.jsonl"), *rows, {"question": "x", "task": "local_text"})
    error = refused(["fit", *arguments])
    assert error.startswith("selfcal fit: error: ")
    assert message in error
    assert "Traceback" not in error
