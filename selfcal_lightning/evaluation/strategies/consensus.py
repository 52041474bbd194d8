"""Near-unanimous answers: how often they are right, and what the winner's share says about risk."""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.fitting.weighed_pool import WeighedPool
from selfcal_lightning.evaluation.reports.strategy_rows import ConsensusRow
from selfcal_lightning.functional.curves import risk_coverage, wilson_interval
from selfcal_lightning.functional.discrimination import aurc
from selfcal_lightning.records import Sample
from selfcal_lightning.strategies.base import leader, weighted_votes

NEAR_UNANIMOUS = 0.9


def consensus_rows(side: str, weighed: WeighedPool, *, threshold: float = NEAR_UNANIMOUS) -> list[ConsensusRow]:
    """Return one row without weights and one for each confidence, over all samples of each question.

    The winner's share of the weight is its soft self-consistency; "near-unanimous" means that it lies above
    ``threshold``. A question without a vote has the share 0 and is wrong.

    Args:
        side: Whose samples.
        weighed: The samples.
        threshold: The share to exceed.
    """
    rows = []
    for name in (None, *weighing_confidences(weighed)):
        verdicts = [winner(entry.samples, name) for entry in weighed.pool.entries]
        shares = [share for share, _ in verdicts]
        correct = [right for _, right in verdicts]
        above = [right for share, right in verdicts if share > threshold]
        rows.append(
            ConsensusRow(
                side,
                name,
                threshold,
                share=wilson_interval(len(above), len(verdicts)),
                correct=wilson_interval(sum(above), len(above)),
                aurc=aurc(shares, correct),
                curve=risk_coverage(shares, correct),
            )
        )
    return rows


def weighing_confidences(weighed: WeighedPool) -> tuple[str, ...]:
    """Return the confidences that can weigh votes: a log-probability is below 0, and compares responses only."""
    return tuple(
        name
        for name in weighed.confidences
        if all(
            (confidence_of(sample, name) or 0.0) >= 0.0
            for entry in weighed.pool.entries
            for sample in entry.samples
            if sample.answer is not None
        )
    )


def winner(samples: Sequence[Sample], confidence: str | None) -> tuple[float, bool]:
    """Return the winner's share of the weight and whether it is right.

    Example:
        >>> votes = [("7", True), ("7", True), ("7", True), ("8", False), (None, False)]
        >>> samples = [Sample("q", i, 0, "", (), "stop", a, right) for i, (a, right) in enumerate(votes)]
        >>> winner(samples, None)
        (0.75, True)
    """
    votes = weighted_votes(samples, confidence)
    answer = leader(votes)
    total = math.fsum(votes.values())
    if answer is None:
        return 0.0, False
    right = next(sample.correct for sample in samples if sample.answer == answer)
    return (min(votes[answer] / total, 1.0) if total > 0.0 else 0.0), bool(right)
