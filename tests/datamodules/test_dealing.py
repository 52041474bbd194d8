"""The order of responses that share prompts, and how an optimiser step's rows are dealt to packed micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from selfcal_lightning.datamodules.ssc.mixture import EpochDraw
from selfcal_lightning.datamodules.ssc.sampler import (
    DealByLength,
    DealByPrompt,
    count_packed,
    group_by_question,
    packed_summary,
)


def make_draw(num_questions: int = 40, num_rows: int = 600, seed: int = 0) -> tuple[EpochDraw, np.ndarray]:
    """An epoch over a table of eight rows a question; some rows are drawn twice."""
    rng = np.random.default_rng(seed)
    question = np.repeat(np.arange(num_questions), 8)
    rows = np.concatenate([np.arange(len(question)), rng.integers(0, len(question), num_rows - len(question))])
    calibrates = (rng.random(num_rows) < 0.3).astype(float)
    order = rng.permutation(num_rows)
    return EpochDraw(rows[order], calibrates[order], 1.0 - calibrates[order], {}), question


def test_a_group_of_one_and_an_empty_draw_stay_as_they_are() -> None:
    draw, question = make_draw()
    assert group_by_question(draw, question, group_size=1, seed=0, epoch=0) is draw
    empty = EpochDraw(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), {})
    assert group_by_question(empty, np.arange(3), group_size=8, seed=0, epoch=0) is empty


@pytest.mark.parametrize("group_size", [2, 5, 8, 100])
def test_grouping_changes_the_order_alone(group_size: int) -> None:
    draw, question = make_draw()
    grouped = group_by_question(draw, question, group_size=group_size, seed=0, epoch=0)
    assert Counter(zip(grouped.rows, grouped.calibration_weight, grouped.generation_weight, strict=True)) == Counter(
        zip(draw.rows, draw.calibration_weight, draw.generation_weight, strict=True)
    )
    runs = np.diff(np.flatnonzero(np.concatenate([[True], np.diff(question[grouped.rows]) != 0, [True]])))
    # Two groups of one question may meet by chance; nearly all runs are single groups of like size.
    assert np.median(runs) >= min(group_size, 8) * 0.6
    assert (runs <= group_size).mean() > 0.9
    again = group_by_question(draw, question, group_size=group_size, seed=0, epoch=0)
    assert (again.rows == grouped.rows).all()
    other = group_by_question(draw, question, group_size=group_size, seed=0, epoch=1)
    assert (other.rows != grouped.rows).any()


def test_grouping_keeps_both_kinds_spread_over_the_epoch() -> None:
    """Questions whose rows are all of one kind: in any tenth of the epoch their part is that of the whole."""
    question = np.repeat(np.arange(200), 5)
    calibrates = np.repeat(np.arange(200) % 4 == 0, 5).astype(float)
    draw = EpochDraw(np.arange(1000), calibrates, 1.0 - calibrates, {})
    grouped = group_by_question(draw, question, group_size=5, seed=0, epoch=0)
    parts = grouped.calibration_weight.reshape(10, 100).mean(axis=1)
    assert np.abs(parts - 0.25).max() <= 0.05


def test_a_row_drawn_again_goes_to_another_group() -> None:
    question = np.repeat(np.arange(30), 8)
    rows = np.tile(np.arange(240), 2)
    draw = EpochDraw(rows, np.ones(480), np.zeros(480), {})
    grouped = group_by_question(draw, question, group_size=4, seed=0, epoch=0)
    together = sum(len(set(part)) < len(part) for part in np.split(grouped.rows, 120))
    assert together <= 12


@pytest.mark.parametrize(("num_bins", "num_rows"), [(1, 30), (4, 30), (8, 64), (16, 40), (6, 3)])
def test_every_row_is_dealt_once_and_loads_are_like(num_bins: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_bins)
    question = np.repeat(np.arange(20), 8)
    prompt = np.repeat(rng.integers(20, 60, 20), 8)
    deal = DealByPrompt(question, prompt, prompt + rng.integers(10, 90, 160))
    rows = rng.permutation(160)[:num_rows]
    dealt = deal(rows, num_bins)
    assert len(dealt) == num_bins
    assert sorted(place for at, real in dealt for place in at[real]) == list(range(num_rows))
    assert all(len(at) for at, _ in dealt)
    loads = [deal.tokens(rows[at[real]]) if real.any() else 0 for at, real in dealt]
    assert loads == sorted(loads, reverse=True)
    if num_rows >= 2 * num_bins:
        assert loads[0] < 1.6 * np.mean(loads)
    for at, real in dealt:
        if not real.all():
            assert len(at) == 1
            assert deal.lengths[rows[at[0]]] == deal.lengths[rows].min()


def test_tokens_count_a_prompt_once() -> None:
    question, prompt = np.array([0, 0, 1]), np.array([10, 10, 7])
    deal = DealByPrompt(question, prompt, np.array([15, 18, 9]))
    assert deal.tokens(np.array([0, 1, 2])) == 10 + 5 + 8 + 7 + 2
    [(places, real)] = deal(np.array([2, 1, 0]), 1)
    assert real.all()
    assert deal.question[np.array([2, 1, 0])[places]].tolist() == [0, 0, 1]


def test_questions_of_like_size_stay_whole() -> None:
    rng = np.random.default_rng(0)
    question, prompt = np.repeat(np.arange(8), 8), np.full(64, 190)
    deal = DealByPrompt(question, prompt, prompt + rng.integers(20, 80, 64))
    rows = rng.permutation(64)
    assert all(len(set(question[rows[places]])) == 1 for places, _ in deal(rows, 8))


def test_one_question_is_cut_between_two_micro_batches_when_there_is_nothing_else() -> None:
    deal = DealByPrompt(np.zeros(8, dtype=np.int64), np.full(8, 10), np.full(8, 30))
    assert [len(places) for places, _ in deal(np.arange(8), 2)] == [4, 4]


def test_the_budget_cuts_trees_and_refuses_what_does_not_fit() -> None:
    deal = DealByPrompt(np.zeros(8, dtype=np.int64), np.full(8, 10), np.full(8, 30), token_budget=100)
    rows = np.arange(8)
    with pytest.raises(ValueError, match=r"170 tokens exceeds `token_budget` 100\. Divide `batch_size` by 2"):
        deal(rows, 1)
    assert [deal.tokens(rows[places]) for places, _ in deal(rows, 2)] == [90, 90]
    padded = DealByLength(np.array([50, 40, 20, 10]), batch_size=2, token_budget=100)
    assert [places.tolist() for places, _ in padded(np.arange(4), 2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"100 tokens exceeds `token_budget` 99\. Divide `batch_size` by 2"):
        replace(padded, token_budget=99)(np.arange(4), 2)


def test_a_row_that_exceeds_the_budget_alone_gets_advice_that_helps() -> None:
    lengths = np.array([111, 30])
    packed = DealByPrompt(np.array([0, 1]), np.full(2, 10), lengths, token_budget=100)
    for deal in (packed, DealByLength(lengths, batch_size=1, token_budget=100)):
        with pytest.raises(ValueError, match=r"111 tokens exceeds `token_budget` 100.*lower `max_length`"):
            deal(np.arange(2), 2)


def test_the_summary_says_what_is_saved() -> None:
    deal = DealByPrompt(np.repeat([0, 1], 4), np.full(8, 30), np.full(8, 40))
    rows = np.arange(8)
    tokens = count_packed([deal(rows, 2)], [rows], deal)
    assert tokens == (8, 2, 140, 320, 70)
    assert tokens.saved == 1 - 140 / 320
    text = packed_summary(tokens)
    # 320 tokens apart; 2 * 30 + 8 * 10 = 140 packed.
    assert "4.0 to a prompt, 56% fewer tokens" in text
    assert text.endswith("has 70 tokens")
