"""The paths of a search over the steps of a response: how they are drawn, scored and judged."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from selfcal_lightning.functional.beams import Continuation, Path, grow, select_topk, unscored
from selfcal_lightning.records import Question, Sample, Verdict
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.strategies.base import Ask, make_verdict
from selfcal_lightning.strategies.search.scoring import PathScorer, tokens_of
from selfcal_lightning.tasks.judging import is_failed

Tokens = tuple[int, ...]
Drawing = Generator[Ask, list[Sample], list[Path]]


class SearchedPaths:
    """What is known of the paths of a question: their scores and the samples that ended them.

    Args:
        question: The question.
        scorer: The reward model.
    """

    def __init__(self, question: Question, scorer: PathScorer) -> None:
        self._question, self._scorer = question, scorer
        self._known: dict[Tokens, Score] = {}
        self._ended: dict[Tokens, Sample] = {}
        self._seen: list[Sample] = []

    def begin(self, number: int) -> Drawing:
        """Ask for first steps, and return their paths."""
        samples = yield Ask(number, to_step_end=True)
        return self._grown([Path()], [samples])

    def draw(self, paths: Sequence[Path], number: int = 1, *, to_step_end: bool = True) -> Drawing:
        """Ask for a step of each open path, ``number`` times, and return the paths that follow; finished ones stay.

        Args:
            paths: The paths.
            number: Continuations of each open one.
            to_step_end: Whether they end with their next step, or with the response.
        """
        batches: list[list[Sample]] = []
        for path in paths:
            if path.is_done:
                batches.append([])
            else:
                batches.append((yield Ask(number, prefix=tokens(path), to_step_end=to_step_end)))
        return self._grown(paths, batches)

    def look_ahead(self, paths: Sequence[Path], steps: int) -> Drawing:
        """Draw so many further steps of each open path, one of each, and return what they come to, in their order.

        Nothing of it stays but its cost and its scores, which say more of a path than its own end does.
        """
        ahead = list(paths)
        for _ in range(steps):
            ahead = yield from self.draw(ahead)
        return ahead

    def scores(self, paths: Sequence[Path]) -> list[Score]:
        """Return the scores of paths; each is scored once."""
        new = unscored([tokens(path) for path in paths], self._known)
        if new:
            self._known |= zip(new, self._scorer.score_paths(self._question, new), strict=True)  # type: ignore[arg-type]
        return [self._known[tokens(path)] for path in paths]

    def verdict(self, paths: Sequence[Path]) -> Verdict:
        """Return the answer of the best readable response."""
        answers = {path: self._ended[ids].answer for path in paths if (ids := tokens(path)) in self._ended}
        done = [path for path in paths if answers.get(path) is not None]
        if not done:
            return make_verdict(self._question, self._seen, None, confidence=None, stopped_early=False)
        scores = [score.mean for score in self.scores(done)]
        (best,) = select_topk(scores, 1)
        answer = answers[done[best]]
        return make_verdict(self._question, self._seen, answer, confidence=scores[best], stopped_early=False)

    def _grown(self, paths: Sequence[Path], batches: Sequence[Sequence[Sample]]) -> list[Path]:
        """Return the paths after samples of each; a finished one has none, and one that got none stays as it was."""
        grown: list[Path] = []
        for path, samples in zip(paths, batches, strict=True):
            self._seen += samples
            steps = [self._continuation(path, sample) for sample in samples]
            grown += grow([path], [steps]) if steps or path.is_done else [path]
        return grown

    def _continuation(self, path: Path, sample: Sample) -> Continuation:
        """Return the step that a sample adds. One that the engine could not give ends its path without an answer."""
        if is_failed(sample):
            return Continuation((), is_last=True)
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
