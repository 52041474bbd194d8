"""The verbs about reward models."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "import_prefixes": ["run_import_prefixes"],
        "rollout": ["RolloutReport", "run_rollout"],
    },
)
