"""The vLLM engine with an activated adapter, on real vLLM: the base's samples, the adapter's confidences, one cache."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.activated_reference import SHORT, ReferencePeft, masses, without_confidence, write_adapter
from support.engine_reference import EDT, QUESTIONS, Reference
from support.module_batches import MIXED, NO_DROPOUT, batch_of

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers import contexts as transformers_sleep
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, SamplingSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)"),
]

CONTEXT = 256
INSOMNIA = """
from selfcal_lightning.engines.vllm import activated as vllm_activated
from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

vllm_activated.{name} = {instead}


class Insomnia(DynamicTemperature):
    pass
"""


def _engine(model: str, **options: object) -> VLLMEngine:
    settings = {"max_context": CONTEXT, "kv_cache_memory_bytes": 1 << 28, "max_batch": 128, "start_timeout": 300.0}
    return VLLMEngine(model, **{**settings, **options})


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)


@pytest.fixture(scope="module")
def engines(tiny_model: str, adapter: str) -> Iterator[tuple[VLLMEngine, VLLMEngine]]:
    """The engine of the base model and the one with the adapter."""
    pair = _engine(tiny_model), _engine(tiny_model, adapter=adapter)
    yield pair
    for engine in pair:
        engine.close()


@pytest.mark.parametrize("sampling", [EDT, SHORT], ids=["whole", "cut"])
def test_samples_are_the_bases_and_confidences_the_adapters(
    sampling: SamplingSettings, tiny_model: str, adapter: str, reference: Reference, engines: tuple[VLLMEngine, ...]
) -> None:
    requests = reference.requests(sampling, count=8)
    plain, asked = (generate(engine, requests) for engine in engines)
    assert [without_confidence(r) for r in asked] == [without_confidence(r) for r in plain]
    peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
    for request, response in zip(requests, asked, strict=True):
        ids = (*request.prompt_ids, *response.token_ids, *query.suffix_ids)
        wanted = masses(peft.next_probabilities(ids), query)
        assert (response.yes_mass, response.no_mass) == pytest.approx(wanted, abs=1e-5)
    moved = max(abs(one.yes_mass - other.yes_mass) for one, other in zip(asked, plain, strict=True))
    assert moved > 0.05, "the adapter matters"


def test_the_query_finds_what_sampling_left(reference: Reference, engines: tuple[VLLMEngine, ...]) -> None:
    prompt = reference.prompt(" ".join(QUESTIONS))
    long = SamplingSettings(max_new_tokens=48)
    requests = [Request(str(j), prompt, long, seed=j, query=reference.chat.query) for j in range(32)]
    rates = []
    for engine in engines:
        before = engine.statistics()
        generate(engine, requests)
        after = engine.statistics()
        tokens = after.query_tokens - before.query_tokens
        rates.append((after.query_cached_tokens - before.query_cached_tokens) / tokens)
    assert rates[1] == rates[0] > 0.5


def test_probabilities_after_a_query_are_the_adapters(
    tiny_model: str, adapter: str, reference: Reference, engines: tuple[VLLMEngine, ...]
) -> None:
    engine, suffix = engines[1], reference.chat.query.suffix_ids
    peft = ReferencePeft(tiny_model, adapter)
    prompts = [reference.prompt(question) for question in QUESTIONS]
    asked = [(*prompt, *reference.chat.response_ids(f"It is {i}."), *suffix) for i, prompt in enumerate(prompts)]
    wanted = [reference.next_probabilities(prompt) for prompt in prompts]
    wanted += [peft.next_probabilities(ids) for ids in asked]
    wanted += [reference.next_probabilities(ids) for ids in (suffix, (7, *suffix, 9))]
    for _ in range(2):  # the second time from the cache
        found = engine.next_token_probabilities([*prompts, *asked, suffix, (7, *suffix, 9)], range(100))
        bare = engine.next_token_probabilities(asked, range(100), with_adapter=False)
        for row, p in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), p[:100], atol=1e-5, rtol=0)
        for row, ids in zip(bare, asked, strict=True):
            p = reference.next_probabilities(ids)[:100]
            torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), p, atol=1e-5, rtol=0)


def test_samples_and_queries_in_one_batch_stay_apart(reference: Reference, engines: tuple[VLLMEngine, ...]) -> None:
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


def test_what_it_is_says_whose_samples_and_whose_confidences(engines: tuple[VLLMEngine, ...]) -> None:
    base, facts = (engine.describe() for engine in engines)
    assert facts.pop("activated_adapter_sha256") is not None
    assert facts == base
    assert base["adapter_sha256"] is None


def test_another_query_is_refused(
    tiny_model: str, adapter: str, reference: Reference, engines: tuple[VLLMEngine, ...]
) -> None:
    other = ChatFormat(load_tokenizer(tiny_model), query="Right? (Yes/No)")
    with pytest.raises(ValueError, match="the confidence query that the activated adapter was trained on"):
        _engine(tiny_model, adapter=adapter, chat=other).submit([])
    request = Request("a", reference.prompt(QUESTIONS[0]), SHORT, seed=0, query=other.query)
    with pytest.raises(ValueError, match="Set `query` to the text in the adapter's manifest"):
        engines[1].submit([request])
    assert generate(engines[1], [Request("b", request.prompt_ids, SHORT, seed=0)])[0].yes_mass is None


def test_an_export_gives_the_confidences_of_its_module(tiny_model: str, tmp_path: Path) -> None:
    from dataclasses import replace

    from support.exported import shaken

    from selfcal_lightning.training.export import write_export

    module = shaken(tiny_model, lora=replace(NO_DROPOUT, activated=True))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    module.eval()
    batch = batch_of(MIXED[:8], module.chat)
    with torch.no_grad():
        wanted = module.confidence(batch)
    rows = [ids[: int(mask.sum())].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    query = module.chat.query
    engine = _engine(tiny_model, adapter=str(write_export(module, tmp_path / "adapter")), chat=module.chat)
    table = torch.tensor(engine.next_token_probabilities(rows, [*query.yes_ids, *query.no_ids]))
    bare = torch.tensor(engine.next_token_probabilities(rows, query.yes_ids, with_adapter=False))
    engine.close()
    yes = table[:, : len(query.yes_ids)].sum(1)
    torch.testing.assert_close(yes, wanted.yes_mass, atol=1e-4, rtol=0)
    assert (bare.sum(1) - yes).abs().max() > 0.01


def test_half_precision(tiny_model: str, adapter: str, reference: Reference) -> None:
    requests = reference.requests(EDT, count=2)
    engine = _engine(tiny_model, adapter=adapter, dtype="bfloat16")
    asked = generate(engine, requests)
    peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
    engine.close()
    for request, response in zip(requests, asked, strict=True):
        ids = (*request.prompt_ids, *response.token_ids, *query.suffix_ids)
        assert response.yes_mass == pytest.approx(masses(peft.next_probabilities(ids), query)[0], abs=0.05)


# ---- the self-test


def test_an_adapter_that_does_nothing_is_refused(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    for file in Path(adapter).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    zeros = {name: value * (0.0 if "lora_B" in name else 1.0) for name, value in weights.items()}
    save_file(zeros, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineCrashedError, match=r"to change what follows its query, but in vLLM"):
        _engine(tiny_model, adapter=str(tmp_path)).submit([])


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
        _engine(tiny_model, adapter=adapter, engine_args=processors).submit([])


def test_another_base_model_than_the_modules_is_refused(
    tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = transformers_sleep.load_network

    def load_another(model: str, **settings: object) -> torch.nn.Module:
        network, noise = load(model, **settings), torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
        return network

    monkeypatch.setattr(transformers_sleep, "load_network", load_another)
    engine = _engine(tiny_model, adapter=adapter)
    with pytest.raises(ValueError, match=r"of the module that trained the activated adapter to 0.0001 in float32"):
        engine.submit([])
    assert engine.pid is None
