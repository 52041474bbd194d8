from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.house import Vectors

from selfcal_lightning.datamodules.ssc import sampler as ssc
from selfcal_lightning.datamodules.ssc.sampler import DealByLength, DealByPrompt, EpochDraw, Mixture, group_by_question


def make_target(num_rows: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).beta(0.6, 0.5, num_rows).round(3)


def confident(target: np.ndarray) -> np.ndarray:
    return np.nan_to_num(target) > 0.75


def pools_of(target: np.ndarray, task: list[str]) -> dict[str, ssc.TaskPools]:
    return ssc.build_pools(
        target, task, confident=confident(target), tasks=dict.fromkeys(task), num_buckets=ssc.NUM_BUCKETS
    )


def make_mixture(**changes: Any) -> Mixture:
    settings = {"total_tuples": 400, "generation_ratio": 0.7, "shares": {"a": 0.5, "b": 0.5}}
    return Mixture(**{**settings, **changes})


def drawn(target: np.ndarray, *, seed: int = 0, epoch: int = 0, **changes: Any) -> EpochDraw:
    mixture = make_mixture(**{"shares": {"a": 1.0}, **changes})
    return mixture.draw(pools_of(target, ["a"] * len(target)), confident(target), seed=seed, epoch=epoch)


def make_sampler(draw: EpochDraw, lengths: np.ndarray, **changes: Any) -> ssc.OptimizerStepSampler:
    settings: dict[str, Any] = {"num_steps": 10, "batch_size": 2, "accumulate": 1, "world_size": 1, "rank": 0}
    settings |= {"position": lambda: (0, 0), **changes}
    settings.setdefault("limit", settings["num_steps"] * settings["accumulate"])
    deal = DealByLength(lengths, settings.pop("batch_size"))
    return ssc.OptimizerStepSampler(lambda epoch: draw, deal, **settings)


def test_counts_are_those_of_the_reference_with_its_21_slots(vectors: Vectors) -> None:
    for case in vectors("training_mixture_counts")["cases"]:
        total, ratio, share = (case[name] for name in ("total_train_samples", "causal_lm_ratio", "train_percentage"))
        counts = Mixture(total, ratio, {"a": share}, num_buckets=21).reference_counts()
        assert counts == {"a": (case["num_causal"], [case["samples_per_slot"]] * 21)}


def test_pools_close_the_last_bucket_and_open_eta() -> None:
    pools = pools_of(np.array([0.0, 0.15, 0.75, 0.7501, 1.0, np.nan]), ["a"] * 6)["a"]
    assert pools.generation.tolist() == [3, 4]
    filled = {index: rows.tolist() for index, rows in enumerate(pools.buckets) if len(rows)}
    assert filled == {0: [0], 3: [1], 15: [2, 3], 19: [4]}


@pytest.mark.parametrize("seed", range(5))
def test_allocation_is_even_within_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = rng.integers(0, 30, 20)
    total = int(rng.integers(0, capacity.sum() + 1))
    counts = ssc.allocate(total, np.ones(20), capacity, rng)
    assert counts.sum() == total
    assert (counts <= capacity).all()
    open_parts = counts[counts < capacity]
    if len(open_parts):
        assert open_parts.max() - open_parts.min() <= 1
        assert counts.max() <= open_parts.min() + 1


def test_an_epoch_has_exactly_the_tuples_that_were_asked_for() -> None:
    target, task = make_target(), ["a"] * 1500 + ["b"] * 500
    mixture = make_mixture()
    draw = mixture.draw(pools_of(target, task), confident(target), seed=0, epoch=0)
    assert len(draw.rows) == mixture.rows_per_epoch == 400
    generation = draw.calibration_weight == 0
    assert generation.sum() == 280
    assert (target[draw.rows[generation]] > 0.75).all()
    assert (draw.generation_weight[generation] == 1).all()
    assert (draw.generation_weight[~generation] == (target[draw.rows[~generation]] > 0.75)).all()
    # 120 calibration tuples, half of them for each task, 3 from each of 20 buckets.
    for name, rows in {"a": draw.rows < 1500, "b": draw.rows >= 1500}.items():
        assert (rows & ~generation).sum() == 60, name
        buckets = Counter(min(int(value * 20 + 1e-9), 19) for value in target[draw.rows[rows & ~generation]])
        assert set(buckets.values()) == {3}
    assert max(Counter(draw.rows[~generation].tolist()).values()) == 1


def test_draws_of_exact_small_and_unsure_pools() -> None:
    draw = drawn(make_target(), exact=True)
    assert (draw.generation_weight == 1 - draw.calibration_weight).all()
    draw = drawn(np.array([0.1, 0.5, 0.9]), total_tuples=100, generation_ratio=0.1)
    assert sorted(Counter(draw.rows[draw.calibration_weight == 1].tolist()).values()) == [30, 30, 30]
    draw = drawn(np.full(50, 0.4), total_tuples=40)
    assert len(draw.rows) == draw.calibration_weight.sum() == 40


def test_the_draw_is_keyed_by_seed_and_epoch() -> None:
    draws = [drawn(make_target(), seed=seed, epoch=epoch).rows for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]]
    assert (draws[0] == draws[1]).all()
    assert set(draws[0]) not in (set(draws[2]), set(draws[3]))


def test_small_pools_are_drawn_again_row_by_row_and_within_the_limit() -> None:
    # One row in bucket 0, two in bucket 10, a hundred in the last: 90 calibration tuples, 4 repeats at most.
    draw = drawn(np.array([0.01, 0.51, 0.52] + [0.99] * 100), total_tuples=300)
    rows = Counter(draw.rows[draw.calibration_weight == 1].tolist())
    assert (rows[0], rows[1], rows[2]) == (4, 4, 4)
    assert sum(rows.values()) == 90
    assert max(count for row, count in rows.items() if row > 2) == 1
    generation = Counter(draw.rows[draw.calibration_weight == 0].tolist())
    assert set(generation.values()) == {2, 3}
    assert sum(generation.values()) == 210
    _, taken, repeated, missing = draw.counts["a"]  # of the generation pool, then of each bucket
    assert (taken[1], repeated[1], repeated[11]) == (1, 3, 6)
    assert (taken[0], repeated[0], missing.any()) == (100, 110, False)


def test_without_filling_the_counts_are_the_references() -> None:
    target = make_target(300)
    pools = pools_of(target, ["a"] * 300)
    mixture = make_mixture(total_tuples=2000, shares={"a": 0.5}, fill=False)
    draw = mixture.draw(pools, confident(target), seed=0, epoch=0)
    generation, (per_bucket, *_) = mixture.reference_counts()["a"]
    sizes = [len(rows) for rows in pools["a"].buckets]
    assert (draw.calibration_weight == 1).sum() == sum(min(size, per_bucket) for size in sizes)
    assert (draw.calibration_weight == 0).sum() == min(len(pools["a"].generation), generation)
    assert mixture.rows_per_epoch == ssc.NUM_BUCKETS * per_bucket + generation > len(draw.rows)


@pytest.mark.parametrize(("batch_size", "accumulate", "world_size"), [(12, 1, 1), (3, 4, 1), (3, 2, 2), (2, 2, 3)])
def test_steps_are_the_same_however_they_are_dealt(batch_size: int, accumulate: int, world_size: int) -> None:
    lengths = np.random.default_rng(1).integers(10, 200, 500)
    draw = drawn(make_target(500), total_tuples=100)
    dealt_as = {"num_steps": 9, "batch_size": batch_size, "accumulate": accumulate, "world_size": world_size}
    ranks = [list(make_sampler(draw, lengths, **dealt_as, rank=rank)) for rank in range(world_size)]
    edges = np.arange(10) * 100 // 9
    for step in range(9):
        batches = [ranks[rank][step * accumulate + micro] for micro in range(accumulate) for rank in range(world_size)]
        places = range(edges[step], edges[step + 1])
        assert Counter(real_rows(batches)) == Counter(draw.rows[places].tolist())
        assert {batch.calibration_total for batch in batches} == {draw.calibration_weight[places].sum()}
        assert {batch.generation_total for batch in batches} == {draw.generation_weight[places].sum()}
        assert sum(batch.calibration_weight.sum() for batch in batches) == draw.calibration_weight[places].sum()
        dealt = np.concatenate([lengths[batch.rows] for batch in batches])
        assert (np.diff(dealt) <= 0).all()
        assert all(len(batch.rows) == batch_size for batch in batches)
        # Fillers are at the end, weigh nothing, and are as short as can be.
        real = np.concatenate([batch.real for batch in batches])
        assert (np.diff(real.astype(int)) <= 0).all()
        assert all(batch.generation_weight[~batch.real].sum() == 0 for batch in batches)


def real_rows(batches: list[ssc.MicroBatch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.rows[batch.real]]


def test_every_step_has_its_part_of_both_kinds() -> None:
    sampler = make_sampler(drawn(make_target()), np.ones(2000, dtype=np.int64), num_steps=20, batch_size=20)
    assert {batch.calibration_total for batch in sampler} == {6.0}


def test_iteration_goes_on_at_the_position_it_is_told() -> None:
    draw, lengths = drawn(make_target(200), total_tuples=60), np.arange(200)
    whole = [batch.rows.tolist() for batch in make_sampler(draw, lengths, accumulate=3)]
    for start in (0, 1, 5, 6, 29):
        rest = make_sampler(draw, lengths, accumulate=3, position=lambda start=start: (0, start))
        assert [batch.rows.tolist() for batch in rest] == whole[start:]
        assert len(rest) == len(whole) == 30


def test_the_position_is_read_first_and_totals_count_what_is_run() -> None:
    draw = EpochDraw(np.arange(20), np.ones(20), np.zeros(20), {})
    now = [(0, 0)]
    sampler = make_sampler(draw, np.ones(20, dtype=np.int64), position=lambda: now[0])
    iterator = iter(sampler)
    now[0] = (0, 7)
    assert len(list(iterator)) == 3
    batches = list(make_sampler(draw, np.ones(20, dtype=np.int64), num_steps=2, accumulate=5, limit=7))
    assert [batch.calibration_total for batch in batches[:7]] == [10.0] * 5 + [4.0] * 2
    assert (ssc.limited_batches(10, 7), ssc.limited_batches(10, 1.0), ssc.limited_batches(10, 0.55)) == (7, 10, 5)


def test_validation_deals_whole_questions_and_never_leaves_a_process_without_a_batch() -> None:
    question = np.repeat(np.arange(3), 5)
    lengths = np.arange(15)
    weights = (np.ones(15), np.zeros(15))
    ranks = [ssc.validation_batches(question, lengths, weights, batch_size=4, rank=n, world_size=4) for n in range(4)]
    assert [[len(batch.rows) for batch in batches] for batches in ranks] == [[4, 1], [4, 1], [4, 1], [0, 0]]
    assert sorted(row for batches in ranks for row in real_rows(batches)) == list(range(15))
    assert ranks[1][0].rows.tolist() == [9, 8, 7, 6]
    assert ranks[1][0].calibration_total == 4.0


def make_draw() -> tuple[EpochDraw, np.ndarray]:
    """An epoch over a table of eight rows a question; some rows are drawn twice."""
    rng = np.random.default_rng(0)
    question = np.repeat(np.arange(40), 8)
    rows = np.concatenate([np.arange(len(question)), rng.integers(0, len(question), 280)])
    calibrates = (rng.random(600) < 0.3).astype(float)
    order = rng.permutation(600)
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
    # Two groups of one question may meet by chance; nearly all runs are single groups of similar size.
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


def test_a_prompt_counts_once_and_questions_stay_whole_if_they_can() -> None:
    question, prompt = np.array([0, 0, 1]), np.array([10, 10, 7])
    deal = DealByPrompt(question, prompt, np.array([15, 18, 9]))
    assert deal.tokens(np.array([0, 1, 2])) == 10 + 5 + 8 + 7 + 2
    [(places, real)] = deal(np.array([2, 1, 0]), 1)
    assert real.all()
    assert deal.question[np.array([2, 1, 0])[places]].tolist() == [0, 0, 1]
    deal = DealByPrompt(np.zeros(8, dtype=np.int64), np.full(8, 10), np.full(8, 30))
    assert [len(places) for places, _ in deal(np.arange(8), 2)] == [4, 4]
    rng = np.random.default_rng(0)
    question, prompt = np.repeat(np.arange(8), 8), np.full(64, 190)
    deal = DealByPrompt(question, prompt, prompt + rng.integers(20, 80, 64))
    rows = rng.permutation(64)
    assert all(len(set(question[rows[places]])) == 1 for places, _ in deal(rows, 8))


def test_the_budget_cuts_trees_and_refuses_what_does_not_fit() -> None:
    rows = np.arange(8)
    packed = DealByPrompt(np.zeros(8, dtype=np.int64), np.full(8, 10), np.full(8, 30), token_budget=100)
    assert [packed.tokens(rows[places]) for places, _ in packed(rows, 2)] == [90, 90]
    padded = DealByLength(np.array([50, 40, 20, 10]), batch_size=2, token_budget=100)
    assert [places.tolist() for places, _ in padded(np.arange(4), 2)] == [[0, 1], [2, 3]]
    for deal, bins, message in (
        (packed, 1, r"170 tokens exceeds `token_budget` 100\. Divide `batch_size` by 2"),
        (replace(packed, lengths=np.full(8, 111)), 8, r"111 tokens exceeds `token_budget` 100.*lower `max_length`"),
        (replace(padded, token_budget=99), 2, r"100 tokens exceeds `token_budget` 99\. Divide `batch_size` by 2"),
        (replace(padded, token_budget=49, batch_size=1), 4, "50 tokens exceeds .*lower `max_length`"),
    ):
        with pytest.raises(ValueError, match=message):
            deal(np.arange(len(deal.lengths)), bins)


def test_the_summary_says_what_is_saved() -> None:
    deal = DealByPrompt(np.repeat([0, 1], 4), np.full(8, 30), np.full(8, 40))
    rows = np.arange(8)
    dealt = deal(rows, 2)
    assert [deal.tokens(rows[places]) for places, _ in dealt] == [70, 70]
    text = ssc.packed_summary([rows], [dealt], deal)
    # 320 tokens apart; 2 * 30 + 8 * 10 = 140 packed.
    assert "4.0 to a prompt, 56% fewer tokens" in text
    assert text.endswith("has 70 tokens")
