"""Opening an engine: one set of options for everybody, one name for the size of the batch, no option without effect."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from selfcal_lightning.callbacks import generation
from selfcal_lightning.callbacks.generation import EnginePlace as Place
from selfcal_lightning.callbacks.generation import SSCGeneration, start_engine
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.engines import opening
from selfcal_lightning.engines.opening import check_can_draw, open_engine
from selfcal_lightning.engines.sampling import running as shares
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm import engine as vllm
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, PromptExample
from selfcal_lightning.records import SamplingSettings


@pytest.mark.parametrize(
    ("name", "known"), [("transformers", "max_context"), ("vllm", "kv_cache_memory_bytes"), ("openai", "deadline")]
)
def test_engines_take_their_own_arguments_only(name: str, known: str, chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match=rf"`engine_args` of {name} to be among .*{known}.*\['slots'\]\.$"):
        open_engine(EngineOptions(name, engine_args={"slots": 3}), "bundled", chat=chat)
    with pytest.raises(ValueError, match=r"\['max_batch'\]; `max_batch` has an option of its own\.$"):
        open_engine(EngineOptions(name, engine_args={"max_batch": 3}), "bundled", chat=chat)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`base_url` only with 'openai'.*'transformers'"):
        EngineOptions(base_url="http://x")
    with pytest.raises(ValueError, match="`max_batch` to be at least 1, but got 0"):
        EngineOptions(max_batch=0)
    with pytest.raises(ValueError, match="Set `edt_scale` to null"):
        check_can_draw(EngineOptions("openai"), SamplingSettings())
    check_can_draw(EngineOptions("openai", engine_args={"server_edt": True}), SamplingSettings())
    check_can_draw(EngineOptions("vllm"), SamplingSettings())
    with pytest.raises(ValueError, match="`engine_args` must not hold `gpu_memory_utilization`"):
        SSCGeneration(engine=EngineSettings("vllm", engine_args={"gpu_memory_utilization": 0.5}))


def test_the_bundled_model_is_known_by_its_name(tiny_model: str) -> None:
    """It once waited for a hub, which no test can reach."""
    engine = TransformersEngine("bundled", dtype="float32", device="cpu")
    assert engine.describe()["model"] == tiny_model
    engine.close()


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_every_way_to_one_engine_gives_one_size_of_its_batch(
    name: str, tiny_model: str, tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` once ran 64 sequences where the trainer's own engine of the same name ran 256."""
    opened: list[dict[str, Any]] = []

    def remember(self: object, model: str, **arguments: Any) -> None:
        opened.append({"model": model, **arguments})
        raise RuntimeError("opened")

    monkeypatch.setattr(TransformersEngine, "__init__", remember)
    monkeypatch.setattr(vllm.VLLMEngine, "__init__", remember)
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)  # nothing is started
    # A signature of the real classes is what options are held against.
    monkeypatch.setattr(opening, "_check_engine_args", lambda options, known: None)
    with pytest.raises(RuntimeError, match="opened"):
        run_generate("bundled", str(tmp_path), "word_problems", limit=1, engine=EngineSettings(name))
    callback = SSCGeneration(engine=EngineSettings(name))
    with pytest.raises(RuntimeError, match="opened"):
        start_engine(callback.engine, "bundled", chat, place=Place(torch.device("cpu")))
    by_verb, by_callback = (arguments["max_batch"] for arguments in opened)
    assert by_verb is by_callback is None


@pytest.mark.parametrize(
    ("local_rank", "processes", "engine_args", "devices"),
    [
        (1, 2, {}, [1]),
        (0, 1, {"tensor_parallel_size": 4}, [0, 1, 2, 3]),
        (1, 2, {"tensor_parallel_size": 2, "engine_args": {"pipeline_parallel_size": 2}}, [4, 5, 6, 7]),
        (0, 1, {"tensor_parallel_size": 2, "devices": [6, 7]}, [6, 7]),
    ],
)
def test_the_trainers_engine_gets_the_gpus_of_its_process(
    local_rank: int,
    processes: int,
    engine_args: dict[str, Any],
    devices: list[int],
    chat: ChatFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = SSCGeneration(engine=EngineSettings("vllm", engine_args=engine_args)).engine
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    opened: list[EngineOptions] = []
    monkeypatch.setattr(generation, "open_engine", lambda options, model, chat: opened.append(options))
    start_engine(options, "bundled", chat, place=Place(torch.device("cuda", local_rank), local_rank, processes))
    assert opened[0].engine_args["devices"] == devices


def test_engines_that_find_too_few_gpus_are_refused(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = EngineOptions("vllm", engine_args={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"8 engine.* of `tensor_parallel_size` 2 need 16 GPUs, but got 8"):
        start_engine(options, "bundled", chat, place=Place(torch.device("cuda", 0), 0, 8))


def test_a_settings_record_survives_the_way_to_a_worker() -> None:
    settings = shares.GenerationSettings(
        "m", "s", ["t"], "train", "train", 2, EngineOptions("vllm", engine_args={"max_restarts": 1}),
        SamplingSettings(), "Right?", prompt=Prompt(system="Be brief.", examples=(PromptExample("1+1?", "2"),)),
    )  # fmt: skip
    assert shares.GenerationSettings.from_plain(asdict(settings)) == settings
    assert SSCGeneration().engine == EngineOptions()
