"""Activated adapters as PEFT writes and reads them, and the contract of engines that serve one."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.engine_contract import EDT, QUESTIONS, Reference, masses
from support.other_models import plain_copy
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, Response, SamplingSettings

SHORT = SamplingSettings(max_new_tokens=9)


def write_adapter(tiny_model: str, folder: Path, query_ids: tuple[int, ...], **changes: Any) -> str:
    """Write an adapter as PEFT does, that is woken by ``query_ids``."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    settings |= {"task_type": "CAUSAL_LM", "init_lora_weights": False, "alora_invocation_tokens": list(query_ids)}
    config = LoraConfig(**settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config)
    model.save_pretrained(folder)
    return str(folder)


class ReferencePeft:
    """PEFT's own activated forward, one whole sequence at a time."""

    def __init__(self, tiny_model: str, adapter: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter).eval()

    @torch.no_grad()
    def next_probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)


def without_confidence(response: Response) -> tuple[Any, ...]:
    return response.text, response.token_ids, response.finish, response.logprob


class ActivatedContract:
    """What an engine with an activated adapter must do: the base model's samples, the adapter's confidences.

    A test module subclasses it and overrides ``make_engine``; a ``reference`` and an ``adapter`` are fixtures.
    """

    equal_fields = 4  # of text, token ids, finish and logprob, those that are the same with and without the adapter
    refusal: type[Exception] = ValueError

    def make_engine(self, model: str, **options: Any) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def engines(self, tiny_model: str, adapter: str) -> Iterator[tuple[Engine, Engine]]:
        """The engine of the base model and the one with the adapter."""
        pair = self.make_engine(tiny_model), self.make_engine(tiny_model, adapter=adapter)
        yield pair
        for engine in pair:
            engine.close()

    @pytest.mark.parametrize("sampling", [EDT, SHORT], ids=["whole", "cut"])
    def test_samples_are_the_bases_and_confidences_the_adapters(
        self, sampling: SamplingSettings, tiny_model: str, adapter: str, reference: Reference, engines: Any
    ) -> None:
        requests = reference.requests(sampling, count=4)
        plain, asked = (generate(engine, requests) for engine in engines)
        same = slice(self.equal_fields)
        assert [without_confidence(r)[same] for r in asked] == [without_confidence(r)[same] for r in plain]
        assert {r.finish for r in asked} >= {"length" if sampling is SHORT else "stop"}
        peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
        for request, response in zip(requests, asked, strict=True):
            p = peft.next_probabilities((*request.prompt_ids, *response.token_ids, *query.suffix_ids))
            assert (response.yes_mass, response.no_mass) == pytest.approx(masses(p, query), abs=1e-5)
        moved = max(abs(one.yes_mass - other.yes_mass) for one, other in zip(asked, plain, strict=True))
        assert moved > 0.05, "the adapter matters"
        again = [[without_confidence(r)[same] for r in generate(engine, requests)] for engine in engines]
        assert again[0] == again[1], "the adapter has left nothing behind"

    def test_queries_read_the_adapter(self, tiny_model: str, adapter: str, reference: Reference, engines: Any) -> None:
        engine, suffix, peft = engines[1], reference.chat.query.suffix_ids, ReferencePeft(tiny_model, adapter)
        prompts = [reference.prompt(question) for question in QUESTIONS]
        asked = [(*prompt, *reference.chat.response_ids(f"It is {i}."), *suffix) for i, prompt in enumerate(prompts)]
        # A query without a context is none, and one that is not at the end was answered already: the base model's.
        plain = [*prompts, suffix, (7, *suffix, 9)]
        wanted = torch.stack([*map(reference.next_probabilities, plain), *map(peft.next_probabilities, asked)])[:, :100]
        base = torch.stack([reference.next_probabilities(ids) for ids in asked])[:, :100]
        for _ in range(2):  # the second time from a cache, where there is one
            found = engine.next_token_probabilities([*plain, *asked], range(100))
            bare = engine.next_token_probabilities(asked, range(100), with_adapter=False)
            # Without AVX-512 vLLM adds in another order: 1.1e-5.
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, atol=2e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(bare, dtype=torch.float64), base, atol=1e-5, rtol=0)
        assert ((wanted[len(plain) :] - base).abs().amax(1) > 0.02).all(), "the adapter matters"

    def test_what_it_is_says_whose_samples_and_whose_confidences(self, engines: Any) -> None:
        base, facts = (engine.describe() for engine in engines)
        assert base.pop("activated_adapter_sha256", None) is base["adapter_sha256"] is None
        assert facts.pop("activated_adapter_sha256") is not None
        assert facts == base
        json.dumps(facts)

    def test_another_query_is_refused(self, tiny_model: str, adapter: str, reference: Reference, engines: Any) -> None:
        other = ChatFormat(load_tokenizer(tiny_model), query="Right? (Yes/No)")
        with pytest.raises(ValueError, match="the confidence query that the activated adapter was trained on"):
            self.make_engine(tiny_model, adapter=adapter, chat=other).submit([])
        request = Request("a", reference.prompt(QUESTIONS[0]), SHORT, seed=0, query=other.query)
        with pytest.raises(ValueError, match="Set `query` to the text in the adapter's manifest"):
            engines[1].submit([request])
        assert engines[1].poll() == []
        assert generate(engines[1], [replace(request, query=None)])[0].yes_mass is None

    def test_an_adapter_that_does_nothing_is_refused(self, tiny_model: str, adapter: str, tmp_path: Path) -> None:
        folder = plain_copy(adapter, tmp_path / "nothing")
        weights = load_file(f"{folder}/adapter_model.safetensors")
        zeros = {name: value * (0.0 if "lora_B" in name else 1.0) for name, value in weights.items()}
        save_file(zeros, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(self.refusal, match=r"to change what follows its query, but"):
            self.make_engine(tiny_model, adapter=folder).submit([])


def check_half_precision(engine: Engine, reference: Reference, model: str, adapter: str) -> None:
    """Compare confidences in bfloat16 with PEFT's in float32."""
    requests, peft, query = reference.requests(EDT, count=2), ReferencePeft(model, adapter), reference.chat.query
    for request, response in zip(requests, generate(engine, requests), strict=True):
        p = peft.next_probabilities((*request.prompt_ids, *response.token_ids, *query.suffix_ids))
        assert response.yes_mass == pytest.approx(masses(p, query)[0], abs=0.05)
