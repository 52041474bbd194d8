from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.reward_models import stand_in
from support.strategy_pools import drive

from selfcal_lightning.cli import run
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.evaluation.curves import plan_of
from selfcal_lightning.inference.base import Ask, Strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.models.chat_format import load_tokenizer
from selfcal_lightning.records import Question, QuestionSamples, Sample, Verdict
from selfcal_lightning.rewards.answering import check_search, open_search
from selfcal_lightning.rewards.formats import Score, reward_format
from selfcal_lightning.rewards.reading import RewardFile
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


@pytest.mark.parametrize(
    ("adaptive", "numbers"), [("none", [4, 2, 2]), ("k", [4, 2]), ("m", [4, 1, 1]), ("km", [4, 1])]
)
def test_width_follows_from_the_scores(adaptive: Any, numbers: list[int]) -> None:
    sure: Draw = lambda ask, number: [99, 98, 97, 96][:number]  # noqa: E731
    strategy = BeamSearch(Scripted(), width=4, keep=2, adaptive=adaptive)
    _, asks = play(strategy, sure, last=2)
    assert [ask.num_samples for ask in asks] == numbers


def test_the_lower_quantile_asks_for_more() -> None:
    half: Draw = lambda ask, number: [99, 98][:number]  # noqa: E731
    for by, kept in (("mean", 1), ("low", 2)):
        _, asks = play(BeamSearch(Scripted(), width=2, keep=2, adaptive="k", by=by), half, last=2)
        assert len(asks) - 1 == kept


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

    for strategy in (
        BeamSearch(Broken(), width=2),
        DiverseTreeSearch(Broken(), width=2, trees=1),
        ParticleFiltering(Broken(), particles=2),
        AdaptiveBestOfN(Broken()),
    ):
        with pytest.raises(ValueError, match="NaN"):
            play(strategy, rising)


def test_a_reward_model_of_another_tokenizer_steers_nothing(tiny_model: str, tmp_path: Path) -> None:
    folder = stand_in(tiny_model, tmp_path / "m", reward_format("quantile-prm"), words=["<another>"])
    RewardFile("quantile-prm", "sentence", (0.1, 0.9), "outcome").write(Path(folder))
    settings = RewardSettings(folder)
    assert check_search("particle_filtering", {"particles": 2}, settings)
    for name in ("beam_search", "adaptive_best_of_n"):
        with pytest.raises(InputError, match="the tokenizer or the chat template of the policy"):
            open_search(name, {}, settings, tokenizer=load_tokenizer(tiny_model), dtype="float32")


def test_searches_need_live_samples_with_tokens_and_a_reward_model(capsys: pytest.CaptureFixture) -> None:
    for name in ("beam_search", "diverse_tree_search", "particle_filtering", "adaptive_best_of_n"):
        with pytest.raises(InputError, match=f"`selfcal answer --strategy {name}"):
            plan_of(name)
        with pytest.raises(InputError, match=f"`strategy` .* '{name}'"):
            make_strategy(name)
    samples = (Sample("q", 0, 0, "7", (7,), "stop", "7", True),)
    with pytest.raises(InputError, match="recorded samples"):
        replay(ParticleFiltering(Scripted()), QuestionSamples(QUESTION, samples, "t"))
    samples = (Sample("q", 0, 0, "7", None, "stop", "7", True),)
    with pytest.raises(InputError, match="token ids to score"):
        replay(AdaptiveBestOfN(Scripted(0.99)), QuestionSamples(QUESTION, samples, "t"))
    assert run(["answer", "--model", "bundled", "--question", "1+1?", "--strategy", "beam_search"]) == 1
    assert "`reward.model`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("search", "fields", "message"),
    [
        (BeamSearch, {"width": 2, "keep": 3}, "`keep` .* 2, but got 3"),
        (BeamSearch, {"width": 8, "keep": 3}, "`width` .*`keep`, 3, but got 8"),
        (DiverseTreeSearch, {"trees": 3}, "`width` .*`trees`, 3, but got 8"),
        (BeamSearch, {"lookahead": -1}, "`lookahead` .* -1"),
        (BeamSearch, {"duplicates": "drop"}, "`duplicates`"),
        (BeamSearch, {"adaptive": "n"}, "`adaptive`"),
        (ParticleFiltering, {"particles": 0}, "`particles` .* 0"),
        (AdaptiveBestOfN, {"target": 1.0}, "`target`"),
    ],
)
def test_what_cannot_be_searched_is_refused(search: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(Scripted(), **fields)
