"""What the report is held to, on means over seeds with intervals over questions and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from _capability_jobs import LABELLED, PROBE, TAUGHT
from _capability_measures import LEFT_OUT, READ, Columns
from shared.estimates import Column, estimated

from selfcal_lightning.capability.budgets import SEQUENTIAL
from selfcal_lightning.metrics.bootstrap import Estimate

End = Literal["value", "low", "high"]
WORDS: Mapping[End, str] = {"value": "", "low": "lower end ", "high": "upper end "}
BUDGETS = (8, 4)  # of the plan, and one at a time
LOST_AT = 0.2


@dataclass(frozen=True)
class Check:
    """A target, and what was found."""

    what: str
    found: Estimate
    held_to: str
    holds: bool


def targets(columns: Columns, *, seconds: tuple[float, float]) -> list[Check]:
    """Return the targets."""
    probe, labelled = columns[f"id/{PROBE}/mse"], columns[f"id/{LABELLED}/mse"]
    agreeing = columns["id/agreeing_pairs/mse"] - columns["id/top_share/mse"]
    sizes = {kind: columns[f"id/size/{kind}"] for kind in ("all", "one response", "few questions")}
    ways = {way: columns[f"id/{PROBE}/curve error/{way}"] for way in ("maps", "power")}
    halves = {way: columns[f"id/{PROBE}/pass@half/{way}"] for way in ("maps", "power")}
    checks = [
        check("MSE of the label-free probe, in domain", probe, ("value", "<=", 0.090)),
        check("", probe, ("high", "<=", 0.105)),
        check("MSE of the label-free probe, out of domain", columns[f"ood/{PROBE}/mse"], ("value", "<=", 0.075)),
        check("", columns[f"ood/{PROBE}/mse"], ("high", "<=", 0.09)),
        check("its skill, in domain", columns[f"id/{PROBE}/skill"], ("value", ">=", 0.45)),
        check("its Spearman, in domain", columns[f"id/{PROBE}/spearman"], ("value", ">=", 0.66)),
        check("its ECE, in domain", columns[f"id/{PROBE}/ece"], ("value", "<=", 0.07)),
        check("MSE without labels less that with labels, in domain", probe - labelled, ("high", "<=", 0.01)),
        check(f"MSE of agreeing pairs less top share, {READ} responses", agreeing, ("value", "<=", -0.03)),
        check("", agreeing, ("high", "<=", 0.0)),
        check(
            "MSE with one labelled response a question less with all", sizes["one response"] - sizes["all"],
            ("value", "<=", 0.01),
        ),
        check(
            "MSE of a tenth of the questions with all responses less all questions with one",
            sizes["few questions"] - sizes["one response"], ("value", ">=", 0.005),
        ),
        check("error of the pass@k curve by maps, in domain", ways["maps"], ("value", "<=", 0.03)),
        check("that error less that of 1 - (1 - p)^k, the curve", ways["maps"] - ways["power"], ("high", "<=", 0.0)),
        check("error of a question's pass@k by maps, at half of the responses", halves["maps"], ("value", "<=", 0.115)),
        check(
            "that error less that of 1 - (1 - p)^k, the question", halves["maps"] - halves["power"],
            ("high", "<=", 0.0),
        ),
        *_application_checks(columns),
    ]  # fmt: skip
    if f"id/{TAUGHT}/mse" in columns:
        taught = columns[f"id/{TAUGHT}/mse"]
        checks.append(check("MSE of P(True) before answering, taught, in domain", taught, ("value", "<=", 0.095)))
    gap, ratio = columns["id/half of the responses"], np.array([seconds[0] / seconds[1]])
    return [
        *checks,
        check("debiased MSE of half of the responses off that of all", gap, ("value", "<=", 0.005)),
        check("processor time of the probe over that of one response", ratio, ("value", "<=", 0.4)),
    ]


def _application_checks(columns: Columns) -> list[Check]:
    """Return what plans, sampling one at a time and not asking are held to, where the budgets allow."""
    budgets = columns["id/budgets"][:, 0].astype(int).tolist()
    plan, sequential = (min(budget, budgets[-1]) for budget in BUDGETS)
    gain = columns[f"id/gain/{PROBE}, Beta gain"]
    checks = [
        check(
            f"solved by a plan of {plan} samples a question beyond an even share", gain[budgets.index(plan)],
            ("low", ">", 0.0),
        ),
        check(
            f"solved one at a time with a verifier, {sequential} samples a question",
            columns[f"id/solved/{SEQUENTIAL}"][budgets.index(sequential)], ("value", ">=", 0.67),
        ),
    ]  # fmt: skip
    for split, words in (("id", "in domain"), ("ood", "out of domain")):
        lost = columns[f"{split}/lost/{PROBE}"][LEFT_OUT.index(LOST_AT)]
        text = f"right responses lost where the probe leaves {LOST_AT:.0%} of the questions out, {words}"
        checks.append(check(text, lost, ("value", "<=", 0.05)))
    return checks


def check(what: str, column: Column, bound: tuple[End, Literal["<=", ">=", ">"], float]) -> Check:
    """Hold a column [1 + R] or a calibration error, or an end of its interval, to a bound."""
    found = estimated(column)
    end, sign, limit = bound
    value = {"value": found.value, "low": found.low, "high": found.high}[end]
    holds = value is not None and {"<=": value <= limit, ">=": value >= limit, ">": value > limit}[sign]
    return Check(what, found, f"{WORDS[end]}{sign} {limit:g}", holds)
