"""Beam search over the steps of a response, steered by a reward model; its width may follow from the scores."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.beams import Path, distinct, select_topk
from selfcal_lightning.functional.instance_adaptive import paths_to_keep, samples_per_path
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Ask, Solving
from selfcal_lightning.strategies.search.paths import SearchedPaths
from selfcal_lightning.strategies.search.scoring import By, PathScorer, check_search

Adaptive = Literal["none", "k", "m", "km"]
Duplicates = Literal["merge", "refill", "keep"]


@dataclass(frozen=True)
class BeamSearch:
    """Draw steps of several responses, keep the best beginnings, go on with each several times, and so on.

    A response that ended keeps its place among the best until better ones take it. After ``max_steps`` what is still
    open is drawn to its end. The answer is that of the best response by the mean score; ties go to the first.

    Attributes:
        scorer: The reward model.
        width: First steps that are drawn, and most beginnings at any time.
        keep: Beginnings that are kept, at most; ``width`` is a multiple of it, and ``width // keep`` samples go on from
            each.
        max_steps: Steps after which the search ends.
        frequency: Steps that each beginning gets from one choice to the next.
        lookahead: Further steps that are drawn of each beginning before a choice, which is made by the scores there.
            They are thrown away, and cost what they cost.
        duplicates: What becomes of equal beginnings: "merge" counts them once, "refill" too, and goes on with others
            more than once where fewer than ``keep`` are left, "keep" lets each have its place.
        adaptive: What follows from the scores: nothing, how many beginnings are kept ("k"), how many samples go on from
            each ("m"), or both.
        target: Wanted chance of a right answer where something does, in (0, 1).
        by: Whether that is told by the "mean" or the "low" quantile.

    Reference:
        Park et al., Know What You Don't Know, arXiv 2506.09338; Snell et al., arXiv 2408.03314.
    """

    name: ClassVar[str] = "beam_search"
    confidence: ClassVar[None] = None
    reads_steps: ClassVar[bool] = True

    scorer: PathScorer
    width: int = 8
    keep: int = 2
    max_steps: int = 16
    frequency: int = 1
    lookahead: int = 0
    duplicates: Duplicates = "merge"
    adaptive: Adaptive = "none"
    target: float = 0.99
    by: By = "mean"

    def __post_init__(self) -> None:
        counts = {"width": self.width, "keep": self.keep, "max_steps": self.max_steps, "frequency": self.frequency}
        check_search(target=self.target, by=self.by, lookahead=self.lookahead, **counts)
        if self.keep > self.width:
            raise InputError(f"Expected `keep` to be at most `width`, {self.width}, but got {self.keep}.")
        if self.width % self.keep:
            raise InputError(
                f"Expected `width` to be a multiple of `keep`, {self.keep}, but got {self.width}: each beginning gets "
                f"as many samples. Use {self.width - self.width % self.keep}, or another `keep`."
            )
        if self.adaptive not in get_args(Adaptive):
            raise unknown_name("adaptive", self.adaptive, get_args(Adaptive))
        if self.duplicates not in get_args(Duplicates):
            raise unknown_name("duplicates", self.duplicates, get_args(Duplicates))

    @property
    def max_samples(self) -> int:
        """Most samples of a question: steps, those that are looked ahead, and whole responses."""
        choices = -(-self.max_steps // self.frequency)
        return self.width * (self.max_steps + choices * self.lookahead + 1)

    def solve(self, question: Question) -> Solving:
        """Search, and return the answer of the best response."""
        search = SearchedPaths(question, self.scorer)
        paths = yield from search.begin(self.width)
        for step in range(1, self.max_steps):
            if all(path.is_done for path in paths):
                break
            each = 1
            if step % self.frequency == 0:
                paths, each = yield from self._kept(search, paths)
            paths = yield from search.draw(paths, each)
        paths = yield from search.draw(paths, to_step_end=False)
        return search.verdict(paths)

    def _kept(
        self, search: SearchedPaths, paths: Sequence[Path]
    ) -> Generator[Ask, list[Sample], tuple[list[Path], int]]:
        """Return the paths to go on with, best first, and how many samples each gets."""
        if self.duplicates != "keep":
            paths = [paths[place] for place in distinct(paths)]
        ahead = yield from search.look_ahead(paths, self.lookahead)
        scores = search.scores(ahead)
        bounds = [score.mean if self.by == "mean" else score.low for score in scores]
        each, number = self.width // self.keep, self.keep
        if "k" in self.adaptive:
            number = paths_to_keep(bounds, samples_per_path=each, maximum=self.keep, target=self.target)
        places = select_topk([score.mean for score in scores], number)
        if "m" in self.adaptive:
            kept = [bounds[place] for place in places]
            each = samples_per_path(kept, num_paths=self.keep, maximum=each, target=self.target)
        chosen = [paths[place] for place in places]
        if self.duplicates == "refill":
            open_ones = [path for path in chosen if not path.is_done]
            chosen += [open_ones[place % len(open_ones)] for place in range(number - len(chosen)) if open_ones]
        return chosen, each
