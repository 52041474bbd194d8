"""Votes before and after: the accuracy of the majority of k samples, counted and weighted by confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from selfcal_lightning.evaluation.calibration.comparison import own_confidence
from selfcal_lightning.evaluation.calibration.metrics import SIDES
from selfcal_lightning.evaluation.inputs import Inputs
from selfcal_lightning.evaluation.reports.figure_files import save_figure
from selfcal_lightning.evaluation.reports.vote_reports import VoteRow, votes_figure, votes_markdown, votes_table
from selfcal_lightning.evaluation.strategies.reshuffles import Reshuffles
from selfcal_lightning.functional.base import Floats, Integers
from selfcal_lightning.functional.question_means import estimate_of, resample_weights
from selfcal_lightning.runtime.files import write_atomically
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED
from selfcal_lightning.strategies.vectorised.votes import leaders_at, votes_of

KEYS = {False: "votes", True: "weighted_votes"}
CHANGE = "change"


def compare_votes(
    inputs: Inputs,
    folder: Path,
    *,
    num_reshuffles: int = NUM_RESHUFFLES,
    num_resamples: int = 1000,
    seed: int = SEED,
) -> dict[str, Any]:
    """Compare the votes of the first two sides of every test set, print them, and write votes.md and votes.png.

    Weights are P(True), or where it was not asked the first probability that the samples of both sides carry; without
    any, and with one side alone, there is nothing to compare.

    Args:
        inputs: Samples by test set, then by side; the sides have the same questions in one order.
        folder: Where the files go.
        num_reshuffles: Random orders of each question's samples; 0 takes the recorded order alone.
        num_resamples: Bootstrap resamples of the questions.
        seed: Of the orders.

    Returns:
        ``own.{test}.votes_{k}.{before|after|change}`` and ``own.{test}.weighted_votes_{k}.{before|after|change}`` with
        ``.low`` and ``.high``, for k = 1, 2, 4 ..., and ``own.{test}.same_texts``. The change is that of the same
        questions, after minus before.
    """
    keys: dict[str, Any] = {}
    rows: list[VoteRow] = []
    changes: list[VoteRow] = []
    for test, sides in inputs.tests.items():
        name = own_confidence(list(sides.values()))
        if len(sides) != len(SIDES) or name is None:
            continue
        pools = list(sides.values())
        keys[f"own.{test}.same_texts"] = inputs.same_texts.get(test, False)
        widths = powers_of_two(min(len(pool.shortest.samples) for pool in pools))
        means = []
        for pool in pools:
            orders = Reshuffles(pool, [None, name], width=widths[-1], num_reshuffles=num_reshuffles, seed=seed)
            hits = vote_hits(orders, name, widths)
            weights = resample_weights(orders.num_questions, num_resamples=num_resamples)
            means.append({is_weighted: found @ weights for is_weighted, found in hits.items()})
        means.append({is_weighted: means[1][is_weighted] - means[0][is_weighted] for is_weighted in KEYS})
        found = [
            VoteRow(test, side, is_weighted, tuple(widths), tuple(map(estimate_of, columns)))
            for side, by_weighing in zip((*SIDES, CHANGE), means, strict=True)
            for is_weighted, columns in by_weighing.items()
        ]
        keys |= {key: value for row in found for key, value in _row_keys(row).items()}
        rows += [row for row in found if row.side != CHANGE]
        changes += [row for row in found if row.side == CHANGE and row.is_weighted]
    if rows:
        Console().print(votes_table([*rows, *changes]))
        write_atomically(folder / "votes.md", (votes_markdown([*rows, *changes]) + "\n").encode())
        save_figure(votes_figure(rows), folder / "votes.png", dpi=120)
    return keys


def vote_hits(orders: Reshuffles, confidence: str, widths: Sequence[int]) -> dict[bool, Floats]:
    """Return how often the winner among the first k samples of a random order is right [widths, Q], by weighing.

    Args:
        orders: The pool, with the confidence and with None.
        confidence: What weighs the votes where they are weighed.
        widths: k.
    """
    budgets: Integers = np.asarray(widths, dtype=np.int64)
    sums = {is_weighted: np.zeros((len(budgets), orders.num_questions)) for is_weighted in (False, True)}
    for block in orders.blocks():
        rows = np.arange(len(block.right))
        for is_weighted, total in sums.items():
            votes = votes_of(block.pools[confidence if is_weighted else None], weighted=is_weighted)
            # -1, no answer, takes the last column of `right`, which never is.
            is_right = block.right[rows, leaders_at(votes, budgets)]
            questions = block.questions
            number = questions.stop - questions.start
            total[:, questions] += is_right.reshape(len(budgets), -1, number).sum(axis=1)
    return {is_weighted: total / orders.num_orders for is_weighted, total in sums.items()}


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``most``.

    Example:
        >>> powers_of_two(9)
        [1, 2, 4, 8]
    """
    return [1 << power for power in range(most.bit_length())]


def _row_keys(row: VoteRow) -> dict[str, float | None]:
    keys: dict[str, float | None] = {}
    for width, found in zip(row.widths, row.accuracy, strict=True):
        key = f"own.{row.test}.{KEYS[row.is_weighted]}_{width}.{row.side}"
        keys |= {key: found.value, f"{key}.low": found.low, f"{key}.high": found.high}
    return keys
