"""What the report on test-time training compares."""

from __future__ import annotations

from typing import Any

from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget

# The reward, and what P(True) learns meanwhile.
METHODS: dict[str, tuple[GroupReward, PoolTarget | None]] = {
    "TTRL": ("majority", None),
    "calibrated, anchor": ("majority", "anchor"),
    "calibrated, round": ("majority", "round"),
    "equations": ("equations", None),
}
PLAIN, ANCHOR, ROUND, EQUATIONS = METHODS
ADAPTER: dict[str, Any] = {
    "r": 16, "alpha": 32, "dropout": 0.0, "activated": False,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
