"""A plug-in as a user writes it: a linear probe of a frozen language model, with nothing of SelfCalibrationModule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import base_model_identity, read_manifest, same_base_model
from selfcal_lightning.training.batches import ScoredRows, SSCBatch
from selfcal_lightning.training.metrics import CalibrationMetrics
from selfcal_lightning.training.model_parallel import trainer_of
from selfcal_lightning.training.modules import ScoringModule
from selfcal_lightning.training.support import Support, Way, check_features

FILE = "probe.safetensors"
FEATURE = "probe"
SUPPORT: dict[str, dict[Way, Support]] = {FEATURE: {"one process": "yes", "DDP": "not run", "FSDP2": "no"}}
Part = tuple[str, dict[str, Any]]  # the path of a class, and its arguments
REASONS: dict[tuple[str, Way], str] = {(FEATURE, "FSDP2"): "its trunk is loaded whole. Use `trainer.strategy: ddp`"}


class LinearProbe(ScoringModule):
    """Reads a confidence from the last hidden state of the query, by a linear function under dropout."""

    def __init__(
        self,
        base_model: str,
        *,
        revision: str | None = None,
        query: str = DEFAULT_QUERY,
        lr: float = 0.05,
        dropout: float = 0.3,
    ) -> None:
        super().__init__(base_model, revision=revision, query=query)
        self.save_hyperparameters()
        self.lr, self.dropout, self.activated = lr, dropout, True
        self.trunk: Any = None
        self.head: Any = None
        self.val_metrics = CalibrationMetrics()

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Refuse FSDP2, by a row of the probe's own."""
        trainer = trainer or trainer_of(self)
        if trainer is not None:
            check_features(trainer, [FEATURE], rows=SUPPORT, reasons=REASONS)

    def configure_model(self) -> None:
        """Load the trunk, once."""
        if self.trunk is not None:
            return
        self.check_support()
        self.identity = base_model_identity(self.base_model, revision=self.revision)
        self.trunk = load_causal_lm(self.base_model, revision=self.revision, dtype="float32").requires_grad_(False)
        self.head = nn.Linear(self.trunk.config.hidden_size, 1)
        state = {name: torch.zeros_like(value) for name, value in self.head.state_dict().items()}
        if self.exported_from is not None:
            manifest = read_manifest(self.exported_from)
            if not same_base_model(manifest["base_model"], self.identity):
                raise InputError(f"Expected a probe of {self.base_model}, but got {self.exported_from}.")
            state = load_file(self.exported_from / FILE)
        self.head.load_state_dict(state)

    def logits(self, batch: SSCBatch) -> Tensor:
        with torch.no_grad():
            outputs = self.trunk(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
        state = outputs.hidden_states[-1].flatten(0, 1)[batch.query_position]
        return self.head(F.dropout(state, self.dropout, training=self.training)).squeeze(-1)

    def training_step(self, batch: SSCBatch, batch_idx: int) -> Tensor:
        weight = batch.calibration_weight
        target = torch.where(weight > 0, batch.target, torch.zeros_like(batch.target))
        loss = F.binary_cross_entropy_with_logits(self.logits(batch), target, reduction="none")
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return scale * (weight * loss).sum() / batch.calibration_total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.head.parameters(), lr=self.lr)

    def validation_step(self, batch: SSCBatch, batch_idx: int) -> None:
        p = self.logits(batch).sigmoid()
        facts = {"correct": batch.correct, "target": batch.target, "question_index": batch.question_index}
        self.val_metrics.update(confidence=p, task=batch.task, yes_no_mass=torch.ones_like(p), **facts)

    def predict_step(self, batch: SSCBatch, batch_idx: int) -> ScoredRows:
        p = self.logits(batch).sigmoid()
        return ScoredRows(batch.row, batch.question_index, p, p, 1.0 - p)

    # ---- exports

    def confidence_origin(self) -> dict[str, Any]:
        return {"kind": "linear probe", "weights_sha256": self.identity["weights_sha256"], "query": self.query}

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        own = self.head.state_dict() if state is None else {n.removeprefix("head."): v for n, v in state.items()}
        save_file({name: value.contiguous() for name, value in own.items()}, folder / FILE)


class StopAt(Callback):
    """Breaks a run in the middle of an epoch, before a step that has been given a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ArithmeticError(f"stopped at step {self.step}")


def write_configuration(
    folder: Path, *, model: Part, data: Part, callbacks: dict[str, dict[str, Any]], stop_at: int | None, max_epochs: int
) -> Path:
    """Write settings of ``selfcal fit`` with a checkpoint after each step, and return their file."""
    kept = {"dirpath": f"{folder}/checkpoints", "save_last": True, "every_n_train_steps": 1}
    stops = {} if stop_at is None else {"support.probe_plugin.StopAt": {"step": stop_at}}
    named = {**stops, **callbacks, "lightning.pytorch.callbacks.ModelCheckpoint": kept}
    trainer = {
        "accelerator": "cpu", "devices": 1, "max_epochs": max_epochs, "logger": False, "num_sanity_val_steps": 0,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "callbacks": [{"class_path": name, "init_args": settings} for name, settings in named.items()],
    }  # fmt: skip
    parts = {name: {"class_path": one[0], "init_args": one[1]} for name, one in {"model": model, "data": data}.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 3, "trainer": trainer, **parts}))
    return folder / "config.yaml"
