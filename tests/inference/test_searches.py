from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from support.fakes import FakeChat, FakeTask
from support.strategy_pools import drive

from selfcal_lightning.cli import run
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import StepStops, ends_of
from selfcal_lightning.evaluation.curves import plan_of
from selfcal_lightning.inference.base import Ask, Solving, Strategy, make_verdict
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import EngineSource, replay
from selfcal_lightning.records import (
    Finish,
    Message,
    Question,
    QuestionSamples,
    Request,
    Response,
    Sample,
    SamplingSettings,
    Verdict,
)
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.search import AdaptiveBestOfN, BeamSearch, DiverseTreeSearch, ParticleFiltering

QUESTION = Question("q", "local_number", (), reference="7")
Draw = Callable[[Ask, int], Sequence[int]]


class Scripted:
    """Scores a path by its last token, in hundredths; the lower quantile is a tenth below."""

    def __init__(self, prior: float = 0.5) -> None:
        self.prior, self.asked = prior, []

    def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
        self.asked += paths
        means = [path[-1] / 100 if path else self.prior for path in paths]
        return [Score(mean, max(mean - 0.1, 0.0), mean) for mean in means]


def play(strategy: Strategy, draw: Draw, *, last: int = 3) -> tuple[Verdict, list[Ask]]:
    """Run a strategy on steps of one token; a response of ``last`` tokens ends and answers with its last one."""
    asks: list[Ask] = []
    index = count()

    def sample(ask: Ask, token: int) -> Sample:
        prefix = ask.prefix or ()
        ids = (*prefix, token)
        if len(ids) < last and ask.to_step_end:
            return Sample("q", next(index), 0, str(ids), ids, "step", None, None, prefix_tokens=len(prefix))
        answer = str(token)
        return Sample("q", next(index), 0, str(ids), ids, "stop", answer, answer == "7", prefix_tokens=len(prefix))

    def reply(ask: Ask) -> list[Sample]:
        asks.append(ask)
        return [sample(ask, token) for token in draw(ask, ask.num_samples)]

    return drive(strategy, QUESTION, reply), asks


def rising(ask: Ask, number: int) -> list[int]:
    """Tokens 1, 2, ... above the last one of the prefix."""
    start = ask.prefix[-1] if ask.prefix else 10
    return [start + place for place in range(1, number + 1)]


def test_a_beam_keeps_the_best_beginnings() -> None:
    scorer = Scripted()
    verdict, asks = play(BeamSearch(scorer, width=4, keep=2), rising)
    assert [ask.num_samples for ask in asks] == [4, 2, 2, 2, 2]
    assert [ask.prefix for ask in asks] == [None, (14,), (13,), (14, 16), (14, 15)]
    assert all(ask.to_step_end for ask in asks)
    assert verdict.answer == "18", "14, 16, 18 has the highest last token"
    assert (verdict.confidence, verdict.samples_used) == (0.18, 12)
    assert len(scorer.asked) == len(set(scorer.asked)), "no path is scored twice"
    _, asks = play(BeamSearch(Scripted(), width=4, keep=2, max_steps=4, frequency=2), rising, last=4)
    assert [ask.num_samples for ask in asks] == [4, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1]
    assert [len(ask.prefix or ()) for ask in asks] == [0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3]


def test_finished_paths_keep_their_place_and_do_not_grow() -> None:
    def draw(ask: Ask, number: int) -> list[int]:
        return [90, 20] if ask.prefix is None else [30] * number

    verdict, asks = play(BeamSearch(Scripted(), width=2, keep=2, max_steps=4), draw, last=2)
    assert [ask.prefix for ask in asks] == [None, (90,), (20,)]
    assert verdict.answer == "30"
    ends: Draw = lambda ask, number: [99, 10] if ask.prefix is None else [50] * number  # noqa: E731
    strategy = BeamSearch(Scripted(), width=2, keep=1, max_steps=2)
    verdict, asks = play(strategy, ends)
    assert [(ask.prefix, ask.to_step_end) for ask in asks] == [(None, True), ((99,), True), ((99, 50), False),
                                                             ((99, 50), False)]  # fmt: skip
    assert verdict.answer == "50", "what is open after the last step is drawn to its end"


def test_width_follows_from_the_scores_and_the_lower_quantile_asks_for_more() -> None:
    sure: Draw = lambda ask, number: [99, 98, 97, 96][:number]  # noqa: E731
    for adaptive, numbers in (("none", [4, 2, 2]), ("k", [4, 2]), ("m", [4, 1, 1]), ("km", [4, 1])):
        _, asks = play(BeamSearch(Scripted(), width=4, keep=2, adaptive=adaptive), sure, last=2)  # type: ignore[arg-type]
        assert [ask.num_samples for ask in asks] == numbers, adaptive
    for by, kept in (("mean", 1), ("low", 2)):
        _, asks = play(BeamSearch(Scripted(), width=2, keep=2, adaptive="k", by=by), sure, last=2)  # type: ignore[arg-type]
        assert len(asks) - 1 == kept, by


@pytest.mark.parametrize(
    ("prior", "by", "number"), [(0.9, "mean", 2), (0.5, "mean", 7), (0.9, "low", 3), (0.0, "low", 8)]
)
def test_best_of_n_draws_what_the_question_takes(prior: float, by: Any, number: int) -> None:
    strategy = AdaptiveBestOfN(Scripted(prior), max_samples=8, by=by)
    samples = tuple(
        Sample("q", i, 0, "t", (1, token), "stop", None if token == 90 else str(token), token == 7)
        for i, token in enumerate([7, 5, 90, 6, 4, 3, 2, 8])
    )
    verdict = replay(strategy, QuestionSamples(QUESTION, samples, "test"))
    assert verdict.samples_used == number
    assert verdict.answer == ("8" if number == 8 else "7"), "the best that can be read"
    assert verdict.stopped_early == (number < 8)


def test_lookahead_chooses_by_what_comes_and_keeps_nothing_of_it() -> None:
    def draw(ask: Ask, number: int) -> list[int]:
        return {None: [30, 20], (30,): [10] * number, (20,): [90] * number}.get(ask.prefix, [50] * number)

    chosen = {}
    for lookahead in (0, 1):
        strategy = BeamSearch(Scripted(), width=2, keep=1, max_steps=2, lookahead=lookahead)
        verdict, asks = play(strategy, draw, last=9)
        chosen[lookahead] = asks[-1].prefix
        assert verdict.samples_used == sum(ask.num_samples for ask in asks) <= strategy.max_samples
    assert chosen == {0: (30, 10), 1: (20, 90)}, "30 leads to 10, 20 to 90; what was drawn ahead is drawn anew"


@pytest.mark.parametrize(("duplicates", "prefixes"), [("merge", 1), ("refill", 3), ("keep", 3)])
def test_equal_beginnings_are_one_or_stand_for_others(duplicates: Any, prefixes: int) -> None:
    same: Draw = lambda ask, number: [40] * number  # noqa: E731
    strategy = BeamSearch(Scripted(), width=3, keep=3, max_steps=2, duplicates=duplicates)
    _, asks = play(strategy, same, last=9)
    assert [ask.prefix for ask in asks[1 : 1 + prefixes]] == [(40,)] * prefixes
    assert asks[1 + prefixes].prefix == (40, 40)


def test_each_tree_goes_on_from_its_own_best() -> None:
    first: Draw = lambda ask, number: [60, 70, 20, 10] if ask.prefix is None else rising(ask, number)  # noqa: E731
    strategy = DiverseTreeSearch(Scripted(), width=4, trees=2)
    verdict, asks = play(strategy, first)
    assert [ask.prefix for ask in asks] == [None, (70,), (20,), (70, 72), (20, 22)], "a beam would drop the 20"
    assert (verdict.answer, verdict.samples_used) == ("74", 12)
    _, asks = play(DiverseTreeSearch(Scripted(), width=2, trees=2, max_steps=1), rising)
    assert [(ask.prefix, ask.to_step_end) for ask in asks] == [(None, True), ((11,), False), ((12,), False)]


def test_particles_are_drawn_by_their_odds() -> None:
    first: Draw = lambda ask, number: [99, 1, 1, 1] if ask.prefix is None else [50] * number  # noqa: E731
    strategy = ParticleFiltering(Scripted(), particles=4)
    verdict, asks = play(strategy, first)
    assert [ask.num_samples for ask in asks] == [4, *[1] * 8]
    assert [ask.prefix for ask in asks[1:5]] == [(99,)] * 4, "99 to 1 against 1 to 99"
    assert verdict.samples_used == 12
    assert [ask.prefix for ask in play(strategy, first)[1]] == [ask.prefix for ask in asks], "the draw has its seed"
    even: Draw = lambda ask, number: [50, 51, 52, 53][:number]  # noqa: E731
    drawn = {tuple(ask.prefix for ask in play(ParticleFiltering(Scripted(), particles=4, seed=seed), even)[1][1:5])
             for seed in range(4)}  # fmt: skip
    assert len(drawn) > 1

    verdict, asks = play(ParticleFiltering(Scripted(), particles=2), lambda ask, number: [50] * number, last=1)
    assert (len(asks), verdict.answer) == (1, "50"), "a response that ended does not grow"


in_each_search = pytest.mark.parametrize(
    "strategy",
    [
        BeamSearch(Scripted(), width=3, keep=3, max_steps=2),
        DiverseTreeSearch(Scripted(), width=3, trees=3, max_steps=2),
        ParticleFiltering(Scripted(0.01), particles=3, max_steps=2),
    ],
)


def answered(strategy: Strategy, first: Sequence[Sample], follow: Callable[[Ask, int], Sample]) -> Verdict:
    """Run a search on one question: ``first`` are its first steps; each later ask, for one sample, gets ``follow``."""
    number = count()

    def reply(ask: Ask) -> list[Sample]:
        at = next(number)
        assert ask.num_samples == (1 if at else len(first))
        return [follow(ask, at)] if at else list(first)

    return drive(strategy, QUESTION, reply)


@in_each_search
def test_responses_that_are_empty_or_cut_end_and_are_not_chosen(strategy: Strategy) -> None:
    ends = [("", (), "stop"), ("So 34", (99,), "length"), ("So 7.", (40,), "step")]
    first = [Sample("q", i, 0, text, ids, finish, None, False) for i, (text, ids, finish) in enumerate(ends)]  # type: ignore[arg-type]
    prefixes: list[tuple[int, ...] | None] = []

    def follow(ask: Ask, number: int) -> Sample:
        prefixes.append(ask.prefix)
        return Sample("q", 2 + number, 0, "7", (*(ask.prefix or ()), 41), "stop", "7", True)

    verdict = answered(strategy, first, follow)
    assert set(prefixes) <= {(40,)}, "nothing follows what has ended"
    assert verdict.answer == ("7" if prefixes else None)
    assert verdict.samples_used == 3 + len(prefixes)


@in_each_search
@pytest.mark.parametrize("num_failed", [1, 3])
def test_requests_that_fail_inside_of_a_search_end_their_paths(strategy: Strategy, num_failed: int) -> None:
    first = [Sample("q", i, 0, "So 7.", (40 + i,), "step", None, False) for i in range(3)]
    asked: list[int] = []

    def follow(ask: Ask, number: int) -> Sample:
        asked.append(number)
        if number <= num_failed:
            return Sample("q", 2 + number, 0, "", (), None, None, None)
        return Sample("q", 2 + number, 0, "7", (*(ask.prefix or ()), 41), "stop", "7", True)

    verdict = answered(strategy, first, follow)
    assert asked == [1, 2, 3], "a path whose request failed is not gone on with"
    assert verdict.samples_used == 6
    assert verdict.answer == ("7" if num_failed < 3 else None)


def test_a_step_whose_request_failed_does_not_compete_with_the_score_of_its_beginning() -> None:
    def reply(ask: Ask) -> list[Sample]:
        if ask.prefix is None:
            return [Sample("q", i, 0, "So", (90 - i,), "step", None, None) for i in range(2)]
        if ask.to_step_end:
            return [Sample("q", 2, 0, "", (), None, None, None), Sample("q", 3, 0, "So", (90, 10), "step", None, None)]
        return [Sample("q", 4, 0, "7", (*ask.prefix, 41), "stop", "7", True)]

    assert drive(BeamSearch(Scripted(), width=2, keep=1, max_steps=3), QUESTION, reply).answer == "7"
    assert drive(DiverseTreeSearch(Scripted(), width=2, trees=1, max_steps=2), QUESTION, reply).answer == "7"


def test_a_score_that_is_no_number_ends_the_search() -> None:
    class Broken(Scripted):
        def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
            return [Score(float("nan"), 0.0, 1.0) for _ in paths]

    beam, trees = BeamSearch(Broken(), width=2), DiverseTreeSearch(Broken(), width=2, trees=1)
    for strategy in (beam, trees, ParticleFiltering(Broken(), particles=2), AdaptiveBestOfN(Broken())):
        with pytest.raises(ValueError, match="NaN"):
            play(strategy, rising)


def test_searches_need_live_samples_and_a_reward_model(capsys: pytest.CaptureFixture) -> None:
    for name in ("beam_search", "diverse_tree_search", "particle_filtering", "adaptive_best_of_n"):
        with pytest.raises(InputError, match=f"`selfcal answer --strategy {name}"):
            plan_of(name)
        with pytest.raises(InputError, match=f"`strategy` .* '{name}'"):
            make_strategy(name)
    samples = (Sample("q", 0, 0, "7", (7,), "stop", "7", True),)
    with pytest.raises(InputError, match="recorded samples"):
        replay(ParticleFiltering(Scripted()), QuestionSamples(QUESTION, samples, "t"))
    assert run(["answer", "--model", "bundled", "--question", "1+1?", "--strategy", "beam_search"]) == 1
    assert "`reward.model`" in capsys.readouterr().err


def test_what_cannot_be_searched_is_refused() -> None:
    for search, fields, message in (
        (BeamSearch, {"width": 2, "keep": 3}, "`keep` .* 2, but got 3"),
        (BeamSearch, {"width": 8, "keep": 3}, "`width` .*`keep`, 3, but got 8"),
        (DiverseTreeSearch, {"trees": 3}, "`width` .*`trees`, 3, but got 8"),
    ):
        with pytest.raises(InputError, match=message):
            search(Scripted(), **fields)


# ---- steps of a search are those that a whole response has by the same rule, whatever tokens they end with

CHAT = FakeChat()
TEXTS: list[tuple[Steps, str]] = [
    ("sentence", "One. Two is e.g. this! 1. Three? The answer is 5"),
    ("sentence", 'So 3.5 + 2 = 5.5. It is 2.25! He said "3." Then (4.) it is 0.5.'),
    ("sentence", "List:\n2. Take it. (a) Leave it. Done."),
    ("line", "a\nb\n\n\nc"),
    ("blank_line", "a\nb\n\nc\n \n\nd\n\n\n"),
    ("heading", "## Step 1: a: b\n\n## Step 2: c\nd\n\n## Step 3: e"),
    ("heading", "First.\nStep 1: a\nStep 2: b: c. Not a step 3 here\nStep 4: d"),
    ("marker:<end>", "a > b <end> c\n<end><end> d"),
]


class Bytes:
    """A tokenizer with a token for each byte, so that most ends of steps take several."""

    all_special_ids = (256, 257, 258)

    def __len__(self) -> int:
        return 259

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return CHAT.decode(ids)


class Reciting:
    """An engine that writes one text, whatever it is asked, and counts what it is asked for."""

    max_context, batch_size = 4096, 8

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.drawn = text.encode(), 0, 0
        self._queue: list[Request] = []

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue += requests

    def poll(self) -> list[Response]:
        done, self._queue = [self._answer(request) for request in self._queue], []
        return done

    def _answer(self, request: Request) -> Response:
        self.asked += 1
        rest = self.text[len(request.prefix_ids) :]
        assert self.text.startswith(bytes(request.prefix_ids)), "it continues from what it wrote"
        stop = next((place + 1 for place, token in enumerate(rest) if token in request.step_ids), None)
        room = request.sampling.max_new_tokens - len(request.prefix_ids)
        drawn = tuple(rest[: min(room, stop or len(rest))])
        finish: Finish = "stop" if len(drawn) == len(rest) != stop else "step" if len(drawn) == stop else "length"
        self.drawn += len(drawn)
        return Response(request.id, CHAT.decode(drawn), drawn, finish, -0.5 * len(drawn))

    def cancel(self, request_ids: Collection[str]) -> dict[str, int]:
        self._queue = [request for request in self._queue if request.id not in request_ids]
        return {}


class Walking:
    name, max_samples, confidence, reads_steps = "walking", 99, None, True

    def solve(self, question: Question) -> Solving:
        samples = yield Ask(1, to_step_end=True)
        seen = list(samples)
        while samples[0].finish == "step":
            samples = yield Ask(1, prefix=samples[0].token_ids, to_step_end=True)
            seen += samples
        return make_verdict(question, seen, None, confidence=None, stopped_early=False)


def walk(engine: Any, steps: Steps) -> list[Sample]:
    """Return the steps of what an engine writes; all that it drew is counted."""
    stops = StepStops.of(Bytes(), steps)  # type: ignore[arg-type]
    source = EngineSource(engine, CHAT, sampling=SamplingSettings(max_new_tokens=500), tasks=FakeTask, stops=stops)  # type: ignore[arg-type]
    seen: list[Sample] = []
    question = Question("q", "fake", (Message("user", "How many?"),), text="How many?")
    (verdict,) = run_strategy(Walking(), [question], source, on_verdict=lambda _, samples: seen.extend(samples))
    assert verdict.tokens_generated == engine.drawn
    return seen


@pytest.mark.parametrize(("steps", "text"), TEXTS, ids=[f"{steps}-{i}" for i, (steps, _) in enumerate(TEXTS)])
def test_walking_finds_the_steps_of_the_whole_response(steps: Steps, text: str) -> None:
    engine = Reciting(text)
    seen = walk(engine, steps)
    whole = ends_of([chr(token) for token in text.encode()], steps)
    found = [len(sample.token_ids or ()) for sample in seen]
    assert found[: len(whole) - 1] == whole[:-1]
    assert found[-1] == len(text)
    assert len(whole) <= len(found) <= len(whole) + 1, "white space behind the last step is no step"
    assert [sample.prefix_tokens for sample in seen] == [0, *found[:-1]]
    assert [sample.finish for sample in seen] == ["step"] * (len(seen) - 1) + ["stop"]
    for before, after in pairwise(seen):
        assert after.text.startswith(before.text)


def test_texts_counts_and_chances_of_steps() -> None:
    engine = Reciting("It is 3.5. So.")
    first, second = walk(engine, "sentence")
    assert first.text == "It is 3.5."
    assert (first.logprob, second.logprob) == (-0.5 * 10, -0.5 * 4), "of what is kept"
    assert engine.drawn == len(engine.text) + 1, "the space behind the first sentence is drawn again"
    engine = Reciting("a\nb\n\nc")
    first, second = walk(engine, "blank_line")
    assert engine.asked == 4, "the first step stopped at three line ends"
    assert first.token_ids == tuple(b"a\nb\n\n")
    assert (first.logprob, second.logprob) == (-2.5, -0.5)
    assert first.drawn_tokens == 5
    assert second.drawn_tokens == 1
    assert engine.drawn == 6
    first, second = walk(Reciting("## Step 1: a\n## Step 2: b"), "heading")
    assert first.text == "## Step 1: a"
    assert first.logprob is None
    assert second.text.endswith("## Step 2: b")
    assert second.logprob == -0.5 * len("\n## Step 2: b")
