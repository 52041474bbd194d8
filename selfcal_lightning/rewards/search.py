"""Searches over the steps of a response, guided by a reward model, and adaptive best-of-n."""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import numpy as np

from selfcal_lightning.core.errors import InputError, check_at_least, check_literals
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.inference.base import Ask, Solving, make_verdict
from selfcal_lightning.metrics.arrays import Array, Floats, Integers, as_rates, as_scores, check_positive
from selfcal_lightning.records import Question, Sample, Verdict
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.reading import RewardReader

_LEAST_SCORE = 1e-7
_FAILED = Score(0.0, 0.0, 0.0)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """A partial or finished response of a search."""

    tokens: Tokens = ()
    is_done: bool = False


def select_topk(scores: Array, k: int) -> list[int]:
    """Return the positions of the k best paths, best first; of equal scores the earlier one comes first."""
    check_positive(k, "k")
    return np.argsort(-as_scores(scores, "scores"), kind="stable")[:k].tolist()


def grow(paths: Sequence[Path], steps: Sequence[Sequence[tuple[Tokens, bool]]]) -> list[Path]:
    """Return the paths extended by each of their steps (its tokens, and whether it is the last); others unchanged."""
    grown: list[Path] = []
    for path, own in zip(paths, steps, strict=True):
        grown += [Path((*path.tokens, *tokens), is_last) for tokens, is_last in own] or [path]
    return grown


def distinct(paths: Sequence[Path]) -> list[int]:
    """Return the positions of the first of equal paths, in order."""
    return sorted({path: position for position, path in reversed(list(enumerate(paths)))}.values())


def particle_weights(scores: Array) -> Floats:
    """Return the resampling probabilities of particles: ``p / (1 - p)`` of each, normalised."""
    p = as_rates(scores, "scores").clip(_LEAST_SCORE, 1.0 - _LEAST_SCORE)
    odds = p / (1.0 - p)
    return np.asarray(odds / odds.sum()) if odds.size else odds


# As published: limits the number of samples to 46,050.
_LEAST_P = 1e-4


def required_samples(p: Array, *, target: float = 0.99, num_paths: int = 1) -> Integers:
    """Compute the samples that contain a right one with chance ``target``: ``ceil(log(1 - target) / log(1 - p))``.

    The ratio is divided by ``num_paths`` before rounding.
    """
    if not 0.0 < target < 1.0:
        raise InputError(f"Expected `target` to lie in (0, 1), but got {target}.")
    check_positive(num_paths, "num_paths")
    chances = as_rates(p, "p").clip(_LEAST_P, 1.0 - _LEAST_P)
    needed = np.log1p(-target) / np.log1p(-chances) / num_paths
    # A billionth above a whole number counts as that, so that .9 needs 2 in spite of floats.
    return np.maximum(np.ceil(needed - 1e-9), 1).astype(np.int64)


def paths_to_keep(scores: Sequence[float], *, samples_per_path: int, maximum: int, target: float = 0.99) -> int:
    """Compute how many of the best paths of a beam search to keep (IAS of K).

    The smallest k for which ``k * samples_per_path`` samples are enough for the k-th best path; at most ``maximum``.
    """
    check_positive(samples_per_path, "samples_per_path")
    check_positive(maximum, "maximum")
    needed = required_samples(np.sort(as_rates(np.asarray(scores, dtype=np.float64), "scores"))[::-1], target=target)
    for k, samples in enumerate(needed[:maximum].tolist(), start=1):
        if k * samples_per_path >= samples:
            return k
    return min(len(needed), maximum)


def samples_per_path(kept_scores: Sequence[float], *, num_paths: int, maximum: int, target: float = 0.99) -> int:
    """Compute how many samples each kept path of a beam search needs (IAS of M).

    ``min(ceil(N / num_paths), maximum)`` with N what the worst kept path needs, as published.
    """
    check_positive(maximum, "maximum")
    scores = as_rates(np.asarray(kept_scores, dtype=np.float64), "kept_scores")
    if not scores.size:
        return 0
    wanted = float(required_samples(scores.min(), target=target, num_paths=num_paths))
    return int(min(wanted, float(maximum)))


By = Literal["mean", "low"]
Adaptive = Literal["none", "k", "m", "km"]
Duplicates = Literal["merge", "refill", "keep"]


class _Checked:
    """Base of the searches, which are strategies without a confidence: checks the range or choices of each setting."""

    confidence: ClassVar[None] = None
    reads_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_literals(self)
        for name, value in vars(self).items():
            if name == "target" and not 0.0 < value < 1.0:
                raise InputError(f"Expected `target` to lie in (0, 1), but got {value}.")
            if isinstance(value, int):
                check_at_least(0 if name in ("lookahead", "seed") else 1, **{name: value})


def tokens_of(sample: Sample) -> tuple[int, ...]:
    if sample.token_ids is None:
        raise InputError(f"Expected token ids to score, but got a sample of {sample.question_id!r} without.")
    return tuple(sample.token_ids)


Drawing = Generator[Ask, list[Sample], list[Path]]


class SearchedPaths:
    """The paths of a question with their scores and the samples that ended them."""

    def __init__(self, question: Question, scorer: RewardReader) -> None:
        self._question, self._scorer = question, scorer
        self._known: dict[Tokens, Score] = {}
        self._ended: dict[Tokens, Sample] = {}
        self._seen: list[Sample] = []

    def draw(self, paths: Sequence[Path], number: int = 1, *, to_step_end: bool = True) -> Drawing:
        """Draw ``number`` steps of each open path, and return the resulting paths; finished ones stay."""
        batches: list[list[Sample]] = []
        for path in paths:
            ask = Ask(number, prefix=path.tokens or None, to_step_end=to_step_end)
            batches.append([] if path.is_done else (yield ask))
        return self._grown(paths, batches)

    def look_ahead(self, paths: Sequence[Path], steps: int) -> Drawing:
        """Draw further steps of each open path, and return the extended paths, which are only scored."""
        ahead = list(paths)
        for _ in range(steps):
            drawn = yield from self.draw(ahead)
            ahead = [old if self._has_failed(new) else new for old, new in zip(ahead, drawn, strict=True)]
        return ahead

    def scores(self, paths: Sequence[Path]) -> list[Score]:
        """Return the scores of paths; each path is scored once, and 0 if a request for it failed."""
        wanted = dict.fromkeys(path.tokens for path in paths if not self._has_failed(path))
        if new := [ids for ids in wanted if ids not in self._known]:
            self._known |= zip(new, self._scorer.score_paths(self._question, new), strict=True)
        return [_FAILED if self._has_failed(path) else self._known[path.tokens] for path in paths]

    def _has_failed(self, path: Path) -> bool:
        return path.is_done and path.tokens not in self._ended

    def verdict(self, paths: Sequence[Path]) -> Verdict:
        answers = {path: self._ended[ids].answer for path in paths if (ids := path.tokens) in self._ended}
        done = [path for path in paths if answers.get(path) is not None]
        if not done:
            return make_verdict(self._question, self._seen, None, confidence=None, stopped_early=False)
        scores = [score.mean for score in self.scores(done)]
        (best,) = select_topk(scores, 1)
        answer = answers[done[best]]
        return make_verdict(self._question, self._seen, answer, confidence=scores[best], stopped_early=False)

    def _grown(self, paths: Sequence[Path], batches: Sequence[Sequence[Sample]]) -> list[Path]:
        self._seen += chain.from_iterable(batches)
        columns = zip(paths, batches, strict=True)
        return grow(paths, [[self._step(path, sample) for sample in samples] for path, samples in columns])

    def _step(self, path: Path, sample: Sample) -> tuple[Tokens, bool]:
        """Return the tokens that a sample adds, and whether they are the last; a failed request ends its path."""
        if is_failed(sample):
            return (), True
        ids = tokens_of(sample)
        is_last = sample.finish != "step"
        if is_last:
            self._ended[ids] = sample
        return ids[len(path.tokens) :], is_last


@dataclass(frozen=True)
class BeamSearch(_Checked):
    """Draw steps of several responses, keep the best beginnings, continue each several times, and so on.

    A finished response stays among the best until better ones replace it. After ``max_steps`` open ones are drawn to
    their end. The answer is that of the response with the best mean score; ties go to the first.
    """

    name: ClassVar[str] = "beam_search"

    scorer: RewardReader
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
        super().__post_init__()
        if self.keep > self.width:
            raise InputError(f"Expected `keep` to be at most `width`, {self.width}, but got {self.keep}.")
        if self.width % self.keep:
            raise InputError(f"Expected `width` to be a multiple of `keep`, {self.keep}, but got {self.width}.")

    @property
    def max_samples(self) -> int:
        choices = -(-self.max_steps // self.frequency)
        return self.width * (self.max_steps + choices * self.lookahead + 1)

    def solve(self, question: Question) -> Solving:
        search = SearchedPaths(question, self.scorer)
        paths = yield from search.draw([Path()], self.width)
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


@dataclass(frozen=True)
class DiverseTreeSearch(_Checked):
    """Split the first steps into trees; each continues from its own best beginning until its response ends.

    A tree draws ``width // trees`` steps at a time and keeps one. After ``max_steps`` open responses are drawn to their
    end. The answer is that of the response with the best mean score of all trees; ties go to the first.
    """

    name: ClassVar[str] = "diverse_tree_search"
    scorer: RewardReader
    width: int = 8
    trees: int = 4
    max_steps: int = 16
    lookahead: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.trees:
            raise InputError(f"Expected `width` to be a multiple of `trees`, {self.trees}, but got {self.width}.")

    @property
    def max_samples(self) -> int:
        return self.width * self.max_steps * (1 + self.lookahead) + self.trees

    def solve(self, question: Question) -> Solving:
        search, each = SearchedPaths(question, self.scorer), self.width // self.trees
        first = yield from search.draw([Path()], self.width)
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


@dataclass(frozen=True)
class ParticleFiltering(_Checked):
    """Extend several responses step by step; after each step, resample as many of them with replacement."""

    name: ClassVar[str] = "particle_filtering"
    scorer: RewardReader
    particles: int = 8
    max_steps: int = 16
    seed: int = 0

    @property
    def max_samples(self) -> int:
        return self.particles * (self.max_steps + 1)

    def solve(self, question: Question) -> Solving:
        digest = hashlib.sha256(f"{self.seed}/{question.id}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        search = SearchedPaths(question, self.scorer)
        paths = yield from search.draw([Path()], self.particles)
        for _ in range(1, self.max_steps):
            if all(path.is_done for path in paths):
                break
            chances = particle_weights([score.mean for score in search.scores(paths)])
            drawn = np.sort(generator.choice(len(paths), size=self.particles, p=chances))
            paths = yield from search.draw([paths[place] for place in drawn])
        paths = yield from search.draw(paths, to_step_end=False)
        return search.verdict(paths)


@dataclass(frozen=True)
class AdaptiveBestOfN(_Checked):
    """Draw as many samples as contain a right answer with chance ``target``, and take the one with the best score.

    ``N = min(ln(1 - target) / ln(1 - p), max_samples)`` with p the score of the question alone. The confidence is the
    score of the chosen response. Unreadable responses are never chosen.
    """

    name: ClassVar[str] = "adaptive_best_of_n"
    reads_steps: ClassVar[bool] = False

    scorer: RewardReader
    max_samples: int = 16
    target: float = 0.99
    by: By = "mean"

    def solve(self, question: Question) -> Solving:
        (prior,) = self.scorer.score_paths(question, [()])
        chance = prior.mean if self.by == "mean" else prior.low
        wanted = int(min(required_samples([chance], target=self.target)[0], self.max_samples))
        samples = yield Ask(wanted)
        readable = [sample for sample in samples if sample.answer is not None]
        stopped = wanted < self.max_samples
        if not readable:
            return make_verdict(question, samples, None, confidence=None, stopped_early=stopped)
        scores = [score.mean for score in self.scorer.score_paths(question, [tokens_of(one) for one in readable])]
        best = int(np.argmax(scores))
        return make_verdict(question, samples, readable[best].answer, confidence=scores[best], stopped_early=stopped)


SEARCHES = (AdaptiveBestOfN, BeamSearch, DiverseTreeSearch, ParticleFiltering)
