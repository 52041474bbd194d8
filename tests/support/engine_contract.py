"""What every engine must do, whatever is inside it; and the plain forward pass that it is held against.

A test module subclasses ``EngineContract`` and overrides ``make_engine`` (and, where an engine is expensive to build,
the scope of the fixture ``engine``). The model is the float32 ``tiny_model``; every number is checked against a plain
Hugging Face forward pass that shares no code with the engines.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.engines.transformers.slots import dynamic_temperature
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.records import ConfidenceQuery, Message, Request, SamplingSettings

NUM_ONE_TOKEN_SAMPLES = 1024
QUESTIONS = (
    "Ivan has 76 plums. Zoe has 78 more than Ivan. Paul has 58 more than Zoe. How many plums do Zoe and Paul have?",
    "Mia has 5 pens. Tom has 3 more than Mia. How many pens do Mia and Tom have together?",
    "There are 12 apples. 4 apples are eaten. How many are left?",
)
EDT = SamplingSettings(max_new_tokens=64)
FIXED = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)
GREEDY = SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=64)


def masses(p: torch.Tensor, query: ConfidenceQuery) -> tuple[float, float]:
    """Return the masses on Yes and on No of probabilities [V]."""
    return p[list(query.yes_ids)].sum().item(), p[list(query.no_ids)].sum().item()


class Reference:
    """The model as a plain forward pass, one sequence at a time."""

    def __init__(self, path: str) -> None:
        self.chat = ChatFormat(load_tokenizer(path))
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after every token, [len(ids), vocabulary], float64."""
        return self.model(torch.tensor([list(ids)])).logits[0].double()

    def next_probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        return self.logits(ids)[-1].softmax(-1)

    def masses(self, context: Sequence[int], query: ConfidenceQuery | None = None) -> tuple[float, float]:
        """Return the masses on Yes and on No after a query that follows ``context``."""
        query = query or self.chat.query
        return masses(self.next_probabilities((*context, *query.suffix_ids)), query)

    def logprob(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        logits = self.logits((*context, *tokens))[len(context) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).sum().item()

    def prompt(self, question: str) -> tuple[int, ...]:
        return self.chat.prompt_ids([Message("user", question)])

    def requests(self, sampling: SamplingSettings, *, count: int) -> list[Request]:
        """Return ``count`` requests for each question, ids "q/j"."""
        return [
            Request(f"{q}/{j}", self.prompt(question), sampling, seed=1000 * q + j, query=self.chat.query)
            for q, question in enumerate(QUESTIONS)
            for j in range(count)
        ]


class EngineContract(ABC):
    """The tests. ``engine`` has room for a context of ``max_context`` tokens, which is at most the model's own."""

    max_context = 256
    draws_by_position = False  # whether token i of a response is drawn with number i of its stream, wherever it begins

    @abstractmethod
    def make_engine(self, path: str) -> Engine:
        """Build the engine over ``path`` in float32 on its default device, with ``self.max_context``."""

    @pytest.fixture(scope="class")
    def engine(self, tiny_model: str) -> Iterator[Engine]:
        engine = self.make_engine(tiny_model)
        yield engine
        engine.close()

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

    @pytest.mark.parametrize("prefix", ["", "First 76+78=154. So "])
    def test_cancelling_tells_what_was_thrown_away(self, engine: Engine, reference: Reference, prefix: str) -> None:
        """It is what was drawn: a prefix is no part of it."""
        prefix_ids = reference.chat.response_ids(prefix)
        requests = [replace(request, prefix_ids=prefix_ids) for request in reference.requests(EDT, count=8)]
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

    def test_a_continuation_is_the_rest_of_the_response(self, engine: Engine, reference: Reference) -> None:
        """From several places, many at once, some of them several times; drawn ones too, where drawn by position."""
        drawn = (EDT, replace(FIXED, top_p=0.8)) if self.draws_by_position else ()
        for sampling in (GREEDY, *drawn):
            requests = reference.requests(sampling, count=2)
            whole = {response.request_id: response for response in generate(engine, requests)}
            continued = [
                (whole[request.id], replace(request, id=f"{request.id}/{cut}/{copy}", prefix_ids=ids[:cut]))
                for request in requests
                for ids in [whole[request.id].token_ids]
                for cut in (1, 7, len(ids) - 1)
                for copy in range(2)
            ]
            responses = generate(engine, [request for _, request in continued])
            for (full, request), response in zip(continued, responses, strict=True):
                assert request.prefix_ids + response.token_ids == full.token_ids
                assert response.finish == full.finish
                assert response.text == reference.chat.decode(response.token_ids)
                logprob = reference.logprob(request.context_ids, response.token_ids)
                assert response.logprob == pytest.approx(logprob, abs=1e-4)
                assert (response.yes_mass, response.no_mass) == pytest.approx((full.yes_mass, full.no_mass), abs=1e-5)

    def test_continuations_do_not_depend_on_the_batch(self, engine: Engine, reference: Reference) -> None:
        plain = reference.requests(EDT, count=4)
        prefixes = (reference.chat.response_ids("First 5+3=8."), reference.chat.response_ids("So"), ())
        mixed = [replace(request, prefix_ids=prefixes[i % 3]) for i, request in enumerate(plain)]
        together = {r.request_id: r.token_ids for r in generate(engine, mixed)}
        assert {r.request_id: r.token_ids for r in generate(engine, mixed[::-1])} == together
        assert all(generate(engine, [request])[0].token_ids == together[request.id] for request in mixed[::3])
        expected = {r.request_id: r.token_ids for r in generate(engine, plain[2::3])}
        assert {name: together[name] for name in expected} == expected, "those without a prefix are what they were"
        assert all(len(together[r.id]) <= EDT.max_new_tokens - len(r.prefix_ids) for r in mixed)

    def test_a_prefix_counts_in_the_longest_response(self, engine: Engine, reference: Reference) -> None:
        prefix = reference.chat.response_ids("First 76+78=154. So ")
        limited = replace(EDT, max_new_tokens=len(prefix) + 3)
        requests = [replace(r, prefix_ids=prefix) for r in reference.requests(limited, count=2)]
        responses = generate(engine, requests)
        assert {len(response.token_ids) for response in responses} == {3}
        assert {response.finish for response in responses} == {"length"}

    @pytest.mark.parametrize("sampling", [GREEDY, EDT], ids=["greedy", "edt"])
    def test_responses_end_with_a_step(self, engine: Engine, reference: Reference, sampling: SamplingSettings) -> None:
        """Step by step a response comes to its end; drawn by position, it is the one that is drawn at once."""
        (stop,) = reference.chat.response_ids("76.")[-1:]
        requests = reference.requests(sampling, count=2)
        whole = {r.request_id: r for r in generate(engine, requests)}
        walking, ended = [replace(request, step_ids=(stop, 0)) for request in requests], {}
        while walking:
            following = []
            for request, response in zip(walking, generate(engine, walking), strict=True):
                tokens = request.prefix_ids + response.token_ids
                assert stop not in response.token_ids[:-1]
                assert response.yes_mass == pytest.approx(reference.masses(request.prompt_ids + tokens)[0], abs=1e-5)
                if response.finish == "step":
                    assert response.token_ids[-1] == stop
                    following.append(replace(request, prefix_ids=tokens))
                else:
                    ended[request.id] = (tokens, response.finish, len(request.prefix_ids) > 0)
            walking = following
        assert any(has_steps for *_, has_steps in ended.values())
        if self.draws_by_position or sampling is GREEDY:
            assert {name: end[:2] for name, end in ended.items()} == {
                name: (response.token_ids, response.finish) for name, response in whole.items()
            }

    def test_a_step_that_ends_at_the_limit_is_cut_by_it(self, engine: Engine, reference: Reference) -> None:
        (stop,) = reference.chat.response_ids("76.")[-1:]
        (request,) = reference.requests(GREEDY, count=1)[:1]
        (step,) = generate(engine, [replace(request, step_ids=(stop,))])
        assert step.finish == "step"
        limit = replace(GREEDY, max_new_tokens=len(step.token_ids))
        (cut,) = generate(engine, [replace(request, step_ids=(stop,), sampling=limit)])
        assert (cut.token_ids, cut.finish) == (step.token_ids, "length"), "nothing may follow it"

    def test_a_prefix_that_nothing_can_follow_is_refused(self, engine: Engine, reference: Reference) -> None:
        (request,) = reference.requests(EDT, count=1)[:1]
        prefix, end = reference.chat.response_ids("First 76+78=154."), min(reference.chat.end_of_turn_ids)
        with pytest.raises(ValueError, match=rf"{request.id}.*`max_new_tokens`, {len(prefix)}.*got {len(prefix)}"):
            engine.submit([replace(request, prefix_ids=prefix, sampling=replace(EDT, max_new_tokens=len(prefix)))])
        with pytest.raises(ValueError, match=rf"{request.id}.*got {end}, which ends one"):
            engine.submit([replace(request, prefix_ids=(*prefix, end))])
        room = self.max_context - len(request.prompt_ids) - len(request.query.suffix_ids)
        long = (prefix * self.max_context)[:room]
        with pytest.raises(ValueError, match=rf"{request.id}.*got {room} after"):
            engine.submit([replace(request, prefix_ids=long, sampling=replace(EDT, max_new_tokens=4096))])
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
