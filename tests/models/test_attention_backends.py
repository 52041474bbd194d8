"""No call of PyTorch's attention may choose cuDNN, which builds a plan for every shape; ours never repeat."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.module_batches import MIXED, batch_of, module_of
from torch.backends import cuda

from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Question, QuestionSamples, Request, Sample, SamplingSettings
from selfcal_lightning.training.rounds import Probe, _network_logprobs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, tuple[int, ...]]]]:
    """Whether cuDNN was allowed, and the shape of the keys, at every call of PyTorch's attention."""
    seen: list[tuple[bool, tuple[int, ...]]] = []
    plain, allowed = torch.nn.functional.scaled_dot_product_attention, cuda.cudnn_sdp_enabled()

    def spy(query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.append((cuda.cudnn_sdp_enabled(), tuple(key.shape)))
        return plain(query, key, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    # PyTorch's own masks know the function by its identity: what a look at a model finds here must not outlive the spy.
    monkeypatch.setattr("selfcal_lightning.models.packing._PROBED", {})
    cuda.enable_cudnn_sdp(True)
    yield seen
    cuda.enable_cudnn_sdp(allowed)


def _is_pinned(calls: list[tuple[bool, tuple[int, ...]]]) -> bool:
    return bool(calls) and not any(allowed for allowed, _ in calls)


def test_the_engine_leaves_cudnn_out_and_has_few_widths(tiny_model: str, chat: ChatFormat, calls: list[Any]) -> None:
    """Each token once made a new shape: 150 of them here."""
    engine = TransformersEngine(tiny_model, chat=chat, max_batch=8)
    assert cuda.cudnn_sdp_enabled(), "making an engine changes nothing for others"
    sampling = SamplingSettings(max_new_tokens=150, temperature=2.0, edt_scale=None)
    prompt = chat.prompt_ids([Message("user", "What is 5 + 3?")])
    generate(engine, [Request(str(i), prompt, sampling, seed=i, query=chat.query) for i in range(8)])
    widths = {shape[2] for _, shape in calls}
    assert len(widths) <= 4
    assert all(width % 64 == 0 for width in widths)
    engine.next_token_probabilities([prompt], [5])
    assert _is_pinned(calls)
    assert cuda.cudnn_sdp_enabled()


def test_the_other_readers_leave_cudnn_out(tiny_model: str, chat: ChatFormat, calls: list[Any]) -> None:
    network = load_network(tiny_model, revision=None, adapter=None, dtype="float32", device="cpu")
    prompt, response = chat.prompt_ids([Message("user", "1 + 2?")]), chat.response_ids("It is 3.")
    sample = Sample("q", 0, 0, "It is 3.", response, "stop", "3", True)
    entry = QuestionSamples(Question("q", "word_problems", ()), (sample,), "test", prompt)
    TokenReader(network, chat).read([entry])
    assert _is_pinned(calls)
    calls.clear()
    _network_logprobs(network, [Probe((*prompt, *response), (len(prompt),))])
    assert _is_pinned(calls)
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_training_on_a_gpu_leaves_cudnn_out_in_the_backward_pass_too(
    tiny_model: str, chat: ChatFormat, calls: list[Any], gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tiny_model, gradient_checkpointing=gradient_checkpointing)
    assert cuda.cudnn_sdp_enabled()
    with monkeypatch.context() as patch:  # the model stays where this machine has memory
        patch.setattr(type(module), "device", torch.device("cuda", 0))
        patch.setattr(
            "selfcal_lightning.models.causal_lm.load_causal_lm",
            lambda *names, device, **rest: load_causal_lm(*names, **rest),
        )
        module.configure_model()
    assert not cuda.cudnn_sdp_enabled()
    calibration, generation, _ = module._losses(batch_of(MIXED[:4], chat))
    forward = len(calls)
    (calibration + generation).backward()
    assert (len(calls) > forward) == gradient_checkpointing, "activations are recomputed"
    assert _is_pinned(calls)
