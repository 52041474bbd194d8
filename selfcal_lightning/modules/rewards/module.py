"""A process reward model on top of a policy: after every step, how likely the answer will be right, with quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from selfcal_lightning.errors import InputError
from selfcal_lightning.metrics.collection import CalibrationMetrics
from selfcal_lightning.model_files.identity import DIGESTS
from selfcal_lightning.model_files.manifests import read_manifest
from selfcal_lightning.model_files.names import check_model
from selfcal_lightning.models.causal_lm import load_causal_lm, load_config
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.model_outputs import has_plain_head
from selfcal_lightning.modules.checkpoint_hooks import trained_parameters
from selfcal_lightning.modules.plan import plan_memory
from selfcal_lightning.modules.rewards.batch import RewardBatch
from selfcal_lightning.modules.rewards.exporting import (
    about,
    check_exportable,
    merged_trunk,
    output_names,
    save_with_head,
)
from selfcal_lightning.modules.rewards.losses import reward_losses
from selfcal_lightning.modules.rewards.scored import ScoredRewardModel
from selfcal_lightning.modules.rewards.scores import PlaceMetrics
from selfcal_lightning.modules.rewards.starting import (
    check_no_sampling,
    check_start,
    check_trunk_can_learn,
    first_head,
    head_of_public,
    starting_format,
)
from selfcal_lightning.modules.rewards.step_log import RewardStepLog
from selfcal_lightning.modules.schedule import with_cosine
from selfcal_lightning.prompts.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.rewards.folders import RewardFile
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.registry import QUANTILE_PRM, quantiles_of
from selfcal_lightning.rewards.settings import Steps, check_steps
from selfcal_lightning.rewards.targets import RewardTarget, check_target
from selfcal_lightning.runtime.plan import Plan
from selfcal_lightning.training.checkpoint_checks import check_base_model, check_optimizer_settings, check_trained
from selfcal_lightning.training.contracts import class_path
from selfcal_lightning.training.lightning_internals import trainer_of
from selfcal_lightning.training.random_states import dropout_stream
from selfcal_lightning.training.sampled_data import check_step_data
from selfcal_lightning.training.support import Support, Way, check_features
from selfcal_lightning.training.trained_modules import ExportKind

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

# In a folder of its own: vLLM reads every safetensors file beside a configuration as weights of the model.
TRAINED_FILE = "trained/weights.safetensors"
FEATURE = "reward models"
SUPPORT: dict[str, dict[Way, Support]] = {FEATURE: {"one process": "yes", "DDP": "yes", "FSDP2": "no"}}
REASONS: dict[tuple[str, Way], str] = {
    (FEATURE, "FSDP2"): "their head stands beside the trunk that is cut. Use `trainer.strategy: ddp`"
}


class QuantileRewardModule(ScoredRewardModel):
    """A policy, or a public reward model, that says after every step the chance of a right answer and two quantiles.

    Over one optimiser step, for responses with weights w and places t (the end of the prompt and of every step) with
    targets c: ``L = sum(w * mean_t(CE(m_t, c_t) + pinball * mean_q rho_q(c_t - s_qt))) / sum(w)`` with m the log-odds
    of the mean, s the quantiles and rho the pinball loss. The quantiles cannot cross, and do not pull the mean.

    The mean is the score: targets are mostly 0 or 1, of which the median is one of the two. For the same reason a
    lower quantile of *outcomes* is 0 wherever the chance is below ``1 - low``; it says more of success rates.

    Args:
        base_model: Folder or hub name of the model that training starts from.
        revision: Branch, tag or commit of a hub model.
        format: None where that is the policy, whose states get three outputs; else the format of a public reward model,
            such as "math-shepherd". It is written and read as before, and says what it said until it is trained; the
            responses are another model's, whose store is there. The data module takes it over.
        lora: An adapter on the trunk, with ``activated: false``; without it and ``full`` the trunk stays as it is and
            the outputs alone are trained.
        full: Whether all weights of the trunk are trained.
        steps: Where steps end, in training and whenever the model is read: "sentence", "line", "blank_line", "heading",
            "marker:TEXT" (behind that text), or "auto", the coarsest of the first four that a response has. The data
            module takes it over.
        target: What is learnt, which the data module takes over too; see there.
        low: Level of the lower quantile.
        high: Level of the upper quantile.
        pinball: Weight of the quantiles in the loss.
        lr: Peak learning rate of AdamW for the adapter or the trunk; it follows a cosine to zero over optimiser steps.
        head_lr: Likewise for the outputs.
        weight_decay: Of AdamW.
        warmup_steps: Optimiser steps of linear warm-up.
        torch_dtype: Of the frozen weights; "auto" is float32 on a CPU and with a frozen trunk, else the stored dtype.
            A trunk that is trained is float32.
        attn_implementation: None takes "segments" where the model can run packed rows by it.
        query: The confidence query that responses are sampled with, which is part of what a store is.
        prompt: How questions are put to the model, to sample and to train; None is their tasks' own way.
        seed: Of the adapter's start and of dropout.

    Reference:
        Park et al., Know What You Don't Know (arXiv 2506.09338), with a mean in the place of its median.
    """

    export_kind: ExportKind = "module"

    def __init__(
        self,
        base_model: str,
        *,
        revision: str | None = None,
        format: str | None = None,
        lora: LoraSettings | None = None,
        full: bool = False,
        steps: Steps = "auto",
        target: RewardTarget = "outcome",
        low: float = 0.1,
        high: float = 0.9,
        pinball: float = 1.0,
        lr: float = 5e-5,
        head_lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        attn_implementation: str | None = None,
        query: str = DEFAULT_QUERY,
        prompt: Prompt | None = None,
        seed: int = 0,
    ) -> None:
        plain = {name: value for name, value in locals().items() if name not in {"self", "__class__"}}
        super().__init__()
        if isinstance(lora, Mapping):  # from the hyper-parameters of a checkpoint, which are plain
            lora = LoraSettings(**{**lora, "target_modules": tuple(lora["target_modules"])})
        plain["lora"] = None if lora is None else {**asdict(lora), "target_modules": list(lora.target_modules)}
        if isinstance(prompt, Mapping):
            prompt = Prompt.from_json(prompt)
        plain["prompt"] = None if prompt is None else prompt.as_json()
        check_optimizer_settings(lr=lr, weight_decay=weight_decay, seed=seed)
        check_optimizer_settings(lr=head_lr, weight_decay=weight_decay, seed=seed)
        check_target(target)
        check_steps("steps", steps)
        check_start(lora, full=full, low=low, high=high, pinball=pinball, warmup_steps=warmup_steps)
        self.base_model, self.revision, self.lora, self.full = base_model, revision, lora, full
        self.format, self.public = format, starting_format(format)
        self.steps, self.target, self.levels, self.pinball = steps, target, (low, high), pinball
        self.lr, self.head_lr, self.weight_decay, self.warmup_steps = lr, head_lr, weight_decay, warmup_steps
        self.torch_dtype, self.attn_implementation = torch_dtype, attn_implementation
        self.query, self.prompt, self.seed = query, prompt, seed
        self.gradient_checkpointing, self.quantization, self.optimizer_name = False, None, "adamw"
        self.activated, self.beside = False, {}
        self.exported_from: Path | None = None
        self.head: nn.Module | None = None
        self.save_hyperparameters(plain)
        self.val_metrics, self.test_metrics = CalibrationMetrics(), CalibrationMetrics()
        self.val_places, self.test_places = PlaceMetrics(self.levels), PlaceMetrics(self.levels)
        self._step_log = RewardStepLog()

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Refuse ways of running that do not work, models without packed rows, and families that cannot be exported."""
        super().check_support(trainer)
        trainer = trainer or trainer_of(self)
        if trainer is not None:
            check_features(trainer, [FEATURE], rows=SUPPORT, reasons=REASONS)
            if self.format is not None:
                check_no_sampling([class_path(type(one)) for one in trainer.callbacks], self.format)
        check_exportable(load_config(self.base_model, revision=self.revision), self.base_model)

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        """Check the names of model and adapted layers, and return what the model takes in memory."""
        check_model(self.base_model, revision=self.revision, option="base_model")
        self.check_support(trainer)
        if verb == "fit":
            self._check_trunk_can_learn(trainer)
        memory = plan_memory(
            self.base_model, self.revision, self.lora, dtype=self.torch_dtype, optimizer="adamw", nf4=False,
            trains=verb == "fit" and (self.full or self.lora is not None), device=trainer.strategy.root_device,
        )  # fmt: skip
        frozen = "all weights of its trunk" if self.full else "a frozen trunk"
        trunk = frozen if self.lora is None else f"LoRA of rank {self.lora.r} on its trunk"
        return Plan(model=(f"{self.base_model}, a reward model with {trunk}",), memory=(memory,))

    def configure_model(self) -> None:
        """Load the model, put the adapter and the outputs on it, and take up an export; once."""
        if self.model is not None:
            return
        super().configure_model()
        if self.lora is None:
            self.model.requires_grad_(self.full)
            self.model.get_output_embeddings().requires_grad_(False)
        if not has_plain_head(self.model):
            raise InputError(
                f"Expected `base_model` to have a plain output layer, before which its states are read, but got "
                f"{self.base_model!r} with another one. Take it out of `lora.target_modules` if it is there."
            )
        if self.public is None:
            self.head = first_head(self.model.config.get_text_config().hidden_size, device=self.model.device)
        else:
            self.head = head_of_public(
                self.base_model, self.public, self._encoder, self.model, revision=self.revision
            ).requires_grad_(True)
        if self.exported_from is not None:
            self._take_up(self.exported_from)

    def _read_tokenizer(self) -> None:
        if self.public is None:
            super()._read_tokenizer()
            self.tokenizer = cast("ChatFormat", self.chat).tokenizer
            return
        self.tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        self._encoder = RewardEncoder(self.public, self.tokenizer)

    def _load_network(self, base_model: str, **loading: Any) -> PreTrainedModel:
        return load_causal_lm(base_model, is_trunk=self.full or self.public is not None, **loading)

    def on_fit_start(self) -> None:
        """Refuse data whose steps and targets are not those that are stated here, and wrongly packed rows."""
        self._check_trunk_can_learn(self.trainer)
        stated = {"steps": self.steps, "target": self.target, "format": self.format}
        check_step_data(self.trainer.datamodule, stated, who=type(self).__name__)
        self._check_packing()

    def _check_trunk_can_learn(self, trainer: Trainer) -> None:
        if self.full:
            check_trunk_can_learn(torch_dtype=self.torch_dtype, precision=str(trainer.precision_plugin.precision))

    # ---- training

    def training_step(self, batch: RewardBatch, batch_idx: int) -> Tensor:
        """Return this micro-batch's part of the loss of its optimiser step.

        The factor undoes the averaging over processes (DDP) and over accumulated micro-batches (Lightning).
        """
        at = (self.current_epoch, batch_idx, self.global_rank)
        with dropout_stream(self.seed, *at, device=self.device):
            raw = self.raw_outputs(batch)
        losses = reward_losses(raw, batch, self.levels)
        self._step_log.add(batch, losses, raw[:, 0].sigmoid())
        loss = losses.cross_entropy + self.pinball * losses.pinball
        return loss * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the outputs and the adapter, each with its learning rate, and a cosine over *optimiser* steps."""
        head = list(cast("nn.Module", self.head).parameters())
        own = {id(parameter) for parameter in head}
        adapter = [parameter for parameter in trained_parameters(self).values() if id(parameter) not in own]
        groups: list[dict[str, Any]] = [{"params": head, "lr": self.head_lr}]
        groups += [{"params": adapter, "lr": self.lr}] if adapter else []
        return with_cosine(
            torch.optim.AdamW(groups, weight_decay=self.weight_decay), self.trainer, warmup_steps=self.warmup_steps
        )

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the losses of the step."""
        lr = optimizer.param_groups[-1]["lr"]
        if logged := self._step_log.finish(self.trainer.strategy, pinball=self.pinball, lr=lr):
            self.log_dict(logged)
            self.log("loss", logged["train/loss/Total"], prog_bar=True, logger=False)

    # ---- exports

    def describe(self) -> dict[str, Any]:
        """Return what identifies the reward model, JSON-able: the manifest of an export."""
        return {
            "base_model": dict(self.identity),
            "outputs": list(output_names(cast("nn.Module", self.head))),
            "about": about(cast("nn.Module", self.head), self.public),
            "hyper_parameters": dict(self.hparams),
        }

    def confidence_origin(self) -> dict[str, Any]:
        """Return what its scores depend on beside the trained weights."""
        return {
            "kind": QUANTILE_PRM,
            "base_model": {name: self.identity[name] for name in DIGESTS},
            "lora": self.hparams["lora"],
            "steps": self.steps,
            **({} if self.format is None else {"format": self.format}),
        }

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the whole model, its tokenizer, and what was trained by itself."""
        trained = {name: value.detach().cpu().contiguous() for name, value in trained_parameters(self).items()}
        trunk = self.model if self.full else merged_trunk(
            self.base_model, self.model, revision=self.revision, lora=self.lora, dtype=self.model.dtype,
            is_public=self.public is not None,
        )  # fmt: skip
        save_with_head(trunk, cast("nn.Module", self.head), folder)
        self.tokenizer.save_pretrained(folder)
        (folder / TRAINED_FILE).parent.mkdir(exist_ok=True)
        save_file(trained, folder / TRAINED_FILE, metadata={"format": "pt"})
        format = QUANTILE_PRM if self.public is None else quantiles_of(self.public).name
        RewardFile(format, self.steps, self.levels, self.target).write(folder)

    def load_export(self, folder: Path) -> None:
        """Start from the export in ``folder``, as soon as the model is loaded."""
        self.exported_from = folder

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint, on the CPU."""
        place = {} if base_model is None else {"base_model": base_model, "revision": None}
        return cls.load_from_checkpoint(path, map_location="cpu", torch_dtype=dtype, **place)

    def _take_up(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest is None or not (folder / TRAINED_FILE).is_file():
            raise InputError(
                f"Expected an export of {type(self).__name__} with {TRAINED_FILE}, but got {folder}, which has none."
            )
        check_base_model(manifest["base_model"], self.identity, self.base_model, kind=type(self).__name__)
        trained, written = trained_parameters(self), load_file(folder / TRAINED_FILE)
        check_trained(written, trained, settings=manifest["hyper_parameters"])
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(written[name])
