"""The settings of `selfcal fit` behind an adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.adaptation.questions import QuestionSlice
from selfcal_lightning.functional.rewards import GroupReward, PoolTarget
from selfcal_lightning.selection.group_rewards import ANNOTATIONS, check_reward
from selfcal_lightning.training.stage_settings import CHECKPOINTS, EXPORT, GENERATION, override

MODULE = "selfcal_lightning.modules.adaptation.module.TestTimeTrainingModule"
DATA = "selfcal_lightning.datamodules.adaptation.datamodule.RolloutDataModule"
GUARD = "selfcal_lightning.callbacks.adaptation_guard.AdaptationGuard"
OWN_OF_MODEL, OWN_OF_DATA = ("base_model", "reward", "target"), ("store_dir", "selection", "num_samples")
LOGGER = "lightning.pytorch.loggers.TensorBoardLogger"
ADAPTER, SAMPLES, GUARD_FILE = "adapter", "samples", "guard.json"
# What a policy gradient is of: temperature 1, the whole distribution.
ON_POLICY = {"temperature": 1.0, "edt_scale": None, "top_p": 1.0}


@dataclass(frozen=True)
class Adaptation:
    """What is learnt from what, with how many samples; ``run_adapt`` documents the settings."""

    base_model: str
    revision: str | None
    questions: QuestionSlice
    reward: GroupReward
    target: PoolTarget | None
    selection: str | None
    store_dir: str | None
    rounds: int
    num_samples: int
    batch_size: int
    lr: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        check_reward(self.reward)
        if self.rounds < 1:
            raise InputError(f"Expected `rounds` to be at least 1, but got {self.rounds}.")
        if self.selection is not None and self.store_dir is None:
            raise InputError(
                "Expected `store_dir` with a `selection`, the store that it was made of, but got None. Name it."
            )
        if self.selection is None and self.store_dir is not None:
            raise InputError(
                f"Expected `store_dir` with a `selection` alone, but got {self.store_dir!r}: rounds are sampled into "
                "`output_dir`. Leave it out, or name a selection of it with `reward: none`."
            )
        if self.selection is None and self.reward == "none":
            raise InputError(
                "Expected a `selection` with `reward: none`, which samples nothing, but got None. Name both it and "
                "`store_dir`, or a reward."
            )
        if self.is_one_round and self.reward != "none" and self.rounds > 1:
            raise InputError(
                f"Expected `rounds: 1` with `reward: {self.reward}`, whose statistics are computed for the first round "
                f"alone, but got {self.rounds}. Set it, or take `fused`, which every round has."
            )

    @property
    def is_one_round(self) -> bool:
        """Whether nothing is sampled after round 0, of which a selection and statistics of tokens are."""
        return self.reward in ANNOTATIONS or self.reward == "none"


def fit_settings(
    one: Adaptation, folder: Path, *, engine: EngineSettings, guard: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of `selfcal fit`.

    Args:
        one: What is learnt.
        folder: Where all of it goes.
        engine: What samples.
        guard: Limits of the guard that are not its own.
        options: What overrides these settings, nested or dotted.

    Raises:
        InputError: They override what has an option of its own, and is told of in the results.
    """
    store = one.store_dir or str(folder / SAMPLES)
    place = asdict(one.questions)
    learnt = {"reward": one.reward, "target": one.target}
    model = {"base_model": one.base_model, "revision": one.revision, "lr": one.lr, "seed": one.seed, **learnt}
    data = {
        "store_dir": store, "num_samples": one.num_samples, "batch_size": one.batch_size, "seed": one.seed,
        "selection": one.selection, "train": [] if one.is_one_round else [place],
        "regenerate_every_n_epochs": None if one.is_one_round else 1,
    }  # fmt: skip
    sampling = {**ON_POLICY, "max_new_tokens": one.max_new_tokens}
    generation = {"engine": asdict(engine), "sampling": sampling, "seed": one.seed}
    callbacks = [
        {"class_path": GENERATION, "init_args": generation},
        {"class_path": GUARD, "init_args": {"report": str(folder / GUARD_FILE), **guard}},
        {
            "class_path": CHECKPOINTS,
            "init_args": {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": 1, "save_last": True},
        },
        {"class_path": EXPORT, "init_args": {"output_dir": str(folder / ADAPTER)}},
    ]
    settings = {
        "seed_everything": one.seed,
        "trainer": {
            "devices": 1, "max_epochs": one.rounds, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0,
            "num_sanity_val_steps": 0, "use_distributed_sampler": False, "log_every_n_steps": 1,
            "gradient_clip_val": 1.0, "enable_model_summary": False, "default_root_dir": str(folder),
            "logger": {"class_path": LOGGER, "init_args": {"save_dir": str(folder), "name": "logs"}},
            "callbacks": callbacks,
        },
        "model": {"class_path": MODULE, "init_args": model},
        "data": {"class_path": DATA, "init_args": data},
    }  # fmt: skip
    stated = {f"model.{name}": model[name] for name in OWN_OF_MODEL} | {
        f"data.{name}": data[name] for name in OWN_OF_DATA
    }
    override(settings, options)
    for name, value in stated.items():
        section, _, key = name.partition(".")
        if (found := settings[section]["init_args"][key]) != value:
            raise InputError(
                f"Expected `fit_options` without `{name}`, which has an option of its own ({value!r}), but got "
                f"{found!r}. Set `{key}` itself."
            )
    return settings
