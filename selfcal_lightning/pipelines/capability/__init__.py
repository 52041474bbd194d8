"""The verbs about capability: fit a probe, score questions, judge the scores."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "evaluate_capability": ["run_evaluate_capability"],
        "fit_probe": ["run_fit_probe"],
        "score_questions": ["run_score_questions"],
    },
)
