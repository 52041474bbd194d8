"""Window stopping (ESC): sliding and disjoint windows that agree, and the vote where none does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from support.vote_cases import (
    outcome_of,
    score_entry,
    verdict_of,
)

from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.stopping import Mode, WindowStopping

MODES = get_args(Mode)
WINDOWS = (3, 1, 2, 4, 9, 20)


@pytest.mark.parametrize(
    ("mode", "window", "outcome"),
    [
        # a b b a | a a c c: the sliding windows see "b b" at once, the disjoint ones are ab, ba, aa.
        ("sliding", 2, ("b", 3, True)),
        ("disjoint", 2, ("a", 6, True)),
        ("sliding", 3, ("a", 6, True)),
        # abb, aaa
        ("disjoint", 3, ("a", 6, True)),
        ("sliding", 4, ("a", 8, False)),
        ("disjoint", 1, ("a", 1, True)),
    ],
)
def test_windows_by_hand(mode: Mode, window: int, outcome: tuple[str, int, bool]) -> None:
    assert outcome_of(verdict_of(WindowStopping(window, mode=mode), list("abbaaacc"))) == outcome


def test_a_window_that_agrees_need_not_be_the_majority() -> None:
    verdict = verdict_of(WindowStopping(2, mode="sliding"), list("abacc"))
    assert outcome_of(verdict) == ("c", 5, True)
    assert verdict.confidence == 0.4  # its share of the votes


@pytest.mark.parametrize("mode", MODES)
def test_unreadable_answers_are_skipped_and_cost_a_sample(mode: Mode) -> None:
    verdict = verdict_of(WindowStopping(3, mode=mode), ["a", None, "a", None, None, "a", "b"])
    assert outcome_of(verdict) == ("a", 6, True)
    assert verdict.confidence == 1.0
    assert outcome_of(verdict_of(WindowStopping(3, 5, mode=mode), ["a", None, "a", None, None, "a"])) == ("a", 5, False)


def test_disjoint_windows_are_asked_for_at_once_and_filled_up() -> None:
    samples = score_entry(["a", None, "a", "b", "b", "b", "b", "b"], [None] * 8).samples
    asks, verdict = _asks(WindowStopping(3, 8), samples)
    # a, none, a; one more is missing: b. Then b b b agree.
    assert asks == [Ask(3), Ask(1), Ask(3)]
    assert outcome_of(verdict) == ("b", 7, True)
    asks, verdict = _asks(WindowStopping(3, 5), samples)
    assert asks == [Ask(3), Ask(1), Ask(1)]  # the budget ends in a window
    assert outcome_of(verdict) == ("a", 5, False)  # a a b b: the first seen
    asks, verdict = _asks(WindowStopping(3, mode="sliding"), samples[:2])
    assert asks == [Ask(1), Ask(1), Ask(1)]


def _asks(strategy: WindowStopping, samples: Sequence[Any]) -> tuple[list[Ask], Any]:
    solving, asks, position = strategy.solve(score_entry([], []).question), [], 0
    try:
        asks.append(next(solving))
        while True:
            number = asks[-1].num_samples
            batch, position = list(samples[position : position + number]), position + number
            asks.append(solving.send(batch))
    except StopIteration as stop:
        return asks, stop.value


@pytest.mark.parametrize("mode", MODES)
def test_against_windows_cut_from_a_string(mode: Mode) -> None:
    draw = random.Random(4)
    for _ in range(300):
        answers = draw.choices("ab", weights=[2, 1], k=draw.randint(1, 12))
        window = draw.randint(1, 5)
        step = 1 if mode == "sliding" else window
        starts = range(0, len(answers) - window + 1, step)
        hit = next((start for start in starts if len(set(answers[start : start + window])) == 1), None)
        majority = "a" if answers.count("a") * 2 > len(answers) else "b" if "b" in answers else "a"
        if answers.count("a") * 2 == len(answers):
            majority = answers[0]
        wanted = (majority, len(answers), False) if hit is None else (answers[hit], hit + window, True)
        assert outcome_of(verdict_of(WindowStopping(window, mode=mode), answers)) == wanted
