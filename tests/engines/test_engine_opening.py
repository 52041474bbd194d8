"""Opening an engine: one set of options for everybody, one name for the size of the batch, no option without effect."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from selfcal_lightning.callbacks import generation
from selfcal_lightning.callbacks.generation import EnginePlace as Place
from selfcal_lightning.callbacks.generation import SSCGeneration, engine_weights_bytes, start_engine
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.engines import opening
from selfcal_lightning.engines.opening import check_can_draw, open_engine
from selfcal_lightning.engines.sampling import running as shares
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings, memory_share
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


def test_options_that_cannot_be_and_too_few_gpus_are_refused(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    options = EngineOptions("vllm", engine_args={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"8 engine.* of `tensor_parallel_size` 2 need 16 GPUs, but got 8"):
        start_engine(options, "bundled", chat, place=Place(torch.device("cuda", 0), 0, 8))


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
    opened = Mock(side_effect=RuntimeError("opened"))
    for kind in (TransformersEngine, vllm.VLLMEngine):
        monkeypatch.setattr(kind, "__init__", opened)
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)  # nothing is started
    # A signature of the real classes is what options are held against.
    monkeypatch.setattr(opening, "_check_engine_args", lambda options, known: None)
    with pytest.raises(RuntimeError, match="opened"):
        run_generate("bundled", str(tmp_path), "word_problems", limit=1, engine=EngineSettings(name))
    callback = SSCGeneration(engine=EngineSettings(name))
    with pytest.raises(RuntimeError, match="opened"):
        start_engine(callback.engine, "bundled", chat, place=Place(torch.device("cpu")))
    by_verb, by_callback = (call.kwargs["max_batch"] for call in opened.call_args_list)
    assert by_verb is by_callback is None


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
    settings = shares.GenerationSettings(
        "m", "s", ["t"], "train", "train", 2, EngineOptions("vllm", engine_args={"max_restarts": 1}),
        SamplingSettings(), "Right?", prompt=Prompt(system="Be brief.", examples=(PromptExample("1+1?", "2"),)),
    )  # fmt: skip
    assert shares.GenerationSettings.from_plain(asdict(settings)) == settings
    assert SSCGeneration().engine == EngineOptions()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "limit", "share"),
    [
        (80, None, 0.9),  # an empty GPU: the usual bound
        (40, None, 0.47),  # .95 * .5, rounded down
        (40, 0.3, 0.3),
        (40, 0.8, 0.47),
    ],
)
def test_memory_is_what_is_free_up_to_the_limit(free: int, limit: float | None, share: float) -> None:
    assert memory_share(free * GIB, 80 * GIB, weights=GIB, limit=limit) == share


@pytest.mark.parametrize(("free", "limit", "told"), [(20, None, 0.9), (80, 0.2, 0.2)])
def test_too_little_memory_names_the_setting(free: int, limit: float | None, told: float) -> None:
    # 16 GiB of 80 and 2 % for a cache: .22 are needed.
    assert memory_share(20 * GIB, 80 * GIB, weights=15 * GIB) == 0.23
    with pytest.raises(ValueError, match=rf"at least 0\.2[67] .* the limit is {told}\. .*`engine: transformers`"):
        memory_share(free * GIB, 80 * GIB, weights=20 * GIB - (0 if limit else 1), limit=limit)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", 2 * 100 + 8 * 10),  # vLLM halves what is stored in 32 bits
        (torch.float32, "float32", 4 * 100 + 8 * 10),
        (torch.float32, "bfloat16", 2 * 100 + 8 * 10),
        (torch.bfloat16, "auto", 2 * 100 + 8 * 10),
        (torch.bfloat16, "float32", 4 * 100 + 8 * 10),
    ],
)
def test_weights_count_as_the_engine_holds_them(tmp_path: Path, stored: torch.dtype, asked: str, expected: int) -> None:
    tensors = {"weight": torch.zeros(10, 10, dtype=stored), "steps": torch.zeros(10, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert engine_weights_bytes(str(tmp_path), revision=None, dtype=asked) == expected


def test_weights_of_other_names_count_as_they_lie_on_disk(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "consolidated.safetensors")
    size = (tmp_path / "consolidated.safetensors").stat().st_size
    assert engine_weights_bytes(str(tmp_path), revision=None, dtype="float32") == size
