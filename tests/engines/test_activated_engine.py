"""The transformers engine with an activated adapter: the base model's samples, the adapter's confidences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.activated_reference import SHORT, ReferencePeft, masses, without_confidence, write_adapter
from support.engine_reference import EDT, QUESTIONS, Reference
from torch.utils._python_dispatch import TorchDispatchMode

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers import engine as engine_module
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Dtype, Request, SamplingSettings


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)


@pytest.mark.parametrize("sampling", [EDT, SHORT], ids=["whole", "cut"])
@pytest.mark.parametrize("max_batch", [5, 64])
def test_samples_are_the_bases_and_confidences_the_adapters(
    sampling: SamplingSettings, max_batch: int, tiny_model: str, adapter: str, reference: Reference
) -> None:
    requests = reference.requests(sampling, count=4)
    base_engine = TransformersEngine(tiny_model, dtype="float32", max_batch=max_batch)
    plain = generate(base_engine, requests)
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32", max_batch=max_batch)
    asked = generate(engine, requests)
    assert [without_confidence(r) for r in asked] == [without_confidence(r) for r in plain]
    assert {r.finish for r in asked} >= {"length" if sampling is SHORT else "stop"}
    peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
    moved = []
    for request, response, base in zip(requests, asked, plain, strict=True):
        ids = (*request.prompt_ids, *response.token_ids, *query.suffix_ids)
        wanted = masses(peft.next_probabilities(ids), query)
        assert (response.yes_mass, response.no_mass) == pytest.approx(wanted, abs=1e-5)
        moved.append(abs(response.yes_mass - base.yes_mass))
    assert max(moved) > 0.05, "the adapter matters"
    # The adapter has left nothing behind in the slots, whose prompts are used again.
    again = [[without_confidence(r) for r in generate(one, requests)] for one in (base_engine, engine)]
    assert again[0] == again[1]


def test_nothing_is_encoded_twice(tiny_model: str, adapter: str, reference: Reference) -> None:
    fed: dict[bool, int] = {True: 0, False: 0}

    class Spy(CachedModel):
        def extend(self, slots: torch.Tensor, starts: torch.Tensor, ids: torch.Tensor, *args: Any, **kw: Any) -> Any:
            fed[kw.get("awake", False)] += ids.numel() if ids.shape[1] > 1 or kw.get("awake") else 0
            return super().extend(slots, starts, ids, *args, **kw)

    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32", max_batch=64)
    engine._model = Spy(engine._model.network)
    requests = reference.requests(EDT, count=4)
    generate(engine, requests)
    longest = max(len(reference.prompt(question)) for question in QUESTIONS)
    assert fed[True] == len(requests) * len(reference.chat.query.suffix_ids)
    assert fed[False] == len(QUESTIONS) * (longest - 1), "prompts alone, without their last tokens"


def test_probabilities_after_a_query_are_the_adapters(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32", max_batch=2)
    peft, suffix = ReferencePeft(tiny_model, adapter), reference.chat.query.suffix_ids
    prompts = [reference.prompt(question) for question in QUESTIONS]
    asked = [(*prompt, *reference.chat.response_ids(f"It is {i}."), *suffix) for i, prompt in enumerate(prompts)]
    found = engine.next_token_probabilities([*prompts, *asked, suffix, (7, *suffix, 9)], range(100))
    wanted = [reference.next_probabilities(prompt) for prompt in prompts]
    wanted += [peft.next_probabilities(ids) for ids in asked]
    # A query without a context is none, and one that is not at the end was answered already: the base model's.
    wanted += [reference.next_probabilities(ids) for ids in (suffix, (7, *suffix, 9))]
    for row, p in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), p[:100], atol=1e-5, rtol=0)
    assert all((peft.next_probabilities(ids) - reference.next_probabilities(ids)).abs().max() > 0.02 for ids in asked)


def test_what_responses_share_is_read_once(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    fed = []
    cached = engine._require_model()
    cached.network.register_forward_pre_hook(
        lambda _, args, given: fed.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    prompt, suffix = reference.prompt(QUESTIONS[0]), reference.chat.query.suffix_ids
    responses = [reference.chat.response_ids(text) for text in ("", "It is 1.", "It is 12, or 3.", "It is 1.5")]
    asked = [(*prompt, *response, *suffix) for response in responses]
    asked += [(*reference.prompt(QUESTIONS[1]), *suffix), (7, *suffix)]
    found = torch.tensor(engine.next_token_probabilities(asked, range(100)), dtype=torch.float64)
    stems, rests, queries = fed
    assert stems[0] == 3, "two prompts, and what has none"
    assert rests == (3, max(map(len, responses)))
    assert queries == (len(asked), len(suffix))
    peft = ReferencePeft(tiny_model, adapter)
    wanted = torch.stack([peft.next_probabilities(ids)[:100] for ids in asked])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_layer_is_not_copied_for_every_row(
    dtype: Dtype, tiny_model: str, adapter: str, reference: Reference
) -> None:
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype=dtype)
    asked = [(*reference.prompt(question), *reference.chat.query.suffix_ids) for question in QUESTIONS]
    largest = 0

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            if function is torch.ops.aten.bmm.default:
                largest = max(largest, args[1].numel())
            return function(*args, **(kwargs or {}))

    with Spy():
        engine.next_token_probabilities(asked, range(100))
        generate(engine, reference.requests(SHORT, count=2))
    head = engine._require_model().network.get_output_embeddings().weight
    assert largest < head.numel(), "a product of a row with its own copy of the weights"


def test_without_its_adapter_it_is_the_base_model(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    asked = [(*reference.prompt(question), *reference.chat.query.suffix_ids) for question in QUESTIONS]
    awake = engine.next_token_probabilities(asked, range(100))
    bare = engine.next_token_probabilities(asked, range(100), with_adapter=False)
    assert engine.next_token_probabilities(asked, range(100)) == awake, "it wakes again"
    for row, ids in zip(bare, asked, strict=True):
        wanted = reference.next_probabilities(ids)[:100]
        torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), wanted, atol=1e-5, rtol=0)


def test_half_precision(tiny_model: str, adapter: str, reference: Reference) -> None:
    requests = reference.requests(EDT, count=2)
    plain = generate(TransformersEngine(tiny_model, dtype="bfloat16", device="cpu"), requests)
    asked = generate(TransformersEngine(tiny_model, adapter=adapter, dtype="bfloat16", device="cpu"), requests)
    assert [without_confidence(r) for r in asked] == [without_confidence(r) for r in plain]
    peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
    for request, response in zip(requests, asked, strict=True):
        ids = (*request.prompt_ids, *response.token_ids, *query.suffix_ids)
        assert response.yes_mass == pytest.approx(masses(peft.next_probabilities(ids), query)[0], abs=0.05)


def test_what_it_is_says_whose_samples_and_whose_confidences(tiny_model: str, adapter: str) -> None:
    base = TransformersEngine(tiny_model, dtype="float32").describe()
    facts = TransformersEngine(tiny_model, adapter=adapter, dtype="float32").describe()
    assert base["activated_adapter_sha256"] is None
    assert facts.pop("activated_adapter_sha256") is not None
    assert facts.items() <= base.items()
    json.dumps(facts)


def test_another_query_is_refused(tiny_model: str, adapter: str, reference: Reference) -> None:
    other = ChatFormat(load_tokenizer(tiny_model), query="Right? (Yes/No)")
    with pytest.raises(ValueError, match="the confidence query that the activated adapter was trained on"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32", chat=other)
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    request = Request("a", reference.prompt(QUESTIONS[0]), SHORT, seed=0, query=other.query)
    with pytest.raises(ValueError, match="Set `query` to the text in the adapter's manifest"):
        engine.submit([request])
    assert engine.poll() == []
    asleep = Request("b", reference.prompt(QUESTIONS[0]), SHORT, seed=0)
    assert generate(engine, [asleep])[0].yes_mass is None


# ---- the self-test


def test_an_adapter_that_does_nothing_is_refused(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    for file in Path(adapter).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    zeros = {name: value * (0.0 if "lora_B" in name else 1.0) for name, value in weights.items()}
    save_file(zeros, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="to change what follows its query, but it changes nothing"):
        TransformersEngine(tiny_model, adapter=str(tmp_path), dtype="float32")


def test_an_adapter_that_does_not_sleep_is_refused(
    tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfcal_lightning.models import activated as activation

    switch = activation._switch
    monkeypatch.setattr(activation, "_switch", lambda layers, asleep: switch(layers[1:], asleep=asleep))
    with pytest.raises(ValueError, match="to leave the base model as it is while it sleeps, but logits differ"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32")


def test_an_adapter_that_never_wakes_is_refused(tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfcal_lightning.engines.transformers import model as transformers_model

    network = load_network(tiny_model, revision=None, adapter=adapter, dtype="float32", device="cpu")
    monkeypatch.setattr(engine_module, "load_network", lambda *args, **settings: network)
    TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    asleep = transformers_model.adapter_asleep
    monkeypatch.setattr(transformers_model, "adapter_asleep", lambda model, asleep_=True, **_: asleep(model))
    with pytest.raises(ValueError, match="but got one that never wakes"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
