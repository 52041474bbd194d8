"""`selfcal generate` end to end on the tiny model: reuse, shares, worker processes, and its arguments."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file
from support.fakes import fake_questions
from support.options import nested
from support.other_models import plain_copy
from support.processes import is_running, wait_until
from support.store_samples import stored_groups

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.sampling import running
from selfcal_lightning.engines.sampling.sampler import select_share
from selfcal_lightning.evaluation.inputs import ModelInputs, ModelSide, TestSet, sample_models
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import QuestionSamples, SamplingSettings


def test_shards_of_machines_with_different_numbers_of_devices() -> None:
    """Machine 0 of 2 with one worker and machine 1 of 2 with three cover every question once."""
    questions = fake_questions(200)
    shards = [(0, 2), *((1 + 2 * device, 6) for device in range(3))]
    shares = [select_share(questions, shard) for shard in shards]
    assert sorted(q.id for share in shares for q in share) == sorted(q.id for q in questions)
    assert all(len(share) > 20 for share in shares)


@pytest.mark.parametrize("shard", ["1", "2/2", "-1/2", "a/b", "0/0", "1/2/3"])
def test_shard_texts(shard: str) -> None:
    with pytest.raises(ValueError, match="Expected `shard` to be 'i/n'"):
        running.parse_shard(shard)


@pytest.fixture
def arguments(tiny_model: str, tmp_path: Path) -> dict:
    some = {"model": tiny_model, "store_dir": str(tmp_path / "store"), "task": "word_problems", "split": "train"}
    some |= {"limit": 6, "num_samples": 2, "max_new_tokens": 24, "max_batch": 8, "questions_per_shard": 2}
    return {**some, "dtype": "float32"}


def stored(arguments: dict) -> dict[str, QuestionSamples]:
    return stored_groups(arguments["store_dir"])


def texts(groups: dict[str, QuestionSamples]) -> dict[str, list[str]]:
    return {name: [sample.text for sample in group.samples] for name, group in groups.items()}


def test_questions_after_an_offset_are_sampled_and_added(arguments: dict) -> None:
    first = run_generate(**nested(**arguments | {"limit": 2}))
    more = run_generate(**nested(**arguments | {"limit": 3, "offset": 1}))
    assert (first.questions, more.questions, more.reused, more.generated) == (2, 3, 1, 4)
    assert sorted(stored(arguments)) == [f"word_problems/train/{number:06d}" for number in range(4)]


def test_a_test_set_begins_after_an_offset(tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    test, sampling = TestSet("id", "word_problems", "test_id", limit=2, offset=3), SamplingSettings(max_new_tokens=4)
    models = ModelInputs({"base": ModelSide(tiny_model)}, [test], None, tmp_path, num_samples=1, sampling=sampling)
    inputs = sample_models(models)
    assert "Writing 1 sample to each of 2 questions" in capsys.readouterr().err
    ids = [entry.question.id for entry in inputs.tests["id"]["base"].entries]
    assert ids == ["word_problems/test_id/000003", "word_problems/test_id/000004"]


def test_run_generate_on_a_real_model(arguments: dict, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_generate(**nested(**arguments, store_split="validation"))
    assert (report.questions, report.generated) == (6, 12)
    found = stored(arguments)
    assert len(found) == 6
    chat = ChatFormat(load_tokenizer(arguments["model"]))
    for group in found.values():
        assert group.split == "validation"
        assert group.prompt_ids == chat.prompt_ids(group.question.messages)
        assert all(chat.decode(sample.token_ids or ()) == sample.text for sample in group.samples)
        assert all(sample.correct is not None and sample.p_true is not None for sample in group.samples)
    record = SampleStore(arguments["store_dir"]).round_manifest()
    assert record.engine["engine"] == "transformers"
    assert record.fingerprint.sampling.max_new_tokens == 24
    err = capsys.readouterr().err
    assert f"to {arguments['store_dir']}" in err
    assert "12 of 12 responses" in err
    assert "Joined" not in err, "one process alone joins nothing"
    saved = [json.loads(path.read_text()) for path in (Path(arguments["store_dir"]) / "runs").iterdir()]
    assert [(run["num_samples"], run["sampling"]["temperature"]) for run in saved] == [(2, 0.8)]


def test_nothing_left_to_do_loads_no_model(
    arguments: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_generate(**nested(**arguments))
    before = stored(arguments)
    refuse = Mock(side_effect=AssertionError("no model must be loaded"))
    monkeypatch.setattr(running, "open_engine", refuse)
    monkeypatch.setattr(running, "run_workers", refuse)
    capsys.readouterr()
    for options in ({}, {"devices": 2}, {"shard": "0/2"}, {"num_samples": 1}, {"model": "bundled"}):
        report = run_generate(**nested(**arguments | options))
        assert (report.generated, report.reused) == (0, report.questions)
    assert "are in " + arguments["store_dir"] in capsys.readouterr().err
    assert stored(arguments) == before
    for name, value, message in (
        ("temperature", 0.5, "sampling.temperature: 0.8 in the store, 0.5 asked for"),
        ("query", "Right? (Yes/No)", "prompt.query"),
        ("seed", 1, "seed: 0 in the store, 1 asked for"),
        ("num_samples", 3, "`num_samples` to be at most 2"),
        ("split", "validation", None),
    ):
        with pytest.raises(ValueError if message else AssertionError, match=message or "no model"):
            run_generate(**nested(**arguments | {name: value}))


def test_what_is_wrong_is_said_before_anything_is_written(arguments: dict, tmp_path: Path) -> None:
    bare = plain_copy(arguments["model"], tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="to have a chat template"):
        run_generate(**nested(**arguments | {"model": bare}))
    assert not Path(arguments["store_dir"]).exists()


def test_workers_start_only_where_something_is_missing(arguments: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    run_generate(**nested(**arguments, shard="0/2"))
    asked: list[tuple[int, int]] = []

    def run_here(settings: dict[str, Any], parts: list[tuple[int, int]], **_: Any) -> list[dict[str, Any]]:
        asked.extend(parts)
        run = running.GenerationSettings.from_plain(settings)
        return [asdict(running.sample_share(run, shard=part, progress=False)) for part in parts]

    monkeypatch.setattr(running, "run_workers", run_here)
    report = run_generate(**nested(**arguments, devices=2))
    assert asked == [(1, 2)]
    assert (report.questions, report.reused, report.generated) == (6, 6 - report.generated // 2, report.generated)
    assert len(stored(arguments)) == 6


@pytest.mark.slow
def test_devices_and_shards_give_the_samples_of_one_process(arguments: dict, tmp_path: Path) -> None:
    run_generate(**nested(**arguments))
    one = stored(arguments)
    shared_out = arguments | {"store_dir": str(tmp_path / "shared out")}
    first = run_generate(**nested(**shared_out, devices=2, shard="0/2"))
    assert first.generated == 2 * first.questions
    assert stored(shared_out) == {}, "one machine is missing"
    second = run_generate(**nested(**shared_out, shard="1/2"))
    assert first.questions + second.questions == 6
    assert texts(stored(shared_out)) == texts(one)
    assert run_generate(**nested(**shared_out, devices=2)).generated == 0


@pytest.mark.slow
def test_workers_end_with_their_parent_and_the_run_goes_on(arguments: dict, tmp_path: Path) -> None:
    """The parent of two workers is killed; nothing is left running, and the same command ends the run."""
    arguments |= {"limit": 400, "max_batch": 2, "questions_per_shard": 1}  # slow, so that the kill comes in the middle
    code = "import json, sys; from support.options import nested;"
    code += "from selfcal_lightning.commands.generate import run_generate;"
    code += "run_generate(**nested(**json.loads(sys.argv[1])), devices=2)"
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(arguments)])
    store = Path(arguments["store_dir"])
    wait_until(lambda: len(list(store.rglob("*.parquet"))) >= 3, seconds=500)
    workers = [int(name) for name in subprocess.check_output(["pgrep", "-P", str(parent.pid)]).split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_running, workers)), seconds=300)
    done = len(SampleStore(store).stored_questions(include_parts=True))
    assert 3 <= done < 400
    arguments |= {"max_batch": 64, "questions_per_shard": 64}
    report = run_generate(**nested(**arguments))
    assert (report.reused, report.generated) == (done, 2 * (400 - done))
    unbroken = arguments | {"store_dir": str(tmp_path / "unbroken")}
    run_generate(**nested(**unbroken))
    assert texts(stored(arguments)) == texts(stored(unbroken))


@pytest.mark.slow
def test_a_failing_worker_is_an_error(arguments: dict, tmp_path: Path) -> None:
    # Tensors of the right sizes under other names pass the checks that come before the workers, and fail in them.
    broken = plain_copy(arguments["model"], tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    save_file({f"other.{name}": tensor for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(RuntimeError, match=r"Expected 2 workers to finish, but worker 0 ended with status 1"):
        run_generate(**nested(**arguments | {"model": broken}, devices=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "Expected `devices` to be at least 1"),
        ({"task": ["gsm8k", "svamp"], "path": "x.jsonl"}, r"one `task` when `path` is given, .* \['gsm8k', 'svamp'\]"),
        ({"task": ["word_problems", "word_problems"]}, "unique"),
        ({"top_p": 0.0}, "Expected `top_p`"),
        ({"limit": None, "offset": 5000}, r"`offset` .* the 2,000 questions .*got 5,000"),
        ({"offset": -1}, "`offset` to be at least 0, but got -1"),
        ({"model": "/nowhere/model", "devices": 2}, r"a folder or a name on the hub, but there is no folder '/nowhere"),
    ],
)
def test_arguments_are_refused_before_a_file_is_written(arguments: dict, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_generate(**nested(**arguments | changes))
    assert not Path(arguments["store_dir"]).exists()


def test_workers_get_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [running.worker_environment(i, 3)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["4", "6", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert running.worker_environment(2, 3)["CUDA_VISIBLE_DEVICES"] == "2"
    with pytest.raises(ValueError, match="Expected `devices` to be at most 3 with 3 GPUs in sight, but got 4"):
        running.worker_environment(0, 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert int(running.worker_environment(0, 2)["OMP_NUM_THREADS"]) >= 1


def test_workers_get_the_gpus_that_one_model_is_cut_over(arguments: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines over four GPUs each once saw one GPU each, and vLLM refused to start."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started: list[str] = []

    def refuse(job: dict[str, Any], environment: dict[str, str]) -> None:
        started.append(environment["CUDA_VISIBLE_DEVICES"])
        if len(started) == 2:
            raise RuntimeError("all have started")
        return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, text=True)

    monkeypatch.setattr(running, "_start", refuse)
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)  # nothing is started
    cut = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 4}}
    with pytest.raises(RuntimeError, match="all have started"):
        run_generate(**nested(**arguments | {"limit": 60}, **cut, devices=2))
    assert started == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ValueError, match=r"at most 2 with 8 GPUs in sight, but got 3, each of which takes 4"):
        run_generate(**nested(**arguments | {"limit": 60}, **cut, devices=3))
