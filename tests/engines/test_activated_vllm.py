"""The vLLM engine with an activated adapter, on real vLLM: the base's samples, the adapter's confidences, one cache."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.activated_reference import ActivatedContract, check_half_precision, without_confidence
from support.engine_reference import QUESTIONS, Reference
from support.exported import activated
from support.module_batches import MIXED, batch_of
from support.vllm_server import small_vllm

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers import slots as transformers_sleep
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.records import Request, SamplingSettings
from selfcal_lightning.training.export import write_export

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

INSOMNIA = """
from selfcal_lightning.engines.vllm import activated as vllm_activated
from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

vllm_activated.{name} = {instead}


class Insomnia(DynamicTemperature):
    pass
"""


class TestActivated(ActivatedContract):
    refusal = EngineCrashedError

    def make_engine(self, model: str, **options: Any) -> VLLMEngine:
        return small_vllm(model, **options)

    def test_the_query_finds_what_sampling_left(self, reference: Reference, engines: Any) -> None:
        prompt = reference.prompt(" ".join(QUESTIONS))
        long = SamplingSettings(max_new_tokens=48)
        requests = [Request(str(j), prompt, long, seed=j, query=reference.chat.query) for j in range(32)]
        rates = []
        for engine in engines:
            before = engine.statistics()
            generate(engine, requests)
            after = engine.statistics()
            tokens = after["query_tokens"] - before["query_tokens"]
            assert tokens > 32 * len(prompt)
            rates.append((after["query_cached_tokens"] - before["query_cached_tokens"]) / tokens)
            prompts, cached = after["prompt_tokens"], after["prompt_cached_tokens"]
            assert (cached - before["prompt_cached_tokens"]) / (prompts - before["prompt_tokens"]) > 0.5
        assert rates[1] == rates[0] > 0.5

    def test_samples_and_queries_in_one_batch_stay_apart(self, reference: Reference, engines: Any) -> None:
        """Every step holds the tokens of both: samples are drawn while the queries of others are read."""
        query = reference.chat.query
        requests = [
            Request(f"{i}/{j}", reference.prompt(question), SamplingSettings(max_new_tokens=8 + 5 * j), j, query)
            for i, question in enumerate(QUESTIONS)
            for j in range(12)
        ]
        together = generate(engines[1], requests)
        alone = [generate(engines[1], [request])[0] for request in requests[::5]]
        for one, other in zip(alone, together[::5], strict=True):
            assert without_confidence(one)[:3] == without_confidence(other)[:3]
            assert one.yes_mass == pytest.approx(other.yes_mass, abs=1e-5)


def test_an_export_gives_the_confidences_of_its_module(tiny_model: str, tmp_path: Path) -> None:
    module = activated(tiny_model, std=0.3)
    batch = batch_of(MIXED[:8], module.chat)
    with torch.no_grad():
        wanted = module.confidence(batch)
    rows = [ids[: int(mask.sum())].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    query = module.chat.query
    engine = small_vllm(tiny_model, adapter=str(write_export(module, tmp_path / "adapter")), chat=module.chat)
    table = torch.tensor(engine.next_token_probabilities(rows, [*query.yes_ids, *query.no_ids]))
    bare = torch.tensor(engine.next_token_probabilities(rows, query.yes_ids, with_adapter=False))
    engine.close()
    yes = table[:, : len(query.yes_ids)].sum(1)
    torch.testing.assert_close(yes, wanted.yes_mass, atol=1e-4, rtol=0)
    assert (bare.sum(1) - yes).abs().max() > 0.01


def test_half_precision(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = small_vllm(tiny_model, adapter=adapter, dtype="bfloat16")
    check_half_precision(engine, reference, tiny_model, adapter)
    engine.close()


@pytest.mark.parametrize(
    ("name", "instead", "said"),
    [
        ("_awake", "lambda adapters, wakes, done, now: adapters.repeat(now)", "reads more than its query"),
        ("wakes_at", "lambda lora, prompt: vllm_activated.NEVER", "or it does not wake"),
    ],
    ids=["awake", "asleep"],
)
def test_an_adapter_that_sleeps_or_wakes_wrongly_is_refused(
    name: str, instead: str, said: str, tiny_model: str, adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"insomnia_{name}.py").write_text(INSOMNIA.format(name=name, instead=instead))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    processors = {"logits_processors": [f"insomnia_{name}:Insomnia"]}
    with pytest.raises(EngineCrashedError, match=said):
        small_vllm(tiny_model, adapter=adapter, engine_args=processors).submit([])


def test_a_base_of_other_weights_is_refused(tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = transformers_sleep.load_network

    def load_another(model: str, **settings: object) -> torch.nn.Module:
        network, noise = load(model, **settings), torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
        return network

    monkeypatch.setattr(transformers_sleep, "load_network", load_another)
    engine = small_vllm(tiny_model, adapter=adapter)
    with pytest.raises(ValueError, match=r"of the module that trained the activated adapter to 0.0001 in float32"):
        engine.submit([])
    assert engine.pid is None
