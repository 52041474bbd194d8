"""The guarantee, proved: what `selfcal fit-threshold` promises holds for the procedure that its file brings along.

Calibration pools are drawn from a finite population, so that the error rate of a procedure on all of it is known and
not estimated. A risk's file promises that, with confidence 1 - delta over the draw of its calibration questions, this
rate is at most the risk among the answered. Over NUM_DRAWS independent draws the number of broken promises is then at
most Binomial(NUM_DRAWS, delta): each case fails where its tail is smaller than chance would have it once in a hundred
runs of *all* cases. The error rate is that of the live procedure: the driver over an engine, set up by the file as
`selfcal answer` sets it up. Replaying the recorded responses must give the same verdicts. The verb is handed its pools
as it would have read them.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from scipy.stats import binomtest
from support.fakes import FakeChat, FakeEngine

from selfcal_lightning import records
from selfcal_lightning.commands.fit_confidence import run_fit_threshold
from selfcal_lightning.confidence import fusion
from selfcal_lightning.confidence.base import scored_pool
from selfcal_lightning.confidence.fusion import FittedScorer, load_scorers
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.choices import choose_strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import STRATEGIES
from selfcal_lightning.inference.sources import EngineSource, replay
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.records import Verdict

# A hard question, one of four, gives a confident wrong answer sooner or later: who draws more errs more.
REFERENCE = "1"
UNREADABLE = 0.03


@cache
def _respond(seed: int, number: int, index: int) -> tuple[str | None, str, float]:
    """Return a response: its answer (None is none), the text that gives it, and P(True)."""
    is_easy = random.Random(f"{seed}/{number}").random() < 0.75
    draw = random.Random(f"{seed}/{number}/{index}")
    right = draw.random() < (0.97 if is_easy else 0.15)
    sure = draw.betavariate(14.0, 2.0) if right else draw.betavariate(8.0, 3.0)
    answer = REFERENCE if right else str(draw.choice([2, 2, 3, 4]))
    if draw.random() < UNREADABLE:
        return None, "I do not know.", round(sure, 2)
    return answer, f"The answer is {answer}.", round(sure, 2)


@cache
def _samples(seed: int, number: int, width: int) -> tuple[records.Sample, ...]:
    samples = []
    for index in range(width):
        answer, text, sure = _respond(seed, number, index)
        masses = answer == REFERENCE, None, sure, 1.0 - sure
        samples.append(records.Sample(f"p{number}", index, 0, text, (1,), "stop", answer, *masses))
    return tuple(samples)


@dataclass(frozen=True)
class Population:
    """``size`` questions with as many responses as anybody asks for; another seed is another population of the kind."""

    size: int
    seed: int = 0

    @cached_property
    def questions(self) -> list[records.Question]:
        made = []
        for number in range(self.size):
            asked = (records.Message("user", f"Question {number}?"),)
            made.append(records.Question(f"p{number}", "local_number", asked, REFERENCE, f"{number}?"))
        return made

    def entry(self, number: int, width: int, *, name: str | None = None) -> records.QuestionSamples:
        """Return a question with its first ``width`` responses, under another id and wording where one is given."""
        question = self.questions[number]
        if name is not None:
            question = records.Question(name, question.task, (records.Message("user", name),), REFERENCE, name)
        return records.QuestionSamples(question, _samples(self.seed, number, width), "cal")

    def draw(self, size: int, widths: Sequence[int], draw: np.random.Generator) -> list[records.QuestionSamples]:
        """Return ``size`` questions, drawn independently and with replacement, with ``widths`` responses in turn."""
        numbers = draw.integers(self.size, size=size).tolist()
        return [self.entry(one, widths[place % len(widths)], name=f"c{place}") for place, one in enumerate(numbers)]

    def live(self, strategy: Strategy, *, scorers: Sequence[object] = ()) -> list[records.Verdict]:
        """Return what ``strategy`` does on every question, by the driver over an engine."""
        sampling = records.SamplingSettings(max_new_tokens=60)
        source = EngineSource(ScriptedEngine(self), FakeChat(), sampling=sampling, scorers=scorers, seed=5)
        return run_strategy(strategy, self.questions, source)


class ScriptedEngine(FakeEngine):
    """Gives the population's responses, in a scrambled order like the engine that it is made from."""

    def __init__(self, population: Population) -> None:
        super().__init__(slots=64)
        self._population = population

    def _respond(self, request: records.Request) -> records.Response:
        _, index, name = request.id.split("/")
        _, text, sure = _respond(self._population.seed, int(name[1:]), int(index))
        masses = (None, None) if request.query is None else (sure, 1.0 - sure)
        return records.Response(request.id, text, tuple(text.encode()), "stop", -1.0, *masses)


POPULATION = Population(1500)
ELSEWHERE = Population(300, seed=1)
NUM_DRAWS = 200
FACTS = "answer", "confidence", "correct", "samples_used", "stopped_early"
SUSPICION = 0.01
# Enough draws must certify something, or the promise would be kept by silence.
CERTIFIED = 0.25


@dataclass(frozen=True)
class Case:
    """A call of `selfcal fit-threshold` that is repeated on NUM_DRAWS pools.

    Its questions have ``widths`` responses in turn, and ``questions`` counts both halves; a strategy that is ``scaled``
    reads a P(True) that was scaled on another population.
    """

    strategy: str
    risk: float
    widths: tuple[int, ...] = (4,)
    delta: float = 0.1
    questions: int = 300
    settings: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    scaled: bool = False

    def __str__(self) -> str:
        words = [self.strategy, *map(str, self.settings.values()), *self.options, "scaled" * self.scaled]
        widths = "-".join(map(str, self.widths))
        return "_".join([*filter(None, words), f"width{widths}", f"risk{self.risk:g}", f"delta{self.delta:g}"])


CASES = [
    Case("early_stopping", 0.1, widths=(2,)),
    Case("early_stopping", 0.1, widths=(3,), delta=0.2),
    Case("early_stopping", 0.12, widths=(8,), delta=0.05),
    Case("early_stopping", 0.1, widths=(5, 2, 7)),
    Case("early_stopping", 0.12, settings={"fallback": "best", "threshold": 0.95}),
    Case("early_stopping", 0.12, settings={"fallback": "last"}, options={"max_samples": 3}),
    Case("early_stopping", 0.12, options={"procedure": "bonferroni"}, questions=500),
    Case("early_stopping", 0.12, widths=(2,), options={"use_all": True}),
    Case("early_stopping", 0.12, widths=(2,), options={"grid": [0.95, 0.92, 0.9, 0.85, 0.8, 0.7]}),
    Case("early_stopping", 0.12, widths=(3,), scaled=True),
    Case("best_of_n", 0.12, widths=(2,)),
    Case("best_of_n", 0.15, widths=(6,), delta=0.2, scaled=True),
    Case("self_consistency", 0.1, widths=(3,)),
    Case("self_consistency", 0.1, widths=(8,), settings={"confidence": "p_true"}),
    Case("adaptive_consistency", 0.15),
    Case("adaptive_consistency", 0.15, widths=(6,), settings={"criterion": "confidence_ratio"}, delta=0.2),
    Case("adaptive_consistency", 0.15, widths=(6,), settings={"criterion": "beta"}),
    Case("adaptive_consistency", 0.15, widths=(5,), settings={"criterion": "dirichlet"}),
    Case("adaptive_consistency", 0.15, widths=(5,), settings={"criterion": "entropy"}),
    Case("cges", 0.12, widths=(3,)),
    Case("cges", 0.12, widths=(6,), scaled=True),
    Case("window_stopping", 0.12, widths=(6,), settings={"window": 3}),
    Case("window_stopping", 0.12, widths=(6,), settings={"window": 2, "mode": "sliding"}),
    Case("cisc", 0.12, widths=(4,)),
    Case("borda", 0.12, widths=(4,)),
    Case("standardised", 0.15, widths=(4,), settings={"confidence": "p_true"}),
]


def test_every_strategy_that_can_answer_is_held_to_its_promise() -> None:
    assert {case.strategy for case in CASES} == set(STRATEGIES) - {"pass_at_n"}


def error_rate(fitted: FittedThreshold, scorers: list[FittedScorer], seen: dict[str, list[Verdict]]) -> float:
    """Return the share of wrong answers among those that the procedure of a file gives to the whole population.

    The live procedure is run once, kept in ``seen``, and held against its replay; the share is 0 where it gives none.
    """
    key = json.dumps([fitted.strategy, dict(fitted.fields)])
    if key not in seen:
        strategy = choose_strategy(None, {}, scorers=scorers, fitted=fitted)
        seen[key] = POPULATION.live(strategy, scorers=scorers)
        recorded = (POPULATION.entry(number, strategy.max_samples) for number in range(POPULATION.size))
        for verdict, entry in zip(seen[key], scored_pool(recorded, scorers), strict=True):
            replayed = replay(strategy, entry)
            assert all(getattr(replayed, name) == getattr(verdict, name) for name in FACTS)
    given = [verdict for verdict in seen[key] if fitted.answers(verdict)]
    return sum(not verdict.correct for verdict in given) / len(given) if given else 0.0


def fit(case: Case, output: Path, scorers: list[str]) -> FittedThreshold | None:
    """Run the verb; return what the file says that it wrote, None where it found nothing to promise."""
    settings = {**case.settings, **({"confidence": "calm"} if case.scaled else {})}
    output.unlink(missing_ok=True)
    try:
        run_fit_threshold(
            "", str(output), strategy=case.strategy, settings=settings, risk=case.risk, delta=case.delta,
            split=None, scorers=scorers, **case.options,
        )  # fmt: skip
    except ValueError as error:
        assert "No threshold keeps the error rate" in str(error)  # noqa: PT017 - nothing else may go wrong
    fitted = FittedThreshold.load(output) if output.exists() else None
    return fitted if fitted is not None and fitted.threshold is not None else None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_promised_error_rate_holds(case: Case, tmp_path: Path) -> None:
    draw = np.random.default_rng(20)
    seen, output = {}, tmp_path / "threshold.json"
    files = [str(tmp_path / "calm.json")] if case.scaled else []
    for path in files:  # a scaler of P(True) that was fitted on other questions than all of these
        entries = [ELSEWHERE.entry(number, 4, name=f"elsewhere{number}") for number in range(ELSEWHERE.size)]
        fit_scaler(entries, "platt", name="calm").save(path)
    scorers = load_scorers(files)
    broken = certified = 0
    for _ in range(NUM_DRAWS):
        pool = POPULATION.draw(case.questions, case.widths, draw)
        with mock.patch.object(fusion, "load_for_fitting", return_value=RecordedPool(tuple(pool))):
            fitted = fit(case, output, files)
        if fitted is not None:
            certified += 1
            broken += error_rate(fitted, scorers, seen) > case.risk
    print(f"{case}: {certified} of {NUM_DRAWS} certified, {broken} broken")  # noqa: T201 - shown by `pytest -s`
    assert certified >= CERTIFIED * NUM_DRAWS
    chance = binomtest(broken, NUM_DRAWS, case.delta, alternative="greater").pvalue
    assert chance >= SUSPICION / len(CASES), f"{broken} of {NUM_DRAWS} promises were broken"
