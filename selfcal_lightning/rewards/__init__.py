"""Public reward models: how each is written to and read, and how one is loaded and run."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "formats": ["RewardFormat"],
        "registry": ["REWARD_FORMATS", "register_reward_format", "reward_format"],
        "settings": ["RewardSettings"],
        "reading": ["RewardReader", "open_rewards"],
    },
)
