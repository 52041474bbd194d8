"""The driver over records: what is told and priced, and the verdicts of a live run, sample by sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.driver_fakes import CHAT, QUERY_TOKENS, HalfSure, Wandering, live, outcome, recorded
from support.fakes import FakeEngine, fake_questions
from support.number_pools import write_number_pool
from support.strategy_pools import make_entry, random_pool

from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource, ReplaySource, replay
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import Question, SamplingSettings

MOST_ON_MODEL = 5


OnModel = tuple[Callable[[int], EngineSource], ReplaySource, list[Question]]


def test_the_end_of_a_record_is_told_by_shorter_lists() -> None:
    pool = random_pool(3)
    for target in (1, 50):
        source = ReplaySource(pool, target=target)
        strategy = AdaptiveConsistency(max_samples=30)
        verdicts = run_strategy(strategy, [entry.question for entry in pool], source)
        for entry, verdict in zip(pool, verdicts, strict=True):
            assert outcome(verdict) == outcome(replay(strategy, entry))
            used = entry.samples[: verdict.samples_used]
            assert verdict.tokens_used == sum(len(sample.token_ids or ()) for sample in used)
            assert verdict.samples_generated == verdict.samples_used


def test_a_question_without_samples_ends_with_no_answer() -> None:
    entry = make_entry([], [])
    (verdict,) = run_strategy(SelfConsistency(max_samples=4), [entry.question], ReplaySource([entry]))
    assert (verdict.answer, verdict.samples_used, verdict.samples_generated) == (None, 0, 0)
    assert run_strategy(SelfConsistency(), [], ReplaySource([])) == []


def test_speculation_on_a_record_costs_what_was_recorded() -> None:
    entry = make_entry(["a", "a", "b", "b"], [0.9, 0.1, 0.1, 0.1])
    source = ReplaySource([entry], target=9, query_tokens=100)
    (verdict,) = run_strategy(EarlyStopping(threshold=0.5), [entry.question], source, lookahead=2)
    # Samples have 1, 2, 3, 4 tokens; the first is used, two more were started.
    assert (verdict.samples_used, verdict.samples_generated) == (1, 3)
    assert (verdict.tokens_used, verdict.tokens_generated) == (101, 306)


def test_responses_without_ids_are_priced_by_their_stated_length(tmp_path: Path) -> None:
    """Replay and the arrays of the curves cost what a pool made elsewhere states; a failed request costs nothing."""
    responses = [{"text": "Answer: 1", "tokens": tokens, "confidence": {"p_true": 0.2}} for tokens in (7, [5, 6, 8])]
    responses += [{"text": "", "tokens": 0, "answer": None}, {"text": "Answer: 2", "tokens": 11}]
    write_number_pool(tmp_path / "pool.jsonl", {"a": responses}, split="test")
    import_pool(tmp_path / "pool.jsonl", tmp_path / "store")
    for place in ("pool.jsonl", "store"):
        (entry,) = load_recorded_pool(tmp_path / place).entries
        source = ReplaySource([entry], query_tokens=100, target=4)
        (verdict,) = run_strategy(EarlyStopping(max_samples=3), [entry.question], source)
        assert (verdict.tokens_used, verdict.tokens_generated) == (107 + 103 + 0, 107 + 103 + 0)
        source = ReplaySource([entry], target=4)
        (verdict,) = run_strategy(EarlyStopping(max_samples=4, threshold=0.1), [entry.question], source, lookahead=9)
        assert (verdict.tokens_used, verdict.tokens_generated) == (7, 7 + 3 + 0 + 11)
        arrays = PoolArrays.from_samples([entry], confidence="p_true", query_tokens=100)
        assert arrays.tokens.tolist() == [[107, 103, 0, 111]]


def test_an_unknown_length_is_no_length_of_zero() -> None:
    entry = make_entry(["a", "b"], [0.5, 0.5])
    first, second = entry.samples
    entry = replace(entry, samples=(first, replace(second, token_ids=None, num_tokens=None)))
    (verdict,) = run_strategy(SelfConsistency(max_samples=2), [entry.question], ReplaySource([entry]))
    assert (verdict.tokens_used, verdict.tokens_generated) == (None, None)
    (verdict,) = run_strategy(SelfConsistency(max_samples=1), [entry.question], ReplaySource([entry]))
    assert (verdict.tokens_used, verdict.tokens_generated) == (1, 1)
    assert np.isnan(PoolArrays.from_samples([entry]).tokens[0, 1])


STRATEGIES = [
    SelfConsistency(max_samples=9),
    SelfConsistency(max_samples=5, confidence="p_true"),
    EarlyStopping(threshold=0.8, max_samples=9),
    EarlyStopping(threshold=0.45, max_samples=8, confidence="half", fallback="best"),
    AdaptiveConsistency(max_samples=9),
    AdaptiveConsistency("confidence_ratio", max_samples=9, confidence="half"),
    WindowStopping(window=3, max_samples=9),
    Wandering(),
]


def assert_live_equals_replayed(
    strategy: Strategy, source: EngineSource, replayed: ReplaySource, questions: Sequence[Question], lookahead: int
) -> None:
    from_engine = run_strategy(strategy, questions, source, lookahead=lookahead)
    from_record = run_strategy(strategy, questions, replayed)
    assert list(map(outcome, from_engine)) == list(map(outcome, from_record))
    assert [verdict.tokens_used for verdict in from_engine] == [verdict.tokens_used for verdict in from_record]
    for ours, theirs in zip(from_engine, from_record, strict=True):
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-5)
        assert ours.samples_generated >= theirs.samples_generated == theirs.samples_used


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.name}-{strategy.confidence}")
@pytest.mark.parametrize("seed", range(3))
def test_live_equals_replayed_on_fakes(strategy: Strategy, seed: int, tmp_path: Path) -> None:
    questions = fake_questions(15, prefix=f"seed{seed}", reference="3" if seed else None)
    pool = recorded(FakeEngine(), CHAT, questions, tmp_path, seed=seed)
    draw = random.Random(seed)
    for lookahead in (0, 2):
        source = live(FakeEngine(slots=draw.randint(1, 12)), seed=seed, scorers=[HalfSure()])
        replayed = ReplaySource(pool, scorers=[HalfSure()], query_tokens=QUERY_TOKENS, target=draw.randint(1, 40))
        assert_live_equals_replayed(strategy, source, replayed, questions, lookahead)


@pytest.fixture(scope="module")
def on_model(tmp_path_factory: pytest.TempPathFactory) -> OnModel:
    """The bundled model in float32: a live source for a number of slots, its recorded samples, and the questions."""
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

    model, questions = resolve_model("bundled"), get_task("word_problems").load("test_id", limit=5)
    engine = TransformersEngine(model, dtype="float32", device="cpu", max_batch=32)
    options = {"sampling": SamplingSettings(max_new_tokens=80), "seed": 5}
    folder = tmp_path_factory.mktemp("pool")
    pool = recorded(engine, engine.chat, questions, folder, tasks=get_task, num_samples=MOST_ON_MODEL, **options)

    def source(max_batch: int) -> EngineSource:
        other = TransformersEngine(model, dtype="float32", device="cpu", max_batch=max_batch, chat=engine.chat)
        return EngineSource(other, engine.chat, scorers=[HalfSure()], **options)

    query_tokens = len(engine.chat.query.suffix_ids)
    return source, ReplaySource(pool, scorers=[HalfSure()], query_tokens=query_tokens), questions


@pytest.mark.parametrize(
    ("strategy", "lookahead", "max_batch"),
    [(STRATEGIES[2], 2, 16), (STRATEGIES[5], 0, 3), (STRATEGIES[6], 1, 32), (STRATEGIES[7], 0, 8)],
)
def test_live_equals_replayed_on_the_bundled_model(
    on_model: OnModel, strategy: Strategy, lookahead: int, max_batch: int
) -> None:
    source, replayed, questions = on_model
    strategy = replace(strategy, max_samples=MOST_ON_MODEL)
    assert_live_equals_replayed(strategy, source(max_batch), replayed, questions, lookahead)
