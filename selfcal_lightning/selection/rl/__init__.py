"""Rows for trainers of reinforcement learning, and the reward file that goes with them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "reward_file": ["reward_source"],
        "rows": ["TrainingRow", "training_rows"],
        "writing": ["RLExport", "export_rl"],
    },
)
