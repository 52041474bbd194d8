import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_lines import nested
from support.fakes import fake_questions
from support.other_models import plain_copy
from support.processes import is_running, wait_until
from support.store_samples import stored_groups

from selfcal_lightning.callbacks import generation
from selfcal_lightning.callbacks.generation import EnginePlace as Place
from selfcal_lightning.callbacks.generation import SSCGeneration, engine_weights_bytes, start_engine
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.opening import check_can_draw, open_engine
from selfcal_lightning.engines.sampling import running
from selfcal_lightning.engines.sampling.plan import SamplePlan, load_plan
from selfcal_lightning.engines.sampling.sampler import select_share
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings, memory_share
from selfcal_lightning.evaluation.inputs import ModelInputs, ModelSide, TestSet, sample_models
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, PromptExample, load_tokenizer
from selfcal_lightning.records import QuestionSamples, SamplingSettings


def test_shards_of_machines_with_different_numbers_of_devices() -> None:
    """Machine 0 of 2 with one worker and machine 1 of 2 with three cover every question once."""
    questions = fake_questions(200)
    shards = [(0, 2), *((1 + 2 * device, 6) for device in range(3))]
    shares = [select_share(questions, shard) for shard in shards]
    assert sorted(q.id for share in shares for q in share) == sorted(q.id for q in questions)
    assert all(len(share) > 20 for share in shares)


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
    code = "import json, sys; from support.command_lines import nested;"
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
        ({"shard": "2/2"}, "Expected `shard` to be 'i/n'"),
        ({"task": ["gsm8k", "svamp"], "path": "x.jsonl"}, r"one `task` when `path` is given, .* \['gsm8k', 'svamp'\]"),
        ({"task": ["word_problems", "word_problems"]}, "unique"),
        ({"limit": None, "offset": 5000}, r"`offset` .* the 2,000 questions .*got 5,000"),
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
    started = [subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, text=True), RuntimeError("all")]
    start = Mock(side_effect=started)
    monkeypatch.setattr(running, "_start", start)
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)  # nothing is started
    settings = {**arguments, "limit": 60, "engine": "vllm", "engine_args": {"tensor_parallel_size": 4}}
    with pytest.raises(RuntimeError, match="all"):
        run_generate(**nested(**settings, devices=2))
    assert [call.args[1]["CUDA_VISIBLE_DEVICES"] for call in start.call_args_list] == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ValueError, match=r"at most 2 with 8 GPUs in sight, but got 3, each of which takes 4"):
        run_generate(**nested(**settings, devices=3))


COUNTS = [3, 0, 1, 2, 0]
IDS = [f"word_problems/test_id/{number:06d}" for number in range(len(COUNTS))]


def generate(folder: Path, plan: Path | None = None, **options: Any) -> None:
    settings = {"split": "test_id", "limit": len(COUNTS), "num_samples": 3, "max_new_tokens": 24, **options}
    run_generate(
        "bundled", str(folder), "word_problems", plan=None if plan is None else str(plan), **nested(**settings)
    )


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    SamplePlan(dict(zip(IDS, COUNTS, strict=True)), {"by": "hand"}).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_each_question_gets_what_was_planned(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "planned", plan)
    generate(tmp_path / "even")
    planned, even = texts(stored_groups(tmp_path / "planned")), texts(stored_groups(tmp_path / "even"))
    assert {name: len(found) for name, found in planned.items()} == {IDS[0]: 3, IDS[2]: 1, IDS[3]: 2}
    assert planned == {name: even[name][: len(found)] for name, found in planned.items()}, "child j of a seed is j"
    assert "the samples planned for 3 questions" in capsys.readouterr().err
    generate(tmp_path / "planned", plan)
    assert "nothing is sampled" in capsys.readouterr().err
    for share in ("0/2", "1/2"):
        generate(tmp_path / "shared", plan, shard=share)
    assert texts(stored_groups(tmp_path / "shared")) == planned, "two workers make the same"


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
    SamplePlan(dict.fromkeys(IDS, 1), {}).save(tmp_path / "other.json")
    with pytest.raises(InputError, match=r"plan: '\w+' in the store, '\w+' asked for"):
        generate(tmp_path / "planned", tmp_path / "other.json")


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
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(InputError, match="to be a plan of version 1"):
        load_plan(tmp_path / "other.json")
    with pytest.raises(InputError, match="a new file or an earlier plan"):
        SamplePlan({"a": 1}, {}).save(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "known"), [("transformers", "max_context"), ("vllm", "kv_cache_memory_bytes"), ("openai", "deadline")]
)
def test_engines_take_their_own_arguments_only(name: str, known: str, chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match=rf"`engine_args` of {name} to be among .*{known}.*\['slots'\]\.$"):
        open_engine(EngineOptions(name, engine_args={"slots": 3}), "bundled", chat=chat)
    with pytest.raises(ValueError, match=r"\['max_batch'\]; `max_batch` has an option of its own\.$"):
        open_engine(EngineOptions(name, engine_args={"max_batch": 3}), "bundled", chat=chat)


def test_options_that_cannot_be_and_too_few_gpus_are_refused(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`base_url` only with 'openai'.*'transformers'"):
        EngineOptions(base_url="http://x")
    check_can_draw(EngineOptions("openai", engine_args={"server_edt": True}), SamplingSettings())
    check_can_draw(EngineOptions("vllm"), SamplingSettings())
    with pytest.raises(ValueError, match="`engine_args` must not hold `gpu_memory_utilization`"):
        SSCGeneration(engine=EngineSettings("vllm", engine_args={"gpu_memory_utilization": 0.5}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = EngineOptions("vllm", engine_args={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"8 engine.* of `tensor_parallel_size` 2 need 16 GPUs, but got 8"):
        start_engine(options, "bundled", chat, place=Place(torch.device("cuda", 0), 0, 8))


@pytest.mark.parametrize(
    ("rank", "world", "args", "devices"),
    [
        (1, 2, {}, [1]),
        (0, 1, {"tensor_parallel_size": 4}, [0, 1, 2, 3]),
        (1, 2, {"tensor_parallel_size": 2, "engine_args": {"pipeline_parallel_size": 2}}, [4, 5, 6, 7]),
        (0, 1, {"tensor_parallel_size": 2, "devices": [6, 7]}, [6, 7]),
    ],
)
def test_the_trainers_engine_gets_the_gpus_of_its_process(
    rank: int, world: int, args: dict[str, Any], devices: list[int], chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SSCGeneration(engine=EngineSettings("vllm", engine_args=args)).engine
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    opened: list[EngineOptions] = []
    monkeypatch.setattr(generation, "open_engine", lambda options, model, chat: opened.append(options))
    start_engine(options, "bundled", chat, place=Place(torch.device("cuda", rank), rank, world))
    assert opened[0].engine_args["devices"] == devices


def test_a_settings_record_survives_the_way_to_a_worker() -> None:
    settings = running.GenerationSettings(
        "m", "s", ["t"], "train", "train", 2, EngineOptions("vllm", engine_args={"max_restarts": 1}),
        SamplingSettings(), "Right?", prompt=Prompt(system="Be brief.", examples=(PromptExample("1+1?", "2"),)),
    )  # fmt: skip
    assert running.GenerationSettings.from_plain(asdict(settings)) == settings
    assert SSCGeneration().engine == EngineOptions()


GIB = 1 << 30


def test_memory_is_what_is_free_up_to_the_limit() -> None:
    # An empty GPU: the usual bound; then .95 * .5, rounded down.
    for free, limit, share in ((80, None, 0.9), (40, None, 0.47), (40, 0.3, 0.3), (40, 0.8, 0.47)):
        assert memory_share(free * GIB, 80 * GIB, weights=GIB, limit=limit) == share


@pytest.mark.parametrize(("free", "limit", "told"), [(20, None, 0.9), (80, 0.2, 0.2)])
def test_too_little_memory_names_the_setting(free: int, limit: float | None, told: float) -> None:
    # 16 GiB of 80 and 2 % for a cache: .22 are needed.
    assert memory_share(20 * GIB, 80 * GIB, weights=15 * GIB) == 0.23
    with pytest.raises(ValueError, match=rf"at least 0\.2[67] .* the limit is {told}\. .*`engine: transformers`"):
        memory_share(free * GIB, 80 * GIB, weights=20 * GIB - (0 if limit else 1), limit=limit)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_count_as_the_engine_holds_them(tmp_path: Path, stored: torch.dtype) -> None:
    """What is stored in 32 bits is halved by vLLM where the type is left to it; integers stay what they are."""
    tensors = {"weight": torch.zeros(10, 10, dtype=stored), "steps": torch.zeros(10, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for asked, size in (("auto", 2), ("float32", 4), ("bfloat16", 2)):
        assert engine_weights_bytes(str(tmp_path), revision=None, dtype=asked) == size * 100 + 8 * 10


def test_weights_of_other_names_count_as_they_lie_on_disk(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "consolidated.safetensors")
    size = (tmp_path / "consolidated.safetensors").stat().st_size
    assert engine_weights_bytes(str(tmp_path), revision=None, dtype="float32") == size
