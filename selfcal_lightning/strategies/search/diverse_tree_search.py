"""Diverse verifier tree search: several beams of one that know nothing of each other, so that they stay different."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.beams import Path, select_topk
from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.search.paths import SearchedPaths
from selfcal_lightning.strategies.search.scoring import PathScorer, check_counts


@dataclass(frozen=True)
class DiverseTreeSearch:
    """Share the first steps out to trees; each goes on from its own best beginning, until its response ends.

    In a tree ``width // trees`` steps are drawn at a time and one is kept. After ``max_steps`` what is still open is
    drawn to its end. The answer is that of the best response of all trees by the mean score; ties go to the first.

    Attributes:
        scorer: The reward model.
        width: Steps that are drawn at a time, in all trees.
        trees: Trees; ``width`` is a multiple of it.
        max_steps: Steps after which the search ends.
        lookahead: Further steps that are drawn of each beginning before a choice, which is made by the scores there.
            They are thrown away, and cost what they cost.

    Reference:
        Beeching, Tunstall and Rush, Scaling Test-Time Compute with Open Models, 2024.
    """

    name: ClassVar[str] = "diverse_tree_search"
    confidence: ClassVar[None] = None
    reads_steps: ClassVar[bool] = True

    scorer: PathScorer
    width: int = 8
    trees: int = 4
    max_steps: int = 16
    lookahead: int = 0

    def __post_init__(self) -> None:
        check_counts(width=self.width, trees=self.trees, max_steps=self.max_steps)
        check_counts(0, lookahead=self.lookahead)
        if self.width % self.trees:
            raise InputError(f"Expected `width` to be a multiple of `trees`, {self.trees}, but got {self.width}.")

    @property
    def max_samples(self) -> int:
        """Most samples of a question: steps, those that are looked ahead, and whole responses."""
        return self.width * self.max_steps * (1 + self.lookahead) + self.trees

    def solve(self, question: Question) -> Solving:
        """Search, and return the answer of the best response."""
        search, each = SearchedPaths(question, self.scorer), self.width // self.trees
        first = yield from search.begin(self.width)
        trees = [first[start : start + each] for start in range(0, len(first), each)]
        for step in range(1, self.max_steps + 1):
            kept: list[Path] = []
            for paths in trees:
                ahead = yield from search.look_ahead(paths, self.lookahead)
                (best,) = select_topk([score.mean for score in search.scores(ahead)], 1)
                kept.append(paths[best])
            if step == self.max_steps or all(path.is_done for path in kept):
                break
            trees = []
            for path in kept:
                trees.append((yield from search.draw([path], each)))
        kept = yield from search.draw(kept, to_step_end=False)
        return search.verdict(kept)
