"""What the folder of a reward model that was trained here says of itself: its format, its steps, its quantiles."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.rewards.settings import Steps, check_steps
from selfcal_lightning.runtime.json_files import read_json_object

REWARD_FILE = "reward.json"


@dataclass(frozen=True)
class RewardFile:
    """``reward.json`` in the folder of a reward model.

    Attributes:
        format: Name of its format.
        steps: Where steps ended in training.
        levels: Levels of its lower and its upper quantile.
        target: What its scores were trained to say.
    """

    format: str
    steps: Steps
    levels: tuple[float, float]
    target: str

    def write(self, folder: Path) -> None:
        """Write it into ``folder``."""
        (folder / REWARD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_reward_file(folder: Path) -> RewardFile | None:
    """Return what a folder says of its reward model; None where it was not trained here.

    Raises:
        InputError: The file is damaged.
    """
    path = folder / REWARD_FILE
    if not path.is_file():
        return None
    content = read_json_object(path)
    wanted = {"format", "steps", "levels", "target"}
    if not wanted <= content.keys() or len(content["levels"]) != 2:
        raise InputError(
            f"Expected {path} to hold {', '.join(sorted(wanted))} of a reward model, but got {content}. Export it "
            "again."
        )
    check_steps(f"steps of {path}", str(content["steps"]))
    low, high = (float(level) for level in content["levels"])
    if not 0.0 < low < high < 1.0:
        raise InputError(
            f"Expected `levels` in {path} to rise within (0, 1), the lower quantile's first, but got {low} and {high}. "
            "Export it again."
        )
    return RewardFile(str(content["format"]), str(content["steps"]), (low, high), str(content["target"]))
