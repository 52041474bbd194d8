"""The strategies, one a file."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "adaptive_consistency": ["AdaptiveConsistency"],
        "best_of_n": ["BestOfN"],
        "borda": ["BordaVoting"],
        "cges": ["CGES", "fit_evidence"],
        "cisc": ["CISC"],
        "early_stopping": ["EarlyStopping"],
        "pass_at_n": ["PassAtN"],
        "self_consistency": ["SelfConsistency"],
        "standardised": ["StandardisedVoting"],
        "window_stopping": ["WindowStopping"],
    },
)
