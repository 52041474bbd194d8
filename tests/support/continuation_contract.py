"""What every engine must do with requests that continue from a prefix or end with a step; see ``engine_contract``."""

from dataclasses import replace

import pytest
from support.engine_reference import EDT, FIXED, GREEDY, Reference

from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.records import SamplingSettings


class ContinuationContract:
    """The tests of prefixes and steps."""

    max_context = 256
    # Whether token i of a response is drawn with number i of its stream, wherever it begins: PositionContract.
    draws_by_position = False

    def test_a_continuation_is_the_rest_of_the_greedy_response(self, engine: Engine, reference: Reference) -> None:
        self._check_continuations(engine, reference, GREEDY)

    def _check_continuations(self, engine: Engine, reference: Reference, sampling: SamplingSettings) -> None:
        """Continue responses from several places, many at once, some of them several times."""
        requests = reference.requests(sampling, count=2)
        whole = {request.id: response for request, response in zip(requests, generate(engine, requests), strict=True)}
        continued = [
            replace(request, id=f"{request.id}/{cut}/{copy}", prefix_ids=whole[request.id].token_ids[:cut])
            for request in requests
            for cut in (1, 7, len(whole[request.id].token_ids) - 1)
            for copy in range(2)
        ]
        for request, response in zip(continued, generate(engine, continued), strict=True):
            full, cut = whole[request.id.rpartition("/")[0].rpartition("/")[0]], len(request.prefix_ids)
            assert response.token_ids == full.token_ids[cut:]
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

    def test_what_was_thrown_away_leaves_the_prefix_out(self, engine: Engine, reference: Reference) -> None:
        prefix = reference.chat.response_ids("First 76+78=154. So ")
        requests = [replace(r, prefix_ids=prefix) for r in reference.requests(EDT, count=8)]
        whole = {r.request_id: len(r.token_ids) for r in generate(engine, requests)}
        engine.submit(requests)
        early = {response.request_id for response in engine.poll()}
        drawn = engine.cancel([request.id for request in requests])
        assert not drawn.keys() & early
        assert all(0 <= count <= whole[name] for name, count in drawn.items())
        assert engine.poll() == []

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


class PositionContract(ContinuationContract):
    """The tests of an engine that draws token i of a response with number i of its stream, wherever it begins."""

    draws_by_position = True

    def test_a_continuation_is_the_rest_of_the_sampled_response(self, engine: Engine, reference: Reference) -> None:
        for sampling in (EDT, replace(FIXED, top_p=0.8)):
            self._check_continuations(engine, reference, sampling)
