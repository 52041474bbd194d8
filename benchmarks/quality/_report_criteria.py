"""What the activated confidence must show, held against what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _report_jobs import ACTIVATED, BASE, JOINT
from _report_votes import PLAIN
from shared.criteria import Criterion, above, at_most, exactly
from shared.estimates import Measured, difference, summary

from selfcal_lightning.evaluation.metrics import SHORT_NAMES
from selfcal_lightning.metrics.arrays import AUROC, ECE, Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

SIZES_OF_VOTES = (4, 8)


def criteria(
    rows: Mapping[str, Mapping[str, Sequence[Measured]]],
    curves: Mapping[str, Mapping[str, Floats]],
    unequal: int,
    compared: int,
) -> list[Criterion]:
    """Return the demands in their order."""
    here, there = rows["id"], rows["ood"]
    error = summary(here[ACTIVATED])[SHORT_NAMES[ECE]]
    below = difference(here[ACTIVATED], here[JOINT], ECE)
    ranks = difference(here[ACTIVATED], here[JOINT], AUROC)
    adds = difference(there["activated_likelihood"], there["likelihood"], AUROC)
    found = [
        Criterion(f"of {compared:,} texts, the sleeping adapter changes none", exactly(unequal), unequal == 0),
        Criterion("in-domain, ECE of the activated: at most .10", error, at_most(error.value, 0.10)),
        Criterion("in-domain, ECE of the activated minus the joint's: below 0", below, at_most(below.value, 0.0)),
        Criterion(
            "in-domain, AUROC of the activated minus the joint's: at least -.01", ranks, above(ranks.value, -0.01)
        ),
    ]
    for size in SIZES_OF_VOTES:
        gain = estimate_of(curves["id"][ACTIVATED][size - 1] - curves["id"][PLAIN[BASE]][size - 1])
        text = f"in-domain, {size} votes weighted by the activated minus {size} plain ones: lower end above -.005"
        found.append(Criterion(text, gain, above(gain.low, -0.005)))
    text = "out of domain, AUROC of log-probability + activated minus log-probability: lower end above 0"
    return [*found, Criterion(text, adds, above(adds.low, 0.0))]
