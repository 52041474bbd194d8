import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support.driver_fakes import CHAT, HalfSure, Wandering, live, outcome, recorded
from support.fakes import FakeEngine, fake_questions
from support.house import ROOT
from support.store_samples import write_number_pool
from support.strategy_pools import make_entry, random_pool

from selfcal_lightning.confidence.base import scored_pool
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.base import Solving, Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource, replay
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.vectorised import PoolArrays, curve_of, replayed_curve
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import Question, QuestionSamples, SamplingSettings

MOST_ON_MODEL = 5
OnModel = tuple[Callable[[int], EngineSource], list[QuestionSamples]]


@pytest.mark.parametrize("answers", [[], [None]])
def test_no_further_samples_is_no_answer(answers: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "development" / "adding_a_strategy.md").read_text()
    (tmp_path / "documented.py").write_text(page.split("```python\n")[1].split("```")[0])
    for folder in (tmp_path, ROOT / "examples"):
        monkeypatch.syspath_prepend(folder)
    documented, example = importlib.import_module("documented"), importlib.import_module("your_strategy")
    for strategy in (SelfConsistency(max_samples=4), documented.FirstReadable(), example.FirstTwice()):
        verdict = replay(strategy, make_entry(answers, [None] * len(answers)))
        assert (verdict.answer, verdict.samples_used) == (None, len(answers))
    assert run_strategy(SelfConsistency(), [], live(FakeEngine())) == []


def test_responses_without_ids_are_priced_by_their_stated_length(tmp_path: Path) -> None:
    """The curves cost what a pool made elsewhere states; a failed request costs nothing."""
    responses = [{"text": "Answer: 1", "tokens": tokens, "confidence": {"p_true": 0.2}} for tokens in (7, [5, 6, 8])]
    responses += [{"text": "", "tokens": 0, "answer": None}, {"text": "Answer: 2", "tokens": 11}]
    write_number_pool(tmp_path / "pool.jsonl", {"a": responses}, split="test")
    import_pool(tmp_path / "pool.jsonl", tmp_path / "store")
    for place in ("pool.jsonl", "store"):
        pool = load_recorded_pool(tmp_path / place).entries
        plain = PoolArrays.from_samples(pool)
        assert plain.tokens.tolist() == [[7, 3, 0, 11]]
        assert plain.with_confidence(pool, "p_true", query_tokens=100).tokens.tolist() == [[107, 103, 0, 111]]
    unknown = make_entry(["a", "b"], [0.5, 0.5])
    unknown = replace(unknown, samples=tuple(replace(s, token_ids=None, num_tokens=None) for s in unknown.samples))
    assert np.isnan(PoolArrays.from_samples([unknown]).tokens).all()


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


def assert_replayed(strategy: Strategy, source: EngineSource, pool: Sequence[QuestionSamples], lookahead: int) -> None:
    entries = scored_pool(pool, source.scorers)
    verdicts = run_strategy(strategy, [entry.question for entry in pool], source, lookahead=lookahead)
    for verdict, entry in zip(verdicts, entries, strict=True):
        replayed = replay(strategy, entry)
        assert outcome(verdict) == outcome(replayed)
        assert verdict.confidence == pytest.approx(replayed.confidence, abs=1e-5)
        assert verdict.tokens_used == total_tokens(entry.samples[: verdict.samples_used], source.query_tokens)
        assert verdict.samples_generated >= verdict.samples_used


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.name}-{strategy.confidence}")
@pytest.mark.parametrize("seed", range(3))
def test_live_equals_replayed_on_fakes(strategy: Strategy, seed: int, tmp_path: Path) -> None:
    questions = fake_questions(15, prefix=f"seed{seed}", reference="3" if seed else None)
    pool = recorded(FakeEngine(), CHAT, questions, tmp_path, seed=seed)
    draw = random.Random(seed)
    for lookahead in (0, 2):
        source = live(FakeEngine(slots=draw.randint(1, 12)), seed=seed, scorers=[HalfSure()])
        assert_replayed(strategy, source, pool, lookahead)


@pytest.fixture(scope="module")
def on_model(tmp_path_factory: pytest.TempPathFactory) -> OnModel:
    """The bundled model in float32: a live source for a number of slots, and its recorded samples."""
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

    model, questions = resolve_model("bundled"), get_task("word_problems").load("test_id", limit=5)
    engine = TransformersEngine(model, dtype="float32", device="cpu", max_batch=32)
    options = {"sampling": SamplingSettings(max_new_tokens=80), "seed": 5}
    folder = tmp_path_factory.mktemp("pool")
    pool = recorded(engine, engine.chat, questions, folder, tasks=get_task, num_samples=MOST_ON_MODEL, **options)

    def source(max_batch: int) -> EngineSource:
        other = TransformersEngine(model, dtype="float32", device="cpu", max_batch=max_batch, chat=engine.chat)
        return EngineSource(other, engine.chat, scorers=[HalfSure()], **options)

    return source, pool


@pytest.mark.parametrize(
    ("strategy", "lookahead", "max_batch"),
    [(STRATEGIES[2], 2, 16), (STRATEGIES[5], 0, 3), (STRATEGIES[6], 1, 32), (STRATEGIES[7], 0, 8)],
)
def test_live_equals_replayed_on_a_model(on_model: OnModel, strategy: Strategy, lookahead: int, max_batch: int) -> None:
    source, pool = on_model
    strategy = replace(strategy, max_samples=MOST_ON_MODEL)
    assert_replayed(strategy, source(max_batch), pool, lookahead)


# ---- curves of strategies without a vectorised form are replays


@dataclass(frozen=True)
class OwnStopping:
    """Early stopping, written without arrays."""

    name: ClassVar[str] = "own_stopping"
    grid_parameter: ClassVar[str] = "threshold"

    threshold: float = 0.8
    max_samples: int = 4
    confidence: str | None = "p_true"

    def solve(self, question: Question) -> Solving:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return EarlyStopping(**named).solve(question)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_gives_what_the_vectorised_form_gives(seed: int) -> None:
    pool = random_pool(seed)
    arrays, grid = PoolArrays.from_samples(pool, confidence="p_true"), (0.0, 0.3, 0.7, 1.0)
    assert not hasattr(OwnStopping(), "curve")
    expected, found = EarlyStopping(max_samples=4).curve(arrays, grid), curve_of(OwnStopping(), arrays, grid)
    for name in ("answer", "used", "stopped_early"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    budgets = (1, 2, 4)
    plain, vote = PoolArrays.from_samples(pool), SelfConsistency()
    replayed, curve = replayed_curve(vote, plain, budgets), vote.curve(plain, budgets)
    np.testing.assert_array_equal(replayed.answer, curve.answer)
    np.testing.assert_array_equal(replayed.used, curve.used)
