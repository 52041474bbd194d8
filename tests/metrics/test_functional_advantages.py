"""Group advantages against numpy on whole groups, by hand, and by what they must not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.metrics.group_rewards import group_advantages

GROUPS = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 4).map(lambda n: n / 4)), max_size=6), max_size=5)


def _reference_numpy_advantages(
    groups: list[list[float | None]], scale: str, leave_one_out: bool
) -> list[list[float | None]]:
    """Go through the responses one by one."""
    everything = [r for group in groups for r in group if r is not None]
    found = []
    for group in groups:
        known = [r for r in group if r is not None]
        row: list[float | None] = []
        for at, reward in enumerate(group):
            if reward is None:
                row.append(None)
                continue
            others = [r for i, r in enumerate(group) if r is not None and not (leave_one_out and i == at)]
            if len(known) < 2 or len(set(known)) == 1:
                row.append(0.0)
                continue
            unit = {"none": 1.0, "group": np.std(known, ddof=1), "batch": np.std(everything, ddof=1)}[scale]
            row.append(float((reward - np.mean(others)) / unit))
        found.append(row)
    return found


@settings(deadline=None)
@given(GROUPS, st.sampled_from(["group", "none", "batch"]), st.booleans())
def test_advantages_equal_numpy(groups: list[list[float | None]], scale: str, leave_one_out: bool) -> None:
    found = group_advantages(groups, scale=scale, leave_one_out=leave_one_out)
    wanted = _reference_numpy_advantages(groups, scale, leave_one_out)
    assert found == [[None if a is None else pytest.approx(a, abs=1e-9) for a in row] for row in wanted]


def test_by_hand() -> None:
    # Mean 1/4, deviations 3/4 and three times -1/4: variance (9 + 3) / 16 / 3 = 1/4, so in units of 1/2.
    assert group_advantages([[1.0, 0.0, 0.0, 0.0]]) == [pytest.approx([1.5, -0.5, -0.5, -0.5])]
    assert group_advantages([[1.0, 0.0, 0.0, 0.0]], scale="none", leave_one_out=True) == [
        pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    ]


@settings(deadline=None)
@given(GROUPS, st.floats(-5.0, 5.0), st.floats(0.1, 10.0))
def test_a_shift_changes_nothing_and_a_scale_neither(
    groups: list[list[float | None]], shift: float, scale: float
) -> None:
    moved = [[None if r is None else scale * r + shift for r in group] for group in groups]
    near = [[None if a is None else pytest.approx(a, abs=1e-6) for a in row] for row in group_advantages(groups)]
    assert group_advantages(moved) == near


def test_constant_and_lone_groups_give_zeros_even_where_sums_round() -> None:
    assert group_advantages([[0.1] * 7, [0.3], [], [None, 0.5]]) == [[0.0] * 7, [0.0], [], [None, 0.0]]
    nearly = [0.7, 0.7 + 1e-9]
    assert group_advantages([nearly], scale="none") == [[0.0, 0.0]]
    assert group_advantages([nearly], minimum_spread=0.0)[0][1] > 0.0


def test_a_group_does_not_depend_on_its_neighbours_unless_asked() -> None:
    alone, beside = group_advantages([[1.0, 0.0]])[0], group_advantages([[1.0, 0.0], [9.0, 5.0]])[0]
    assert alone == beside
    assert group_advantages([[1.0, 0.0], [9.0, 5.0]], scale="batch")[0] != alone
