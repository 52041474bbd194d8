"""Beam search over the steps of a response, steered by a reward model; its width may follow from the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.beams import Continuation, Path, distinct, grow, select_topk, unscored
from selfcal_lightning.functional.instance_adaptive import paths_to_keep, samples_per_path
from selfcal_lightning.records import Question, Sample, Verdict
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.strategies.base import Ask, Solving, make_verdict
from selfcal_lightning.strategies.search.scoring import By, PathScorer, check_search, tokens_of

Adaptive = Literal["none", "k", "m", "km"]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class BeamSearch:
    """Draw steps of several responses, keep the best beginnings, go on with each several times, and so on.

    A response that ended keeps its place among the best until better ones take it. After ``max_steps`` what is still
    open is drawn to its end. The answer is that of the best response by the mean score; ties go to the first.

    Attributes:
        scorer: The reward model.
        width: First steps that are drawn, and most beginnings at any time.
        keep: Beginnings that are kept, at most; ``width // keep`` samples go on from each.
        max_steps: Steps after which the search ends.
        adaptive: What follows from the scores: nothing, how many beginnings are kept ("k"), how many samples go on from
            each ("m"), or both.
        target: Wanted chance of a right answer where something does, in (0, 1).
        by: Whether that is told by the "mean" or the "low" quantile.

    Reference:
        Park et al., Know What You Don't Know, arXiv 2506.09338; Snell et al., arXiv 2408.03314.
    """

    name: ClassVar[str] = "beam_search"
    confidence: ClassVar[None] = None

    scorer: PathScorer
    width: int = 8
    keep: int = 2
    max_steps: int = 16
    adaptive: Adaptive = "none"
    target: float = 0.99
    by: By = "mean"

    def __post_init__(self) -> None:
        check_search(target=self.target, by=self.by, width=self.width, keep=self.keep, max_steps=self.max_steps)
        if self.keep > self.width:
            raise InputError(f"Expected `keep` to be at most `width`, {self.width}, but got {self.keep}.")
        if self.adaptive not in get_args(Adaptive):
            raise unknown_name("adaptive", self.adaptive, get_args(Adaptive))

    @property
    def max_samples(self) -> int:
        """Most samples of a question, steps and whole responses."""
        return self.width * (self.max_steps + 1)

    def solve(self, question: Question) -> Solving:
        """Search, and return the answer of the best response."""
        search = _Search(question, self.scorer)
        samples = yield Ask(self.width, to_step_end=True)
        paths = search.grown([Path()], [samples])
        for _ in range(1, self.max_steps):
            if all(path.is_done for path in paths):
                break
            kept, number = self._kept(search, paths)
            batches: list[list[Sample]] = []
            for path in kept:
                ahead = Ask(number, prefix=tokens(path), to_step_end=True)
                batches.append([] if path.is_done else (yield ahead))
            paths = search.grown(kept, batches)
        ends: list[list[Sample]] = []
        for path in paths:
            ends.append([] if path.is_done else (yield Ask(1, prefix=tokens(path))))
        paths = search.grown(paths, ends)
        return search.verdict(paths)

    def _kept(self, search: _Search, paths: Sequence[Path]) -> tuple[list[Path], int]:
        """Return the paths to go on with, best first, and how many samples each gets."""
        paths = [paths[place] for place in distinct(paths)]
        scores = search.scores(paths)
        bounds = [score.mean if self.by == "mean" else score.low for score in scores]
        each, number = self.width // self.keep, self.keep
        if "k" in self.adaptive:
            number = paths_to_keep(bounds, samples_per_path=each, maximum=self.keep, target=self.target)
        places = select_topk([score.mean for score in scores], number)
        if "m" in self.adaptive:
            kept = [bounds[place] for place in places]
            each = samples_per_path(kept, num_paths=self.keep, maximum=each, target=self.target)
        return [paths[place] for place in places], each


class _Search:
    """What is known of the paths of a question: their scores and the samples that ended them."""

    def __init__(self, question: Question, scorer: PathScorer) -> None:
        self._question, self._scorer = question, scorer
        self._known: dict[Tokens, Score] = {}
        self._ended: dict[Tokens, Sample] = {}
        self._seen: list[Sample] = []

    def grown(self, paths: Sequence[Path], batches: Sequence[Sequence[Sample]]) -> list[Path]:
        """Return the paths after samples of each; a finished one has none, and one that got none stays as it was."""
        grown: list[Path] = []
        for path, samples in zip(paths, batches, strict=True):
            self._seen += samples
            steps = [self._continuation(path, sample) for sample in samples]
            grown += grow([path], [steps]) if steps or path.is_done else []
        return grown

    def scores(self, paths: Sequence[Path]) -> list[Score]:
        """Return the scores of paths; each is scored once."""
        new = unscored([tokens(path) for path in paths], self._known)
        if new:
            self._known |= zip(new, self._scorer.score_paths(self._question, new), strict=True)  # type: ignore[arg-type]
        return [self._known[tokens(path)] for path in paths]

    def verdict(self, paths: Sequence[Path]) -> Verdict:
        """Return the answer of the best readable response."""
        done = [path for path in paths if self._ended[tokens(path)].answer is not None]
        if not done:
            return make_verdict(self._question, self._seen, None, confidence=None, stopped_early=False)
        scores = [score.mean for score in self.scores(done)]
        (best,) = select_topk(scores, 1)
        answer = self._ended[tokens(done[best])].answer
        return make_verdict(self._question, self._seen, answer, confidence=scores[best], stopped_early=False)

    def _continuation(self, path: Path, sample: Sample) -> Continuation:
        ids = tokens_of(sample)
        is_last = sample.finish != "step"
        if is_last:
            self._ended[ids] = sample
        return Continuation(ids[len(tokens(path)) :], is_last)


def tokens(path: Path) -> Tokens:
    """Return the token ids of a path.

    Example:
        >>> tokens(Path(((1, 2), (3,))))
        (1, 2, 3)
    """
    return tuple(token for segment in path.segments for token in segment)  # type: ignore[attr-defined]
