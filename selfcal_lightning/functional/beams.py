"""The bookkeeping of a beam search over steps: what to score, which paths to keep, how they grow. No engine is in it.

A path is a tuple of segments, the steps so far; segments may be texts or tuples of token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_rates, as_scores, check_positive

_LEAST_SCORE = 1e-7


@dataclass(frozen=True)
class Path:
    """A response that a search has come to.

    Attributes:
        segments: Its steps so far.
        is_done: Whether it is finished: it stays in the search and keeps its place, but does not grow.
    """

    segments: tuple[Hashable, ...] = ()
    is_done: bool = False


@dataclass(frozen=True)
class Continuation:
    """One more step of a path.

    Attributes:
        segment: The step.
        is_last: Whether the path ends with it: the model ended its turn, gave its answer, or ran out of tokens.
    """

    segment: Hashable
    is_last: bool


def select_topk(scores: Array, k: int) -> list[int]:
    """Return the positions of the k best paths, best first; of equal scores the earlier one comes first.

    Args:
        scores: One of each path [P]; higher is better.
        k: How many to keep; all where there are fewer.

    Raises:
        ValueError: If a score is unknown or k is not positive.

    Example:
        >>> select_topk([0.2, 0.9, 0.9, 0.1], 2)
        [1, 2]
    """
    check_positive(k, "k")
    return np.argsort(-as_scores(scores, "scores"), kind="stable")[:k].tolist()


def update_done(is_done: Sequence[bool], is_last: Sequence[bool]) -> list[bool]:
    """Return which paths are finished after a step of each; one that was finished stays so.

    Args:
        is_done: Which were finished before [P].
        is_last: Which ended with the step [P].

    Raises:
        ValueError: If the lengths differ.

    Example:
        >>> update_done([False, True, False], [False, False, True])
        [False, True, True]
    """
    return [before or now for before, now in zip(is_done, is_last, strict=True)]


def grow(paths: Sequence[Path], continuations: Sequence[Sequence[Continuation]]) -> list[Path]:
    """Return the paths after one more step: an open one with each of its continuations, a finished one as it is.

    Args:
        paths: The paths [P].
        continuations: Those of each path [P]; none of a finished one.

    Raises:
        ValueError: If the lengths differ, a finished path has continuations, or an open one has none.

    Example:
        >>> paths = [Path(("a",)), Path(("b",), is_done=True)]
        >>> grown = grow(paths, [[Continuation("c", False), Continuation("d", True)], []])
        >>> [(path.segments, path.is_done) for path in grown]
        [(('a', 'c'), False), (('a', 'd'), True), (('b',), True)]
    """
    grown: list[Path] = []
    for path, steps in zip(paths, continuations, strict=True):
        if path.is_done == bool(steps):
            state = "a finished path to have no continuation" if path.is_done else "an open path to have a continuation"
            raise InputError(f"Expected {state}, but got {len(steps)} for {path.segments!r}.")
        grown += [path] if path.is_done else [Path((*path.segments, step.segment), step.is_last) for step in steps]
    return grown


def distinct(paths: Sequence[Path]) -> list[int]:
    """Return the positions of the first of equal paths, in order: what is worth scoring or going on with.

    Example:
        >>> distinct([Path(("a",)), Path(("b",)), Path(("a",))])
        [0, 1]
    """
    first: dict[Path, int] = {}
    for position, path in enumerate(paths):
        first.setdefault(path, position)
    return list(first.values())


def unscored(keys: Sequence[Hashable], known: Collection[Hashable]) -> list[Hashable]:
    """Return the keys that have no score yet, each once, in order. A key names question and path.

    Example:
        >>> unscored(["a", "b", "a", "c"], known={"b": 0.5})
        ['a', 'c']
    """
    return [key for key in dict.fromkeys(keys) if key not in known]


def particle_weights(scores: Array) -> Floats:
    """Return the chances with which particles are drawn anew: ``p / (1 - p)`` of each, made to add up to 1.

    Args:
        scores: p, the chance of success of each particle [P], taken as at least 1e-7 and at most 1 - 1e-7.

    Returns:
        Chances [P].

    Raises:
        ValueError: If a score lies outside [0, 1].

    Example:
        >>> particle_weights([0.75, 0.5]).tolist()  # 3 to 1
        [0.75, 0.25]

    Reference:
        Puri et al., A Probabilistic Inference Approach to Inference-Time Scaling, arXiv 2502.01618.
    """
    p = as_rates(scores, "scores").clip(_LEAST_SCORE, 1.0 - _LEAST_SCORE)
    odds = p / (1.0 - p)
    return np.asarray(odds / odds.sum()) if odds.size else odds
