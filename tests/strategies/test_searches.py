"""Searches that a reward model steers: scripted by hand, live with tokens counted, and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from selfcal_lightning.cli import run
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, QuestionSamples, Sample, SamplingSettings, Verdict
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.settings import RewardSettings
from selfcal_lightning.serving.searches import check_search, step_end_ids
from selfcal_lightning.strategies.base import Ask, Strategy
from selfcal_lightning.strategies.driver import run_strategy
from selfcal_lightning.strategies.replay_source import ReplaySource
from selfcal_lightning.strategies.search import AdaptiveBestOfN, BeamSearch
from selfcal_lightning.strategies.sources import EngineSource
from selfcal_lightning.tasks.registry import get_task

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
    solving, asks, index = strategy.solve(QUESTION), [], 0
    batch: list[Sample] | None = None
    while True:
        try:
            ask = solving.send(batch)  # type: ignore[arg-type]
        except StopIteration as stop:
            return stop.value, asks
        asks.append(ask)
        batch = []
        for token in draw(ask, ask.num_samples):
            ids = (*(ask.prefix or ()), token)
            ended = len(ids) >= last or not ask.to_step_end
            answer = str(ids[-1]) if ended else None
            facts = {"answer": answer, "correct": None if answer is None else answer == "7"}
            prefix = len(ask.prefix or ())
            text, finish = str(ids), "stop" if ended else "step"
            batch.append(Sample("q", index, 0, text, ids, finish, prefix_tokens=prefix, **facts))  # type: ignore[arg-type]
            index += 1


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
    ("adaptive", "numbers"),
    [("none", [4, 2, 2]), ("k", [4, 2]), ("m", [4, 1, 1]), ("km", [4, 1])],
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
    source = ReplaySource([QuestionSamples(QUESTION, samples, "test")])
    (verdict,) = run_strategy(strategy, [QUESTION], source)
    assert (verdict.samples_used, verdict.tokens_used) == (number, 2 * number)
    assert verdict.answer == ("8" if number == 8 else "7"), "the best that can be read"
    assert verdict.stopped_early == (number < 8)


def test_a_live_beam_counts_tokens_to_the_step(tiny_model: str) -> None:
    engine = TransformersEngine(tiny_model)
    ends = step_end_ids(engine.chat.tokenizer, "sentence")
    sampling = SamplingSettings(max_new_tokens=60)
    source = EngineSource(engine, engine.chat, sampling=sampling, step_ids=ends)
    (question,) = get_task("word_problems").load("calibration", limit=1)
    seen: list[Sample] = []
    strategy = BeamSearch(Scripted(), width=2, keep=1, max_steps=2)
    (verdict,) = run_strategy(strategy, [question], source, on_verdict=lambda _, samples: seen.extend(samples))
    engine.close()
    assert verdict.tokens_generated == sum(sample.drawn_tokens or 0 for sample in seen)
    first = [sample for sample in seen if not sample.prefix_tokens]
    assert len(first) == 2
    assert all(sample.finish != "step" or (sample.token_ids or ())[-1] in ends for sample in seen)
    assert any(sample.prefix_tokens for sample in seen)


def test_what_cannot_be_searched_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="`keep` to be at most `width`, 2, but got 3"):
        BeamSearch(Scripted(), width=2, keep=3)
    with pytest.raises(InputError, match="`target` to lie in"):
        AdaptiveBestOfN(Scripted(), target=1.0)
    with pytest.raises(InputError, match="`adaptive` to be one of"):
        BeamSearch(Scripted(), adaptive="n")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="with a strategy that a reward model steers"):
        check_search("self_consistency", {}, RewardSettings(str(tmp_path)))
    with pytest.raises(InputError, match=r"`reward\.model` and `reward\.format`"):
        check_search("beam_search", {}, RewardSettings())
    with pytest.raises(InputError, match="of the rule sentence or line for a beam search"):
        step_end_ids(None, "heading")  # type: ignore[arg-type]
    samples = (Sample("q", 0, 0, "7", None, "stop", "7", True),)
    with pytest.raises(InputError, match="samples with token ids for a reward model"):
        run_strategy(
            AdaptiveBestOfN(Scripted(0.99)), [QUESTION], ReplaySource([QuestionSamples(QUESTION, samples, "t")])
        )
    assert run(["answer", "--model", "bundled", "--question", "1+1?", "--strategy", "beam_search"]) == 1
    assert "Expected `reward.model` and `reward.format`" in capsys.readouterr().err
