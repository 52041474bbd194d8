"""A process reward model on top of a policy: after every step, the chance of a right answer, with quantiles."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForTokenClassification, PreTrainedModel

from selfcal_lightning.core.errors import InputError, check_literals
from selfcal_lightning.core.imports import class_path
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.data.step_settings import Steps, check_steps
from selfcal_lightning.models.causal_lm import WeightFiles, forward_arguments, load_causal_lm
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, Prompt, load_tokenizer
from selfcal_lightning.models.folders import DIGESTS, check_model, load_config, model_folder, read_manifest
from selfcal_lightning.models.lora import LoraSettings, adapter_state, attach_lora, merge_adapter, set_adapter_state
from selfcal_lightning.models.outputs import has_plain_head, hidden_at
from selfcal_lightning.records import Dtype
from selfcal_lightning.rewards import heads
from selfcal_lightning.rewards.formats import QUANTILE_PRM, quantiles_of, reward_format
from selfcal_lightning.rewards.heads import StepScores, monotone_quantiles
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.metrics import PREFIXES, QuantileMetrics, StepMetrics
from selfcal_lightning.rewards.rates import RewardTarget
from selfcal_lightning.rewards.reading import RewardFile
from selfcal_lightning.training import settings
from selfcal_lightning.training.batches import ResponseBatch, ScoredRows
from selfcal_lightning.training.calibrated_model import CalibratedModel
from selfcal_lightning.training.checkpoints import check_base_model, check_trained
from selfcal_lightning.training.losses import pinball_loss, row_means, share_of_step, soft_cross_entropy
from selfcal_lightning.training.metrics import CalibrationMetrics
from selfcal_lightning.training.model_parallel import callbacks_of, trainer_of
from selfcal_lightning.training.modules import check_stated, plain_settings, trained_parameters, with_cosine
from selfcal_lightning.training.support import Support, Way, check_features

ROW_COLUMNS = ("last_place", "target", "correct", "weight", "task", "row")


class RewardBatch(ResponseBatch):
    """A batch of B responses with M places at which a reward model gives the chance of a right answer. Immutable.

    The places of a response are the last token of its prompt and of each of its steps; there is no confidence query.
    """

    place: Tensor  # position in the flattened S * T tokens, int64 [M]
    place_row: Tensor  # int64 [M]; the places of a row are adjacent and in order
    place_kind: Tensor  # index in ``data.steps.POSITIONS``, int64 [M]
    place_target: Tensor  # training target in [0, 1]; nan where unknown, float32 [M]
    place_rate: Tensor  # observed share of right continuations; nan where unknown, float32 [M]
    place_rollouts: Tensor  # number of those continuations, int64 [M]
    last_place: Tensor  # the place at the end of each response, int64 [B]; -1 without a step
    weight: Tensor  # of the row in the loss, float32 [B]
    total: Tensor  # sum of ``weight`` over the optimiser step (all processes and micro-batches), scalar

    def _complete(self) -> None:
        for names in ([name for name in vars(self) if name.startswith("place")], ROW_COLUMNS):
            lengths = {name: len(getattr(self, name)) for name in names}
            if len(set(lengths.values())) > 1:
                raise InputError(f"Expected columns of one length, but got {lengths}.")
        super()._complete()

    def at_ends(self, values: Tensor) -> Tensor:
        """Return the values [M] at the ends of the responses [B]; nan for a response without steps."""
        found = torch.full((self.batch_size,), torch.nan, dtype=values.dtype, device=values.device)
        there = self.last_place >= 0
        found[there] = values[self.last_place[there]]
        return found


def reward_losses(raw: Tensor, batch: RewardBatch, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's share of cross entropy and pinball loss of its optimiser step, scalars.

    Every response weighs the same, however many steps it has, or long wrong ones would dominate. The pinball loss has
    no gradient in the mean.
    """
    known = ~batch.place_target.isnan()
    raw, target, row = raw[known], batch.place_target[known], batch.place_row[known]
    mean, gaps = raw[:, :1], raw[:, 1:]
    quantiles = monotone_quantiles(torch.cat([mean.detach(), gaps], dim=1))
    pinball = pinball_loss(torch.stack([quantiles.low, quantiles.high], dim=1), target, levels).mean(1)
    parts = (soft_cross_entropy(mean.squeeze(1), target), pinball)
    means = (row_means(part, row, num_rows=batch.batch_size) for part in parts)
    entropy, pinball = (share_of_step(values, batch.weight, batch.total) for values in means)
    return entropy, pinball


class PlaceMetrics(torch.nn.Module):
    """Brier, ECE, bias, pinball and coverage at every place with a known rate, by position and overall."""

    def __init__(self, levels: tuple[float, float]) -> None:
        super().__init__()
        self.means, self.quantiles = StepMetrics(), QuantileMetrics(levels)

    def reset(self) -> None:
        self.means.reset()
        self.quantiles.reset()

    def update(self, batch: RewardBatch, scores: StepScores) -> None:
        known = ~batch.place_rate.isnan()
        rate, kind = batch.place_rate[known], batch.place_kind[known]
        self.means.update(scores.mean[known], rate, batch.place_rollouts[known], kind)
        self.quantiles.update(scores.low[known], scores.high[known], rate, kind)

    def compute(self) -> dict[str, float]:
        """Return the numbers of ``StepMetrics`` and ``QuantileMetrics``; empty where no rate is known."""
        values = {**self.means.compute(), **self.quantiles.compute()}
        return values if values[PREFIXES] else {}


def first_head(width: int, *, device: torch.device) -> nn.Linear:
    """Return three outputs over a policy's states that give one half everywhere, with quantiles around it."""
    head = nn.Linear(width, len(heads.OUTPUTS), dtype=torch.float32, device="meta").to_empty(device=device)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, *[math.log(math.expm1(heads.FIRST_GAP))] * 2]))
    return head


@dataclass(frozen=True)
class RewardModuleSettings:
    """What a reward model learns and starts from; ``QuantileRewardModule`` documents the fields."""

    format: str | None = None
    full: bool = False
    steps: Steps = "auto"
    target: RewardTarget = "outcome"
    low: float = 0.1
    high: float = 0.9
    pinball: float = 1.0
    head_lr: float = 1e-3

    def __post_init__(self) -> None:
        check_literals(self)
        check_steps("steps", self.steps)
        if not 0.0 < self.low < self.high < 1.0:
            raise InputError(f"Expected `low` and `high` to rise within (0, 1), but got {self.low} and {self.high}.")
        settings.check_not_negative(pinball=self.pinball)
        settings.check_positive(head_lr=self.head_lr)


# In a folder of its own: vLLM reads every safetensors file next to a configuration as model weights.
TRAINED_FILE = "trained/weights.safetensors"
FEATURE = "reward models"
SUPPORT: dict[str, dict[Way, Support]] = {FEATURE: {"one process": "yes", "DDP": "yes", "FSDP2": "no"}}
REASONS: dict[tuple[str, Way], str] = {
    (FEATURE, "FSDP2"): "their head stands beside the trunk that is cut. Use `trainer.strategy: ddp`"
}


class QuantileRewardModule(CalibratedModel):
    """A policy, or a public reward model, that gives after every step the chance of a right answer and two quantiles.

    Over one optimiser step, for responses with weights w and places t (the end of the prompt and of every step) with
    targets c: ``L = sum(w * mean_t(CE(m_t, c_t) + pinball * mean_q rho_q(c_t - s_qt))) / sum(w)`` with m the log-odds
    of the mean, s the quantiles and rho the pinball loss. The quantiles cannot cross and do not change the mean.

    The score is the mean, since most targets are 0 or 1 and so is their median. A lower quantile of *outcomes* is 0
    wherever the chance is below ``1 - low``; quantiles say more about success rates.

    Args:
        base_model: Folder or hub name of the model that training starts from.
        revision: Branch, tag or commit of a hub model.
        format: None for a policy, whose states get three outputs; else the format of a public reward model, such as
            "math-shepherd", whose scores are unchanged until it is trained. The data module takes it over.
        lora: An adapter on the trunk, with ``activated: false``. Without it and ``full``, only the output layer is
            trained.
        full: Trains all weights of the trunk.
        steps: Where steps end: "sentence", "line", "blank_line", "heading", "marker:TEXT" (after that text), or
            "auto", the coarsest of the first four that a response has. The data module takes it over.
        target: Target at every step, passed on to the data module; see there.
        low: Level of the lower quantile.
        high: Level of the upper quantile.
        pinball: Weight of the quantiles in the loss.
        lr: Peak learning rate of AdamW for the adapter or the trunk; it follows a cosine to zero over optimiser steps.
        head_lr: Peak learning rate of AdamW for the output layer.
        weight_decay: AdamW weight decay.
        warmup_steps: Optimiser steps of linear warm-up.
        torch_dtype: Type of the frozen weights; "auto" is float32 on a CPU and with a frozen trunk, else the stored
            type. A trained trunk is float32.
        attn_implementation: None takes "segments" where the model can run packed rows by it.
        query: The confidence query of the sampled responses, which is part of a store's identity.
        prompt: How questions are put to the model; None is their tasks' own way.
        seed: Seeds adapter initialisation and dropout.

    Reference:
        Park et al., Know What You Don't Know (arXiv 2506.09338), with a mean in the place of its median.
    """

    head: nn.Module | None
    val_metrics: CalibrationMetrics
    test_metrics: CalibrationMetrics
    val_places: PlaceMetrics
    test_places: PlaceMetrics

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
        adapter = settings.AdapterSettings(
            base_model, revision, lora, torch_dtype, attn_implementation, query, prompt, seed
        )
        if adapter.lora is not None and full:
            raise InputError("Expected `full` without `lora`, but got both.")
        if adapter.activated:
            raise InputError("Expected `lora.activated` to be false for a reward model, but got true.")
        super().__init__(adapter, settings.OptimizerSettings(lr, weight_decay, warmup_steps))
        self.settings = RewardModuleSettings(format, full, steps, target, low, high, pinball, head_lr)
        self.levels = (low, high)
        self.public = None if format is None else reward_format(format)
        if self.public is not None:
            quantiles_of(self.public)  # refuses one that cannot be trained on
        self.head: nn.Module | None = None
        self.save_hyperparameters(plain_settings(self.adapter, self.optimization, self.settings))
        self.val_metrics, self.test_metrics = CalibrationMetrics(), CalibrationMetrics()
        self.val_places, self.test_places = PlaceMetrics(self.levels), PlaceMetrics(self.levels)
        self._sums: Tensor | None = None  # of the micro-batches of an optimiser step, for its log

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Refuse ways of running that do not work, sampling from a public model, and families without an export."""
        super().check_support(trainer)
        if (trainer := trainer or trainer_of(self)) is not None:
            check_features(trainer, [FEATURE], rows=SUPPORT, reasons=REASONS)
            callbacks = " ".join(class_path(type(one)) for one in callbacks_of(trainer))
            if self.public is not None and "selfcal_lightning.callbacks.generation." in callbacks:
                raise InputError(
                    f"Expected no `SSCGeneration` with the reward model of `format={self.public.name!r}`. Sample the "
                    "policy by `selfcal generate`, and name its store as `data.store_dir`."
                )
        kind = type(load_config(self.base_model, revision=self.revision))
        if kind not in AutoModelForTokenClassification._model_mapping:
            found = f"{self.base_model!r} ({kind.__name__})"
            raise InputError(f"`base_model` {found} has no `...ForTokenClassification` to export.")

    def plan_run(self, verb: str, trainer: Trainer, module: object, data: object) -> Plan:
        check_model(self.base_model, revision=self.revision, option="base_model")
        self.check_support(trainer)
        if verb == "fit":
            self._check_trunk_can_learn(trainer)
        full, device = self.settings.full, trainer.strategy.root_device
        trains = verb == "fit" and (full or self.lora is not None)
        memory = settings.plan_memory(self.adapter, self.memory, trains=trains, device=device)
        frozen = "all weights of its trunk" if full else "a frozen trunk"
        trunk = frozen if self.lora is None else f"LoRA of rank {self.lora.r} on its trunk"
        return Plan(model=(f"{self.base_model}, a reward model with {trunk}",), memory=(memory,))

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        model: Any = self.model
        if self.lora is None:
            model.requires_grad_(self.settings.full)
            model.get_output_embeddings().requires_grad_(False)
        if not has_plain_head(model):
            raise InputError(
                f"Expected `base_model` to have a plain output layer, but got {self.base_model!r} with another one. Is "
                "it among `lora.target_modules`?"
            )
        if self.public is None:
            self.head = first_head(model.config.get_text_config().hidden_size, device=model.device)
        else:
            folder = model_folder(self.base_model, revision=self.revision)
            files = WeightFiles.of_model(self.base_model, revision=self.revision)
            heads.check_head(files, folder, self.public)
            self._encoder.check_fits(model.get_input_embeddings().weight.shape[0], of=self.base_model)
            stored = heads.read_head(files, folder, self.public, model, self._encoder.output_ids)
            self.head = heads.head_with_quantiles(stored, self.public).to(model.device).requires_grad_(True)
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
        return load_causal_lm(base_model, is_trunk=self.settings.full or self.public is not None, **loading)

    def on_fit_start(self) -> None:
        self._check_trunk_can_learn(self.trainer)
        if (data := self.data_module) is not None:
            check_stated({n: (getattr(self.settings, n), getattr(data, n)) for n in ("steps", "target", "format")})
        self._check_packing()

    def _check_trunk_can_learn(self, trainer: Trainer) -> None:
        """Raise InputError if a trained trunk would be kept in half precision.

        A step of AdamW changes a weight by about its learning rate; at 5e-5 bfloat16 (8 binary digits) would round it
        away for weights above about .02.
        """
        kept = {"torch_dtype": self.adapter.torch_dtype, "trainer.precision": trainer.precision_plugin.precision}
        for name, value in kept.items() if self.settings.full else ():
            if value in ("bfloat16", "bf16-true", "16-true"):
                raise InputError(
                    f"Expected `{name}` to keep weights in float32 with `full: true`, but got {value!r}: steps would "
                    "be rounded away. Leave it out, and use `trainer.precision: bf16-mixed` on a GPU."
                )

    # ---- training

    def training_step(self, batch: RewardBatch, batch_idx: int) -> Tensor:
        """Return this micro-batch's share of the loss; undoes the averaging over processes and micro-batches."""
        with self.dropout_stream(batch_idx):
            raw = self.raw_outputs(batch)
        entropy, pinball = reward_losses(raw, batch, self.levels)
        known = ~batch.place_target.isnan()
        logged = (entropy, pinball, raw[known, 0].sigmoid().sum(), batch.place_target[known].sum(), known.sum())
        sums = torch.stack([value.detach().double() for value in logged])
        self._sums = sums if self._sums is None else self._sums + sums
        loss = entropy + self.settings.pinball * pinball
        return loss * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        head = list(cast("nn.Module", self.head).parameters())
        own = {id(parameter) for parameter in head}
        adapter = [parameter for parameter in trained_parameters(self).values() if id(parameter) not in own]
        groups: list[dict[str, Any]] = [{"params": head, "lr": self.settings.head_lr}]
        groups += [{"params": adapter, "lr": self.optimization.lr}] if adapter else []
        optimizer = torch.optim.AdamW(groups, weight_decay=self.optimization.weight_decay)
        return with_cosine(optimizer, self.trainer, warmup_steps=self.optimization.warmup_steps)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the values of the step; one small collective."""
        if self._sums is None:
            return
        entropy, pinball, score, target, places = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        self._sums = None
        logged = {
            "train/loss/CrossEntropy": entropy,
            "train/loss/Pinball": pinball,
            "train/loss/Total": entropy + self.settings.pinball * pinball,
            "train/Score": score / max(places, 1.0),
            "train/Target": target / max(places, 1.0),
            "train/LearningRate": optimizer.param_groups[-1]["lr"],
        }
        self.log_dict(logged)
        self.log("loss", logged["train/loss/Total"], prog_bar=True, logger=False)

    # ---- scores

    def raw_outputs(self, batch: RewardBatch) -> Tensor:
        """Return the three outputs at every place, float32 [M, 3]."""
        arguments = forward_arguments(
            self.model, batch.input_ids, batch.attention_mask, trees=batch.trees, position_ids=batch.position_ids
        )
        hidden = hidden_at(self.model, arguments, batch.place)
        with torch.autocast(hidden.device.type, enabled=False):
            return heads.folded_outputs(cast("nn.Module", self.head)(hidden.float()))

    def predict_step(self, batch: RewardBatch, batch_idx: int) -> ScoredRows:
        """Return the score of every response at its end; nan where it has no step."""
        mean = batch.at_ends(self.scores(batch).mean) if batch.batch_size else batch.target
        return ScoredRows(batch.row, batch.question_index, mean, mean, 1.0 - mean)

    def scores(self, batch: RewardBatch) -> StepScores:
        """Return the chance of a right answer and its quantiles at every place, [M] each."""
        return monotone_quantiles(self.raw_outputs(batch))

    def _metrics(self, stage: str) -> tuple[Any, ...]:
        return getattr(self, f"{stage}_metrics"), getattr(self, f"{stage}_places")

    def _score(self, batch: RewardBatch, stage: str) -> None:
        if batch.batch_size == 0:  # a process with fewer questions
            return
        metrics, places = self._metrics(stage)
        scores = self.scores(batch)
        places.update(batch, scores)
        confidence = batch.at_ends(scores.mean)
        metrics.update(
            confidence=confidence, correct=batch.correct, target=batch.target, question_index=batch.question_index,
            task=batch.task, yes_no_mass=torch.ones_like(confidence),
        )  # fmt: skip

    # ---- exports

    def describe(self) -> dict[str, Any]:
        return {
            "base_model": dict(self.identity),
            "outputs": list(heads.output_names(cast("nn.Module", self.head))),
            "about": heads.about(cast("nn.Module", self.head), self.public),
            "hyper_parameters": dict(self.hparams),
        }

    def confidence_origin(self) -> dict[str, Any]:
        return {
            "kind": QUANTILE_PRM,
            "base_model": {name: self.identity[name] for name in DIGESTS},
            "lora": self.hparams["lora"],
            "steps": self.settings.steps,
            **({} if self.settings.format is None else {"format": self.settings.format}),
        }

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        trained = {name: value.detach().cpu().contiguous() for name, value in trained_parameters(self).items()}
        trunk = self.model if self.settings.full else self._merged_trunk()
        heads.save_with_head(trunk, cast("nn.Module", self.head), folder)
        self.tokenizer.save_pretrained(folder)
        (folder / TRAINED_FILE).parent.mkdir(exist_ok=True)
        save_file(trained, folder / TRAINED_FILE, metadata={"format": "pt"})
        format = QUANTILE_PRM if self.public is None else quantiles_of(self.public).name
        RewardFile(format, self.settings.steps, self.levels, self.settings.target).write(folder)

    def _merged_trunk(self) -> PreTrainedModel:
        """Return a copy of the trunk on the CPU with the adapter merged into it."""
        dtype = cast("Dtype", str(self.model.dtype).removeprefix("torch."))
        trunk = load_causal_lm(self.base_model, revision=self.revision, dtype=dtype, is_trunk=self.public is not None)
        if self.lora is None:
            return trunk
        adapted = attach_lora(trunk, self.lora)
        set_adapter_state(adapted, {name: tensor.cpu() for name, tensor in adapter_state(self.model).items()})
        return merge_adapter(adapted)

    def _take_up(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        if manifest is None or not (folder / TRAINED_FILE).is_file():
            raise InputError(f"Expected an export of {type(self).__name__} with {TRAINED_FILE}, but got {folder}.")
        check_base_model(manifest["base_model"], self.identity, self.base_model, kind=type(self).__name__)
        trained, written = trained_parameters(self), load_file(folder / TRAINED_FILE)
        check_trained(written, trained, settings=manifest["hyper_parameters"])
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(written[name])
