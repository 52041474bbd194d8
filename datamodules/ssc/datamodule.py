"""The data module of self-calibration: streams training tuples and a fixed validation pool from the sample store."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from selfcal_lightning.confidence.fusion import Fusion
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.datamodules.ssc import tuples
from selfcal_lightning.datamodules.ssc.collate import SSCCollator
from selfcal_lightning.datamodules.ssc.sampler import NUM_BUCKETS, Mixture
from selfcal_lightning.datamodules.ssc.stored_data import RoundRule, StoredDataModule
from selfcal_lightning.models.folders import files_sha256

DEFAULT_RATIO, DEFAULT_TUPLES = 0.7, 100_000
JOINT_TARGET: tuples.TargetName = "ssc"
ACTIVATED_TARGET: tuples.TargetName = "leave_one_out_ssc"


@dataclass(eq=False, repr=False)
class SSCDataModule(StoredDataModule):
    """Tuples (question, response, target, weights) for self-calibration, split by question.

    The store is opened only when a loader is asked for, since ``SSCGeneration`` writes it after the data module's
    ``setup``. Every epoch is drawn by (seed, epoch), and planned in whole optimiser steps of
    ``batch_size * accumulate_grad_batches * number of processes`` rows; the number of steps follows from the settings
    alone. Training resumed in the middle of an epoch continues with the very next rows.

    Further arguments are those of ``StoredDataModule``: sources, store, layout of batches.

    Args:
        generation_ratio: Part of the tuples that are generation samples (target above ``eta``), in [0, 1]; the others
            are drawn evenly from buckets of the target. None is 0.7, and 0 with an activated adapter, which trains on
            no such samples.
        total_tuples: Tuples in an epoch. Null is 100,000; with an activated adapter, the number of responses to the
            training questions.
        eta: Only responses with a target above this train the generation loss.
        target: "ssc", "consistency" (vote share), "leave_one_out" (share of the other responses that agree),
            "leave_one_out_ssc" (the same, weighted by their confidences), "p_true" (own confidence) or "label" (needs
            references). The first two contain the response's own vote, which makes rare answers look better than they
            are. None is "ssc", and "leave_one_out_ssc" with an activated adapter. "agreeing_pairs", "top_share" and
            "expected_accuracy" (needs references) are of the question: the query is put before there is a response.
        teacher: Soft-label source: file of a fused confidence (``selfcal fit-confidence``) that the target is mixed
            with. The store must have the confidences that it reads.
        teacher_share: Weight of the soft-label source in the target; the rest is ``target``.
        p_true: Confidence that targets are made of: "normalised" Yes / (Yes + No), or "raw" Yes.
        drop_none: Leaves unreadable responses out of targets and training; if false, they form one class.
        exact: Gives tuples of the calibration pool no generation loss, as in the paper.
        fill: Fills every epoch to ``total_tuples`` rows by drawing from small pools again; if false, pools give at most
            what they hold, as the published code does.
        max_repeats: A row occurs at most this often in an epoch while other rows of its pool have room.
        num_buckets: Buckets of the target that the calibration tuples are spread over evenly; 1 leaves the targets as
            frequent as they are. None is 20, and 1 with an activated adapter: with a mean target of one half, one half
            is learnt first.
        round: Trains on this generation round; the other splits are always read from round 0, the base model's samples.
        regenerate_every_n_epochs: ``SSCGeneration`` samples the training questions again with the current adapter at
            the end of every so many epochs: epoch e trains on round ``e // n``. None trains on ``round`` throughout.
        round_rule: Which rows an epoch with a later round reads: "replace" the newest round only, "mix" all rounds up
            to it, with targets computed over a question's responses of all these rounds.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = ("base_model", "revision", "query", "prompt", "p_true")

    _: KW_ONLY
    num_samples: int = 32
    generation_ratio: float | None = None
    total_tuples: int | None = None
    batch_size: int = 1
    eta: float = 0.75
    target: tuples.TargetName | None = None
    teacher: str | None = None
    teacher_share: float = 0.0
    p_true: tuples.PTrueName = "normalised"
    drop_none: bool = True
    exact: bool = False
    fill: bool = True
    max_repeats: int = 4
    num_buckets: int | None = None
    round: int = 0
    regenerate_every_n_epochs: int | None = None
    round_rule: RoundRule = "replace"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, num_buckets=self.num_buckets)
        for name, value in {"generation_ratio": self.generation_ratio or 0.0, "eta": self.eta}.items():
            if not 0.0 <= value <= 1.0:
                raise InputError(f"`{name}` must lie in [0, 1], but got {value}.")
        tuples.check_teacher(self.teacher, self.teacher_share, target=self.target)

    @property
    def row_target(self) -> tuples.TargetName:
        return self.target or (ACTIVATED_TARGET if self._is_activated else JOINT_TARGET)

    @property
    def _is_activated(self) -> bool:
        """Whether an activated adapter is trained, which has no use for generation samples."""
        module = self._module()
        return module is not None and module.activated

    def check_fit(self) -> None:
        target = self.row_target
        if self.generation_ratio and (target in tuples.BEFORE_ANSWERING or self._is_activated):
            why = "an activated adapter, which has no generation loss (`lora.activated: false` trains jointly)"
            if target in tuples.BEFORE_ANSWERING:
                why = f"the target {target!r}, which is learnt before there is a response"
            raise InputError(f"`generation_ratio` must be 0 with {why}, but got {self.generation_ratio}.")
        super().check_fit()

    def training_settings(self) -> dict[str, Any]:
        teacher = None if self.teacher is None else files_sha256([Path(self.teacher)])[0]
        return {**super().training_settings(), "teacher": teacher}

    def mixture(self, shares: Mapping[str, float]) -> Mixture:
        plain = self._is_activated or self.row_target in tuples.BEFORE_ANSWERING
        ratio = 0.0 if plain else DEFAULT_RATIO
        return replace(
            super().mixture(shares),
            generation_ratio=ratio if self.generation_ratio is None else self.generation_ratio,
            exact=self.exact or plain,
            num_buckets=(1 if plain else NUM_BUCKETS) if self.num_buckets is None else self.num_buckets,
        )

    def recipes(self) -> tuple[tuples.TargetRecipe, ...]:
        module, target = self._module(), self.row_target
        auxiliary = getattr(module, "auxiliary", {})
        tuples.check_auxiliary(auxiliary, target=target, num_buckets=self.num_buckets, num_samples=self.num_samples)
        return tuple(
            tuples.TargetRecipe(
                one.target or target, None if one.teacher is None else Fusion.load(Path(one.teacher)), one.teacher_share
            )
            for one in (self, *auxiliary.values())
        )

    def collator(self) -> SSCCollator:
        return SSCCollator(self.chat_format(), empty=self.row_target in tuples.BEFORE_ANSWERING, **self.shape())

    def _tuples_of_an_epoch(self) -> int:
        if not self._is_activated and self.row_target not in tuples.BEFORE_ANSWERING:
            return DEFAULT_TUPLES
        return super()._tuples_of_an_epoch()
