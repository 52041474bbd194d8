"""Particle filtering over the steps of a response: beginnings are drawn anew by their odds, and not only the best."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.functional.beams import particle_weights
from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.search.paths import SearchedPaths
from selfcal_lightning.strategies.search.scoring import PathScorer, check_counts


@dataclass(frozen=True)
class ParticleFiltering:
    """Let several responses grow step by step; after each, as many are drawn anew among them, with replacement.

    The chance of a beginning is ``p / (1 - p)`` of its mean score p, made to add up to 1; a response that ended takes
    part and does not grow. After ``max_steps`` what is still open is drawn to its end. The answer is that of the best
    response by the mean score; ties go to the first.

    Attributes:
        scorer: The reward model.
        particles: Responses at any time.
        max_steps: Steps after which the search ends.
        seed: Of the draws; each question has its own, derived from it and the question's id.

    Reference:
        Puri et al., A Probabilistic Inference Approach to Inference-Time Scaling, arXiv 2502.01618.
    """

    name: ClassVar[str] = "particle_filtering"
    confidence: ClassVar[None] = None
    reads_steps: ClassVar[bool] = True

    scorer: PathScorer
    particles: int = 8
    max_steps: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(particles=self.particles, max_steps=self.max_steps)
        check_counts(0, seed=self.seed)

    @property
    def max_samples(self) -> int:
        """Most samples of a question, steps and whole responses."""
        return self.particles * (self.max_steps + 1)

    def solve(self, question: Question) -> Solving:
        """Search, and return the answer of the best response."""
        digest = hashlib.sha256(f"{self.seed}/{question.id}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        search = SearchedPaths(question, self.scorer)
        paths = yield from search.begin(self.particles)
        for _ in range(1, self.max_steps):
            if not paths or all(path.is_done for path in paths):
                break
            chances = particle_weights([score.mean for score in search.scores(paths)])
            drawn = np.sort(generator.choice(len(paths), size=self.particles, p=chances))
            paths = yield from search.draw([paths[place] for place in drawn])
        paths = yield from search.draw(paths, to_step_end=False)
        return search.verdict(paths)
