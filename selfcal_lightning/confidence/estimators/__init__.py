"""Estimators of confidence: each puts a number on every response."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "registry": ["EstimatorClass", "build_estimator", "estimator_class", "estimator_settings"],
        "token_ids": ["entry_ids"],
        "token_reader": ["TokenReader"],
    },
)
