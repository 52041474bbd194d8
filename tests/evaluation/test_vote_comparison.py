"""Votes before and after, held against the strategies' own replay and against counting by hand."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from support.number_pools import write_number_pool
from support.strategy_pools import make_entry, with_samples

from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import RecordedPool, texts_digest
from selfcal_lightning.evaluation.calibration import VoteRow, compare_votes, vote_hits, votes_figure
from selfcal_lightning.evaluation.curves import Reshuffles
from selfcal_lightning.evaluation.inputs import Inputs
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.bootstrap import Estimate

WIDTH = 4


def pool_of(weights: list[list[float]]) -> RecordedPool:
    texts = ["abab", "bbac", "a-bb"]
    answers = [[None if letter == "-" else letter for letter in text] for text in texts]
    rows = enumerate(zip(answers, weights, strict=True))
    return RecordedPool(tuple(make_entry(given, sure, name=f"q{number}") for number, (given, sure) in rows))


FLAT = [[0.5] * 4] * 3
SHARP = [[0.9, 0.1, 0.8, 0.1], [0.1, 0.1, 0.9, 0.1], [0.9, 0.9, 0.1, 0.1]]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_hits_are_those_of_the_strategy_in_every_order(is_weighted: bool) -> None:
    pool = pool_of(SHARP)
    orders = Reshuffles(pool, [None, "p_true"], width=WIDTH, num_reshuffles=5_000, seed=3)
    found = vote_hits(orders, "p_true", [1, 2, 4])[is_weighted]
    for place, width in enumerate([1, 2, 4]):
        strategy = SelfConsistency(max_samples=width, confidence="p_true" if is_weighted else None)
        for at, group in enumerate(pool.entries):
            verdicts = [replay(strategy, replace(group, samples=order)) for order in permutations(group.samples)]
            hits = [verdict.answer == group.question.reference for verdict in verdicts]
            assert found[place, at] == pytest.approx(np.mean(hits), abs=0.03)


def test_weights_that_tell_right_from_wrong_raise_the_weighted_vote_only(tmp_path: Path) -> None:
    sides = {"before": pool_of(FLAT), "after": pool_of(SHARP)}
    keys = compare_votes(Inputs({"id": sides}, {}, {"id": True}), tmp_path, num_reshuffles=200, num_resamples=50)
    for width in (1, 2, 4):
        assert keys[f"own.id.votes_{width}.before"] == keys[f"own.id.votes_{width}.after"]
        assert keys[f"own.id.weighted_votes_{width}.before"] == keys[f"own.id.votes_{width}.before"]
    assert keys["own.id.weighted_votes_4.after"] == 1.0
    assert keys["own.id.votes_4.before"] < 1.0
    assert keys["own.id.votes_2.before.low"] <= keys["own.id.votes_2.before"] <= keys["own.id.votes_2.before.high"]
    for kind in ("votes", "weighted_votes"):
        change = keys[f"own.id.{kind}_4.change"]
        assert change == pytest.approx(keys[f"own.id.{kind}_4.after"] - keys[f"own.id.{kind}_4.before"])
    assert (keys["own.id.votes_4.change.low"], keys["own.id.votes_4.change.high"]) == (0.0, 0.0)
    assert keys["own.id.weighted_votes_4.change.low"] >= 0.0
    assert keys["own.id.same_texts"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"votes.md", "votes.png"}
    header = (tmp_path / "votes.md").read_text().splitlines()[0]
    assert header.endswith(
        "| before, counted | before, weighted | after, counted | after, weighted | change, weighted |"
    )


@pytest.mark.parametrize("tests", [["one"], ["one", "two"]])
def test_the_legend_of_the_votes_fits_into_the_figure(tests: list[str]) -> None:
    kinds = [(side, is_weighted) for side in ("before", "after") for is_weighted in (True, False)]
    figure = votes_figure([VoteRow(test, *kind, (1,), (Estimate(0.5, 0.4, 0.6),)) for test in tests for kind in kinds])
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_texts_are_told_apart_without_keeping_them(tmp_path: Path) -> None:
    texts = {"one": ["It is 1.", "It is 2."], "swapped": ["It is 2.", "It is 1."], "other": ["It is 1.", "It is 3."]}
    digests = {}
    for name, said in texts.items():
        file = write_number_pool(tmp_path / f"{name}.jsonl", {"a": [{"text": text} for text in said]}, split="test")
        import_pool(file, tmp_path / name)
        digests[name] = texts_digest(file)
        assert texts_digest(tmp_path / name, split="test") == digests[name]
    assert len(set(digests.values())) == 3


def test_one_side_alone_and_no_confidence_have_nothing_to_compare(tmp_path: Path) -> None:
    assert compare_votes(Inputs({"id": {"model": pool_of(FLAT)}}, {}), tmp_path) == {}
    bare = tuple(with_samples(pool_of(FLAT).entries, lambda sample: replace(sample, yes_mass=None, no_mass=None)))
    sides = {"before": RecordedPool(bare), "after": RecordedPool(bare)}
    assert compare_votes(Inputs({"id": sides}, {}), tmp_path) == {}
    assert not list(tmp_path.iterdir())
