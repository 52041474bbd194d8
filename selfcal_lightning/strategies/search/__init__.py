"""Strategies that a reward model steers: it scores questions and beginnings of responses while they are sampled."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "adaptive_best_of_n": ["AdaptiveBestOfN"],
        "beam_search": ["BeamSearch"],
        "diverse_tree_search": ["DiverseTreeSearch"],
        "particle_filtering": ["ParticleFiltering"],
        "scoring": ["PathScorer"],
    },
)
