"""Write the confidences that ``predict`` computes into the sample store."""

import hashlib
import uuid
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import Place, Plan
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.engines.sampling.sampler import part_name
from selfcal_lightning.training.batches import ScoredRows
from selfcal_lightning.training.model_parallel import callbacks_of, data_module_of
from selfcal_lightning.training.modules import ScoringModule, check_defines, needed_data, trained_parameters


class ConfidenceWriter(Callback):
    """Writes the confidence of every scored response as an annotation of the store (``selfcal predict`` adds it).

    Read them back with ``SampleStore(...).samples(confidences=["p_true_calibrated"])``. Their origin is stored with
    them: base model, adapter and trained weights, prompt and query. A second run by the same model adds to the first,
    for another split say.

    Args:
        name: Name of the confidence in the store.
        overwrite: Replaces confidences of this name, of all splits, that another model, checkpoint or query gave.
    """

    def __init__(self, name: str = "p_true_calibrated", *, overwrite: bool = False) -> None:
        self.name, self.overwrite = name, overwrite
        self._annotation: Annotation | None = None
        self._origin: dict[str, Any] = {}
        self._run = ""
        self._rows: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def setup(self, trainer: Trainer, pl_module: ScoringModule, stage: str) -> None:
        """Refuse a second writer of the same name, and a module whose confidences nobody could tell apart."""
        self._check(trainer, pl_module)

    def plan_run(self, verb: str, trainer: Trainer, module: ScoringModule, data: object) -> Plan:
        if verb != "predict":
            return Plan()
        self._check(trainer, module)
        folder = Annotation(_stored(data).store_dir, self.name).folder
        return Plan(places=(Place("confidences", str(folder)),))

    def _check(self, trainer: Trainer, module: object) -> None:
        check_defines(module, ScoringModule, "confidence_origin", "predict_step", who="ConfidenceWriter")
        names = [callback.name for callback in callbacks_of(trainer) if isinstance(callback, ConfidenceWriter)]
        if (count := names.count(self.name)) > 1:
            raise InputError(
                f"{count} ConfidenceWriters have the name {self.name!r}. `selfcal predict` adds one (options "
                "`--confidence_writer.name` and `.overwrite`); take the other out of `trainer.callbacks`."
            )

    def on_predict_start(self, trainer: Trainer, pl_module: ScoringModule) -> None:
        data, index = _scored(trainer)
        if self.name in index.confidences:
            raise InputError(f"The rows of {data.store_dir} bring a confidence {self.name!r}. Choose another `name`.")
        if trainer.ckpt_path is None and trainer.global_step == 0 and pl_module.exported_from is None:
            rank_zero_warn(
                f"No checkpoint is loaded: {self.name!r} will be the confidence of the untrained model. Give "
                "`--ckpt_path` or `--adapter` for a calibrated one."
            )
        self._annotation = Annotation(data.store_dir, self.name)
        # The trained weights are named by their sha256, since a checkpoint may be overwritten, or training continue.
        trained = {"trained_sha256": trained_sha256(pl_module), "max_length": data.max_length}
        self._origin = pl_module.confidence_origin() | trained
        self._annotation.check_origin(self._origin, overwrite=self.overwrite)
        self._run = trainer.strategy.broadcast(uuid.uuid4().hex[:12])
        self._rows, self._values = [], []

    def on_predict_batch_end(self, trainer: Trainer, pl_module: ScoringModule, outputs: ScoredRows, *_: Any) -> None:
        self._rows.append(outputs.row.cpu())
        self._values.append(outputs.p_true.double().cpu())

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: ScoringModule) -> None:
        """Write this process's part; when all are written, the first process shows them to readers."""
        data, scored = _scored(trainer)
        rows = torch.cat(self._rows).numpy() if self._rows else np.empty(0, dtype=np.int64)
        values = torch.cat(self._values).numpy() if self._values else np.empty(0)
        self._rows, self._values = [], []
        shards = SampleStore(data.store_dir).manifest.shards
        index = scored.select(rows)
        annotation = cast("Annotation", self._annotation)  # set in `on_predict_start`
        annotation.write_part(self._run, part_name((trainer.global_rank, trainer.world_size)), index, values, shards)
        trainer.strategy.barrier("ConfidenceWriter: all parts are written")
        if trainer.is_global_zero:
            num_rows = annotation.publish(
                self._run,
                [part_name((rank, trainer.world_size)) for rank in range(trainer.world_size)],
                origin=self._origin,
                details={  # worth knowing about a run, and without effect on its values up to rounding
                    "split": data.predict_split,
                    "model": pl_module.base_model,
                    "revision": pl_module.revision,
                    "checkpoint": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
                    "adapter": None if pl_module.exported_from is None else str(pl_module.exported_from),
                    "precision": str(trainer.precision),
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                },
                overwrite=self.overwrite,
            )
            rounds = {entry.file: entry.round for entry in shards}
            store = SampleStore(data.store_dir, num_samples=data.num_samples)
            stored = store.index(split=data.predict_split, round=rounds[scored.files[0]], confidences=[self.name])
            say(
                f"ConfidenceWriter: wrote {self.name!r} of {num_rows:,} responses to {annotation.folder}; "
                f"{stored.num_missing(self.name):,} of {len(stored):,} stored for {data.predict_split!r} have none."
            )
        trainer.strategy.barrier("ConfidenceWriter: the run is published")


def trained_sha256(module: Any) -> str:
    """Return the sha256 over the names and float32 values of the trained parameters. A collective if sharded."""
    digest = hashlib.sha256()
    for name, parameter in sorted(trained_parameters(module).items()):
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(name.encode())
        digest.update(whole.float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _stored(data: Any) -> Any:
    return needed_data(data, who=ConfidenceWriter.__name__, remedy="use SSCDataModule")


def _scored(trainer: Trainer) -> tuple[Any, SampleIndex]:
    data = _stored(data_module_of(trainer))
    if data.predict_index is None:
        raise InputError("ConfidenceWriter needs a data module over a sample store, but got none.")
    return data, data.predict_index
