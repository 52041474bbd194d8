"""What every engine must do, whatever is inside it.

A test module subclasses ``EngineContract`` and overrides ``make_engine`` (and, where an engine is expensive to build,
the scope of the fixture ``engine``). The model is the float32 ``tiny_model``; every number is checked against a plain
Hugging Face forward pass that shares no code with the engines.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from support.continuation_contract import ContinuationContract
from support.engine_reference import EDT, FIXED, GREEDY, QUESTIONS, Reference

from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.engines.transformers.slots import dynamic_temperature
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.records import Request, SamplingSettings

NUM_ONE_TOKEN_SAMPLES = 1024


class EngineContract(ContinuationContract, ABC):
    """The tests. ``engine`` has room for a context of ``max_context`` tokens, which is at most the model's own."""

    @abstractmethod
    def make_engine(self, path: str) -> Engine:
        """Build the engine over ``path`` in float32 on its default device, with ``self.max_context``."""

    @pytest.fixture(scope="class")
    def engine(self, tiny_model: str) -> Iterator[Engine]:
        engine = self.make_engine(tiny_model)
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    def reference(self, tiny_model: str) -> Reference:
        return Reference(tiny_model)

    def test_responses_come_back_whole(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=4)
        responses = generate(engine, requests)
        assert [r.request_id for r in responses] == [r.id for r in requests]
        for response in responses:
            assert not set(response.token_ids) & reference.chat.end_of_turn_ids
            assert response.text == reference.chat.decode(response.token_ids)
            assert response.finish in {"stop", "length"}
            assert response.finish == "length" or len(response.token_ids) < EDT.max_new_tokens
            assert response.yes_mass is not None
            assert response.no_mass is not None
        assert any(response.finish == "stop" for response in responses)
        assert len({response.text for response in responses}) > len(QUESTIONS)

    def test_poll_is_empty_only_when_nothing_is_in_flight(self, engine: Engine, reference: Reference) -> None:
        assert engine.poll() == []
        assert engine.submit([]) == []
        assert engine.poll() == []
        expected = set(engine.submit(reference.requests(EDT, count=3)))
        seen: list[str] = []
        while len(seen) < len(expected):
            finished = engine.poll()
            assert finished
            seen += [response.request_id for response in finished]
        assert sorted(seen) == sorted(expected)
        assert engine.poll() == []

    def test_requests_may_be_added_while_others_run(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=4)
        engine.submit(requests[:6])
        responses = engine.poll()
        engine.submit(requests[6:])
        while len(responses) < len(requests):
            responses += engine.poll()
        together = {r.request_id: r.text for r in generate(engine, requests)}
        assert {r.request_id: r.text for r in responses} == together

    def test_an_id_in_flight_is_refused(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=1)
        engine.submit(requests)
        with pytest.raises(ValueError, match="0/0"):
            engine.submit(requests[:1])
        engine.cancel([request.id for request in requests])
        assert engine.poll() == []

    def test_cancelled_requests_never_come_back(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=8)
        ids = engine.submit(requests)
        early = {response.request_id for response in engine.poll()}
        dropped = set(ids[::2]) - early
        engine.cancel([*dropped, "unknown", *early])
        seen = set(early)
        while finished := engine.poll():
            seen |= {response.request_id for response in finished}
        assert seen == set(ids) - dropped
        again = [replace(request, seed=request.seed + 1) for request in requests if request.id in dropped]
        assert {r.request_id for r in generate(engine, again)} == dropped

    def test_cancelling_tells_what_was_thrown_away(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=8)
        whole = {r.request_id: len(r.token_ids) for r in generate(engine, requests)}
        thrown_away = 0
        for _ in range(20):  # on a busy machine all responses may be there before anything can be cancelled
            ids = engine.submit(requests)
            early = {response.request_id for response in engine.poll()}
            drawn = engine.cancel([*ids, "unknown"])
            assert drawn.keys() <= set(ids) - early, "what was delivered is not thrown away"
            assert all(0 <= count <= whole[name] for name, count in drawn.items())
            thrown_away += sum(drawn.values())
            if thrown_away:
                break
        assert thrown_away > 0
        assert engine.cancel(ids) == {}
        assert engine.poll() == []

    def test_text_does_not_depend_on_the_batch_or_the_order(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(EDT, count=6)
        together = {r.request_id: r for r in generate(engine, requests)}
        backwards = {r.request_id: r for r in generate(engine, requests[::-1])}
        alone = [generate(engine, [request])[0] for request in requests[::5]]
        assert {i: r.text for i, r in together.items()} == {i: r.text for i, r in backwards.items()}
        for response in alone:
            other = together[response.request_id]
            assert (response.token_ids, response.finish) == (other.token_ids, other.finish)
            assert response.logprob == pytest.approx(other.logprob, abs=1e-4)

    @pytest.mark.parametrize("sampling", [EDT, FIXED, replace(FIXED, top_p=0.8), GREEDY], ids=["edt", "t", "p", "0"])
    def test_logprob_is_untempered(self, engine: Engine, reference: Reference, sampling: SamplingSettings) -> None:
        requests = reference.requests(sampling, count=2)
        for request, response in zip(requests, generate(engine, requests), strict=True):
            expected = reference.logprob(request.prompt_ids, response.token_ids)
            assert response.logprob == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("max_new_tokens", [5, 64])
    def test_masses_are_those_of_plain_logits(self, engine: Engine, reference: Reference, max_new_tokens: int) -> None:
        requests = reference.requests(replace(EDT, max_new_tokens=max_new_tokens), count=3)
        for request, response in zip(requests, generate(engine, requests), strict=True):
            expected = reference.masses(request.prompt_ids + response.token_ids)
            assert (response.yes_mass, response.no_mass) == pytest.approx(expected, abs=1e-5)

    def test_queries_may_differ_within_a_batch(self, engine: Engine, reference: Reference) -> None:
        query = reference.chat.query
        longer = replace(query, suffix_ids=query.suffix_ids * 2, yes_ids=query.no_ids, no_ids=query.yes_ids)
        requests = reference.requests(EDT, count=3)
        mixed = [replace(r, query=q) for r, q in zip(requests, [query, longer, None] * 3, strict=True)]
        for request, response in zip(mixed, generate(engine, mixed), strict=True):
            if request.query is None:
                assert (response.yes_mass, response.no_mass) == (None, None)
                continue
            yes, _ = reference.masses(request.prompt_ids + response.token_ids, request.query)
            assert response.yes_mass == pytest.approx(yes, abs=1e-5)

    def test_settings_may_differ_within_a_batch(self, engine: Engine, reference: Reference) -> None:
        settings = [EDT, FIXED, GREEDY, replace(FIXED, top_p=0.5), replace(EDT, max_new_tokens=7)]
        base = reference.requests(EDT, count=5)
        mixed = [replace(r, sampling=settings[i % len(settings)]) for i, r in enumerate(base)]
        alone = [generate(engine, mixed[i :: len(settings)]) for i in range(len(settings))]
        expected = {response.request_id: response.text for group in alone for response in group}
        assert {r.request_id: r.text for r in generate(engine, mixed)} == expected

    def test_temperature_zero_is_greedy(self, engine: Engine, reference: Reference) -> None:
        requests = reference.requests(replace(GREEDY, max_new_tokens=12), count=1)
        for request, response in zip(requests, generate(engine, requests), strict=True):
            ids = list(request.prompt_ids)
            for token in response.token_ids:
                assert token == reference.logits(ids)[-1].argmax().item()
                ids.append(token)

    @pytest.mark.parametrize("sampling", [EDT, FIXED, replace(EDT, top_p=0.6)], ids=["edt", "fixed", "edt_top_p"])
    def test_first_tokens_are_tempered(self, engine: Engine, reference: Reference, sampling: SamplingSettings) -> None:
        uneven = reference.chat.response_ids("First 978-689=")  # .58, .20, .14, .06
        prompt = reference.prompt(QUESTIONS[0]) + uneven
        one = replace(sampling, max_new_tokens=1)
        requests = [Request(str(j), prompt, one, seed=j) for j in range(NUM_ONE_TOKEN_SAMPLES)]
        drawn = Counter(r.token_ids[0] if r.token_ids else -1 for r in generate(engine, requests))
        expected = _reference_tempered(reference.logits(prompt)[-1], sampling)
        ends = sorted(reference.chat.end_of_turn_ids)
        cells = {-1: expected[ends].sum().item()} | {i: p for i, p in enumerate(expected.tolist()) if i not in ends}
        assert all(cells[token] > 0.0 for token in drawn)
        assert _chi_square_p_value(drawn, cells) > 1e-3
        wrong = reference.logits(prompt)[-1].softmax(-1)
        assert _chi_square_p_value(drawn, dict(enumerate(wrong.tolist()))) < 1e-3

    def test_max_new_tokens_is_a_limit(self, engine: Engine, reference: Reference) -> None:
        for limit in (1, 3):
            responses = generate(engine, reference.requests(replace(EDT, max_new_tokens=limit), count=2))
            assert all(len(response.token_ids) == limit for response in responses)
            assert {response.finish for response in responses} == {"length"}
        assert len(responses[0].token_ids) == 3

    def test_the_query_keeps_its_room_when_the_context_ends(self, engine: Engine, reference: Reference) -> None:
        room = 4
        suffix = reference.chat.query.suffix_ids
        filler = reference.prompt(QUESTIONS[0])
        prompt = (filler * (self.max_context // len(filler) + 1))[-(engine.max_context - len(suffix) - room) :]
        requests = [Request(str(j), prompt, EDT, seed=j, query=reference.chat.query) for j in range(3)]
        for response in generate(engine, requests):
            assert len(response.token_ids) <= room
            assert (response.finish == "length") == (len(response.token_ids) == room)
            assert response.yes_mass == pytest.approx(reference.masses(prompt + response.token_ids)[0], abs=1e-5)

    def test_a_prompt_that_cannot_fit_is_refused_by_name(self, engine: Engine, reference: Reference) -> None:
        assert engine.max_context == self.max_context
        prompt = reference.prompt(QUESTIONS[0]) * 20
        fits = reference.requests(EDT, count=1)
        with pytest.raises(ValueError, match=rf"{len(prompt[: self.max_context])}.*{self.max_context}"):
            engine.submit([*fits, Request("long", prompt[: self.max_context], EDT, seed=0)])
        assert engine.poll() == []

    def test_next_token_probabilities_are_those_of_a_plain_forward(self, engine: Engine, reference: Reference) -> None:
        prompts = [reference.prompt(question) for question in QUESTIONS]
        prompts += [prompts[0][:1], prompts[1] + reference.chat.response_ids("First 5+3=8."), prompts[0]]
        # More than a request to vLLM may hold, some of them twice.
        ids = [*reference.chat.query.yes_ids, *range(len(reference.next_probabilities(prompts[0])))]
        table = engine.next_token_probabilities(prompts, ids)
        for prompt, row in zip(prompts, table, strict=True):
            expected = reference.next_probabilities(prompt)[ids]
            torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), expected, atol=1e-5, rtol=0.0)
        assert engine.next_token_probabilities([], ids) == []

    def test_describe_names_the_weights(self, engine: Engine, tiny_model: str) -> None:
        assert engine.batch_size >= 1
        facts: dict[str, Any] = engine.describe()
        assert {"engine", "model", "revision", "dtype", "weights_sha256", "adapter_sha256"} <= set(facts)
        assert facts["model"] == tiny_model
        assert facts["dtype"] == "float32"
        assert facts["weights_sha256"] == weights_sha256(tiny_model)
        assert facts["adapter_sha256"] is None

    def test_closing_twice_is_allowed(self, tiny_model: str) -> None:
        engine = self.make_engine(tiny_model)
        engine.close()
        engine.close()


def _reference_tempered(logits: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """Return the distribution that a token is drawn from, written out for one row."""
    temperature, scale = sampling.temperature, sampling.edt_scale
    if scale is not None:
        temperature = dynamic_temperature(logits, base=temperature, scale=scale, theta=sampling.edt_theta).item()
    p = (logits / temperature).softmax(-1)
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= sampling.top_p:
            break
        kept[token] = p[token]
        mass += p[token].item()
    return kept / kept.sum()


def _chi_square_p_value(drawn: Counter[int], cells: dict[int, float]) -> float:
    """Return the p-value of the counts, with cells of fewer than five expected draws pooled."""
    total = sum(drawn.values())
    common = {token: p for token, p in cells.items() if p * total >= 5.0}
    observed = [drawn[token] for token in common]
    expected = [p * total for p in common.values()]
    if (rest := total - sum(expected)) > 1.0:
        observed.append(total - sum(observed))
        expected.append(rest)
    scaled = [e * sum(observed) / sum(expected) for e in expected]
    return float(stats.chisquare(observed, scaled).pvalue) if len(scaled) >= 2 else 1.0
