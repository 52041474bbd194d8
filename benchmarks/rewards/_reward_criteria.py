"""What reward models on the bundled model must show, held against what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _reward_jobs import FEW_OUTCOME, FEW_VOTES, HARD, OUTCOME, RATES, TESTS, VOTES
from _reward_places import ABOVE, BELOW, BRIER, ECE, Places, difference, estimates
from _reward_votes import FUSED, PLAIN, Spent
from shared.criteria import Criterion, above, at_most, below, exactly
from shared.estimates import Measured
from shared.estimates import difference as response_difference

from selfcal_lightning.metrics.arrays import WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of

TITLES = {"id": "in domain", "ood": "out of domain"}
BASELINE = "8"
SCORING = Path(__file__).resolve().parents[1] / "results" / "reward_scoring.json"


@dataclass(frozen=True)
class Found:
    """Everything that was measured."""

    places: Mapping[str, Mapping[str, Sequence[Places]]]
    responses: Mapping[str, Mapping[str, Sequence[Measured]]]
    votes: Mapping[str, Mapping[str, Mapping[str, Spent]]]
    searches: Mapping[str, Spent]


def criteria(found: Found) -> list[Criterion]:
    """Return the demands in their order."""
    return [*_of_places(found.places), *_of_costs(found.places), *_of_answers(found)]


def _of_places(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    """Return the demands on scores against rollouts, at all places."""
    rows: list[Criterion] = []
    for test in TESTS:
        models, where = places[test], TITLES[test]

        def less(name: str, other: str, metric: str, models: Mapping[str, Sequence[Places]] = models) -> Estimate:
            return difference(models[name], models[other], metric)

        def value(name: str, metric: str, models: Mapping[str, Sequence[Places]] = models) -> Estimate:
            return estimates(models[name])[metric]

        for metric, bound in ((BRIER, -0.01), (ECE, -0.02)):
            gain = less(RATES, HARD, metric)
            shown = "Brier" if metric == BRIER else "ECE"
            text = f"{where}, {shown} of success rates minus hard labels: upper end below {bound}"
            rows.append(Criterion(text, gain, below(gain.high, bound)))
        for name, label, bound in (
            (RATES, "success rates", 0.15), (FEW_OUTCOME, "outcomes of as many questions", 0.15),
            (OUTCOME, "outcomes of all questions", 0.13),
        ):  # fmt: skip
            brier = value(name, BRIER)
            rows.append(Criterion(f"{where}, Brier of {label}: at most {bound}", brier, at_most(brier.value, bound)))
        gain, bound = less(OUTCOME, RATES, BRIER), 0.0 if test == "id" else 0.01
        text = f"{where}, Brier of outcomes of all questions minus success rates: upper end below {bound:g}"
        rows.append(Criterion(text, gain, below(gain.high, bound)))
        error = value(RATES, ECE)
        rows.append(Criterion(f"{where}, ECE of success rates: at most .09", error, at_most(error.value, 0.09)))
        for name, label in ((FEW_VOTES, "as many questions"), (VOTES, "all questions")):
            gain = less(name, HARD, BRIER)
            text = f"{where}, Brier of votes (no labels) of {label} minus hard labels: upper end below 0"
            rows.append(Criterion(text, gain, below(gain.high, 0.0)))
        for metric, side in ((BELOW, "below the lower"), (ABOVE, "above the upper")):
            share = value(RATES, metric)
            text = f"{where}, rates by more than .05 {side} quantile of success rates: at most .12"
            rows.append(Criterion(text, share, at_most(share.value, 0.12)))
    return rows


def _of_costs(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    every = [one for models in places.values() for rows in models.values() for one in rows]
    crossings = sum(int(((one.score[:, 1] > one.score[:, 0]) | (one.score[:, 0] > one.score[:, 2])).sum())
                    for one in every)  # fmt: skip
    one_model = [one for models in places.values() for one in models[OUTCOME]]
    distinct, published = (sum(one.prefixes[side] for one in one_model) for side in (0, 1))
    packed, _, apart = (sum(one.tokens[way] for one in one_model) for way in range(3))
    return [
        Criterion("quantiles that cross, of all scores: none", exactly(crossings), crossings == 0),
        Criterion(
            "rollouts drawn, of those of the published way: at most .5",
            exactly(distinct / published), at_most(distinct / published, 0.5),
        ),
        Criterion(
            "tokens of one text a place, of those packed by question: at least 5.5",
            exactly(apart / packed), above(apart / packed, 5.5),
        ),
        _of_seconds(),
    ]  # fmt: skip


def _of_seconds() -> Criterion:
    """Return the demand on the seconds of scoring, which a script of its own measured, side by side in one process."""
    text = "CPU seconds of one text a place, of those packed by question (`reward_scoring.py`): at least 8"
    if not SCORING.is_file():
        return Criterion(text, Estimate(None, None, None), None)
    seconds = {cost["way"]: cost["processor_seconds"] for cost in json.loads(SCORING.read_text())["costs"]}
    times = seconds["one text a step"] / seconds["packed by question"]
    return Criterion(text, exactly(times), above(times, 8.0))


def _of_answers(found: Found) -> list[Criterion]:
    """Return the demands on choosing answers, in domain."""
    votes, rows = found.votes["id"], []
    plain, weighed = votes[PLAIN], votes[f"vote {FUSED}"]
    for size in ("4", "8"):
        gain = estimate_of(weighed[size].correct - plain[size].correct)
        text = f"in domain, {size} votes weighted by score + log-probability minus plain ones: lower end above 0"
        rows.append(Criterion(text, gain, above(gain.low, 0.0)))
    most = max(plain, key=float)
    gain = estimate_of(weighed["8"].correct - plain[most].correct)
    text = f"in domain, 8 such votes minus {most} plain ones: lower end above -.015"
    rows.append(Criterion(text, gain, above(gain.low, -0.015)))
    for name, label in (("prm", "outcomes"), ("prm_vote_share", "votes")):
        responses = found.responses["id"]
        gain = response_difference(responses[name], responses["prm_hard"], WITHIN_QUESTION_AUROC)
        text = f"in domain, within-question AUROC of {label} minus hard labels: lower end above 0"
        rows.append(Criterion(text, gain, above(gain.low, 0.0)))
    return [*rows, _stopping(votes), *_reported(found)]


def _stopping(votes: Mapping[str, Mapping[str, Spent]]) -> Criterion:
    """Return the demand on stopping: of the thresholds that cost at most .01, the one that saves most is taken."""
    whole = votes[f"best {FUSED}"][BASELINE]
    saved = [
        1.0 - one.tokens / whole.tokens
        for one in votes[f"stop {FUSED}"].values()
        if one.correct[0] >= whole.correct[0] - 0.01
    ]
    text = f"in domain, tokens saved by stopping at a score within .01 of best-of-{BASELINE}: at least .15"
    if not saved:
        return Criterion(text, Estimate(None, None, None), False)
    most = estimate_of(max(saved, key=lambda column: float(column[0])))
    return Criterion(text, most, above(most.value, 0.15))


def _reported(found: Found) -> list[Criterion]:
    """Return what is reported with its interval and held to nothing."""
    fixed, adaptive = found.searches["beam"], found.searches["beam_km"]
    cost = estimate_of(adaptive.tokens / fixed.tokens)
    lost = estimate_of(adaptive.correct - fixed.correct)
    rows = [
        Criterion("searched questions, tokens of the adaptive beam, of the fixed one", cost, None),
        Criterion("searched questions, accuracy of the adaptive beam minus the fixed one", lost, None),
    ]
    uniform = found.votes["id"][f"best {FUSED}"]
    for target, one in found.votes["id"][f"adaptive {FUSED}"].items():
        gain = estimate_of(one.correct - at_equal_tokens(uniform, one.tokens))
        text = f"in domain, best-of-N with N for a target of {target} minus uniform N at the same tokens"
        rows.append(Criterion(text, gain, None))
    return rows


def at_equal_tokens(curve: Mapping[str, Spent], tokens: Floats) -> Floats:
    """Return the accuracy of a way at so many tokens [1 + R], read off between its settings in each resample."""
    points = sorted(curve.values(), key=lambda one: float(one.tokens[0]))
    cost, hits = (np.array([getattr(one, name) for one in points]) for name in ("tokens", "correct"))
    return np.array([np.interp(tokens[r], cost[:, r], hits[:, r]) for r in range(len(tokens))])
