"""The verbs about reward models."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "fit_step_scaler": ["run_fit_step_scaler"],
        "import_prefixes": ["run_import_prefixes"],
        "rollout": ["RolloutReport", "run_rollout"],
    },
)
