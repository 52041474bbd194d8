"""Write what was learned as a folder: the adapter, its tokenizer, and a manifest that says what it is."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from selfcal_lightning.capability.metrics import KEYS as CAPABILITY_KEYS
from selfcal_lightning.confidence.domain import FEWEST, MOST, Domain
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_apart
from selfcal_lightning.core.plan import Place, Plan
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.transformers.prompt_states import network_states
from selfcal_lightning.models.activated import adapter_asleep
from selfcal_lightning.models.folders import files_sha256, read_manifest, resolve_model
from selfcal_lightning.training.export import check_output, write_export
from selfcal_lightning.training.metrics import KEYS as CALIBRATION_KEYS
from selfcal_lightning.training.model_parallel import data_module_of, gather_trained, is_sharded
from selfcal_lightning.training.modules import TrainedModule, check_defines
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

if TYPE_CHECKING:
    from selfcal_lightning.datamodules.probe import ProbeDataModule
    from selfcal_lightning.datamodules.ssc.stored_data import StoredDataModule

    SampledData: TypeAlias = StoredDataModule | ProbeDataModule | None  # None where loaders were given without one

KEYS = (*CALIBRATION_KEYS, *CAPABILITY_KEYS, "target/MSE", "loss")
TRAINED = ("adapter", "model", "module")  # kinds of exports that a training writes


class AdapterExport(Callback):
    """Exports the trained weights (an adapter, all weights, or a module's own) with a ``selfcal_manifest.json``.

    An earlier export is replaced atomically if it comes from the same run or the same settings; one with other settings
    is kept, renamed to include its date.

    Args:
        output_dir: Folder for the weights at the end of training; null is ``adapter`` in the trainer's log folder.
            Auxiliary adapters go to ``<output_dir>-<name>``.
        monitor: A value of ``CalibrationMetrics``, such as "val/calibration/ECE" or, of one task,
            "val/gsm8k/calibration/ECE"; of a probe one of ``CapabilityMetrics``, or without labels "val/target/MSE" or
            "val/loss". After every validation that improves it, the weights go to ``<output_dir>-best``. None exports
            only at the end.
        mode: Lower ("min") or higher ("max") values of ``monitor`` are better.
    """

    def __init__(
        self, output_dir: str | None = None, *, monitor: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        if mode not in {"min", "max"}:
            raise InputError(f'`mode` must be "min" or "max", but got {mode!r}.')
        if monitor is not None and not (
            monitor.startswith("val/") and monitor.endswith(tuple(f"/{key}" for key in KEYS))
        ):
            raise InputError(f"`monitor` must be val/[TASK/]KEY, KEY one of {', '.join(KEYS)}, but got {monitor!r}.")
        self.output_dir, self.monitor, self.mode = output_dir, monitor, mode
        self.best: float | None = None
        self.run: str | None = None
        self._folder, self._best_folder = Path(), Path()
        self._training: dict[str, Any] = {}
        self._validated: int | None = None  # the step of the last validation, which `callback_metrics` are of
        self._data: SampledData = None
        self._tasks: list[str] | None = None
        self._base_domain: Domain | None = None

    def setup(self, trainer: Trainer, pl_module: TrainedModule, stage: str) -> None:
        """Choose the folder while all processes are here, and refuse before training what cannot be written."""
        self._settle(trainer)
        self._training = {}
        if stage == TrainerFn.FITTING:
            self._check(pl_module, data_module_of(trainer))

    def _settle(self, trainer: Trainer) -> None:
        default = Path(trainer.log_dir or trainer.default_root_dir) / "adapter"  # agreed on by a broadcast
        self._folder = default if self.output_dir is None else Path(self.output_dir)
        self._best_folder = self._folder.with_name(f"{self._folder.name}-best")

    def _check(self, module: TrainedModule, data: SampledData) -> None:
        check_defines(module, TrainedModule, "save_export", who="AdapterExport")
        self._data = data
        best = [] if self.monitor is None else [self._best_folder]
        for folder in (self._folder, *best, *self._folders_auxiliary(module).values()):
            check_output(folder, kinds=TRAINED, overwrite=True, others=True)
            check_apart(folder, {"base model": resolve_model(module.base_model)}, option="output_dir")

    def plan_run(self, verb: str, trainer: Trainer, module: TrainedModule, data: SampledData) -> Plan:
        if verb != TrainerFn.FITTING:
            return Plan()
        self._settle(trainer)
        self._check(module, data)
        if self.monitor is not None and data is not None:
            key = max((key for key in KEYS if self.monitor.endswith(f"/{key}")), key=len)
            task = self.monitor.removeprefix("val/").removesuffix(key).removesuffix("/")
            tasks = {source.task for source in data.sources.get("validation", ())}
            logged = sorted(tasks) if len(tasks) > 1 else []  # the values of a single task have no name of their own
            if task and tasks and task not in logged:
                raise unknown_name("monitor", self.monitor, [f"val/{key}", *(f"val/{name}/{key}" for name in logged)])
        places = [Place(module.export_kind, str(self._folder))]
        places += [Place(f"adapter {name}", str(folder)) for name, folder in self._folders_auxiliary(module).items()]
        return Plan(places=tuple(places))

    def _folders_auxiliary(self, module: TrainedModule) -> dict[str, Path]:
        return {name: self._folder.with_name(f"{self._folder.name}-{name}") for name in module.auxiliary}

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the run's name, so that a resumed run does not replace a better export."""
        return {"best": self.best, "of": [self.monitor, self.mode], "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        same = state_dict.get("of") == [self.monitor, self.mode]  # the best of another value says nothing of this one
        self.best, self.run = state_dict["best"] if same else None, state_dict.get("run")

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Name the run; a resumed one takes the best value of its folder, which its checkpoint may not know."""
        self._training = describe_training(trainer)
        if self.run is None:
            self.run = trainer.strategy.broadcast(uuid.uuid4().hex)
        elif self.monitor is not None:
            manifest = read_manifest(self._best_folder) or {}
            mine = manifest.get("run") == self.run  # not of an earlier training
            kept = trainer.strategy.broadcast(manifest["metrics"].get(self.monitor) if mine else None)
            best = [value for value in (self.best, kept) if value is not None]
            self.best = (min if self.mode == "min" else max)(best, default=None)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._validated = trainer.global_step
        if self.monitor is None:
            return
        if self.monitor not in trainer.callback_metrics:
            known = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise InputError(f"`monitor` must be one of the logged values {known}, but got {self.monitor!r}.")
        value = trainer.callback_metrics[self.monitor].item()
        sign = 1.0 if self.mode == "min" else -1.0
        # A value that is not defined (nan) is never the best.
        if not math.isnan(value) and (self.best is None or sign * value < sign * self.best):
            self.best = value
            self._export(trainer, pl_module, self._best_folder)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        if not self._training:  # a finished run was started again, and nothing was trained
            self._training = describe_training(trainer)
            folders = [self._folder, *self._folders_auxiliary(pl_module).values()]
            if trainer.strategy.broadcast(all(map(self._is_written, folders))):
                if trainer.is_global_zero:
                    say(f"AdapterExport: {self._folder} holds the {pl_module.export_kind} of this run already.")
                return
        self._export(trainer, pl_module, self._folder)
        if trainer.is_global_zero:
            for name, folder in self._folders_auxiliary(pl_module).items():
                self._export_auxiliary(pl_module, name, folder)

    def _is_written(self, folder: Path) -> bool:
        manifest = read_manifest(folder) or {}
        steps = (manifest.get("training") or {}).get("steps")
        return self.run is not None and (manifest.get("run"), steps) == (self.run, self._training["steps"])

    def _domain(self, module: TrainedModule) -> Domain | None:
        """Return what the training prompts look like to the model, so that unlike questions are noticed."""
        if self._data is None or not isinstance(module, SelfCalibrationModule) or is_sharded(module):
            return None
        if self._base_domain is not None:
            return self._base_domain
        learnt, store = self._learnt(self._data), SampleStore(self._data.store_dir)
        index = store.index(split="train")
        firsts = [at for at in index.edges[:-1] if learnt is None or index.question_id[at] in learnt]
        rows = store.read_rows(index.locate(firsts[:MOST]))
        prompts = [module.chat.prompt_ids(row.question.messages) for row in rows if row.question.messages]
        if len(prompts) < FEWEST:
            return None
        try:
            with adapter_asleep(module.model) if module.activated else nullcontext():
                states = network_states(module.model, prompts)
        except InputError as error:  # of an architecture whose layers are not found
            say(f"AdapterExport: questions unlike the training ones will not be noticed: {error}")
            return None
        domain = Domain.fit(states)
        if module.activated:  # the base model reads the prompts, which does not change
            self._base_domain = domain
        return domain

    @staticmethod
    def _learnt(data: StoredDataModule | ProbeDataModule) -> set[str] | None:
        """Return the ids of the training questions; None where all of the store are. It may hold others."""
        if not data.sources["train"]:
            return None
        return {question.id for question in cast("StoredDataModule", data).questions("train")}

    def _export_auxiliary(self, module: TrainedModule, name: str, folder: Path) -> None:
        """Export an auxiliary adapter as if it had been trained alone."""
        own = module.auxiliary[name]
        teacher = None if own.teacher is None else files_sha256([Path(own.teacher)])[0]
        rows = {**self._training.get("rows", {}), "teacher": teacher, "teacher_share": own.teacher_share}
        rows |= {"target": own.target} if own.target is not None else {}
        facts = self._facts(module) | {"training": {**self._training, "rows": rows}}
        write_export(module, folder, auxiliary=name, **facts)
        say(f"AdapterExport: wrote the adapter {name!r} to {folder}")

    def _export(self, trainer: Trainer, module: TrainedModule, folder: Path) -> None:
        # All processes give their part of sharded weights before the first one writes.
        state = gather_trained(module) if is_sharded(module) else None
        if not trainer.is_global_zero:
            return
        # Those of an earlier step are not of these weights.
        known = trainer.callback_metrics if self._validated == trainer.global_step else {}
        metrics = {name: value.item() for name, value in known.items() if name.startswith("val/")}
        write_export(module, folder, state=state, metrics=metrics, **self._facts(module))
        say(f"AdapterExport: wrote the {module.export_kind} to {folder}")

    def _facts(self, module: TrainedModule) -> dict[str, Any]:
        facts = {"run": self.run, "training": self._training, "domain": self._domain(module)}
        if (data := self._data) is None:
            return facts
        store = SampleStore(data.store_dir)
        rounds = store.manifest.rounds
        sampling = rounds[0].fingerprint.sampling if 0 in rounds else None
        if self._tasks is None:  # the whole index is read for it, and no export of a run changes it
            index, learnt = store.index(split=getattr(data, "train_split", "train")), self._learnt(data)
            rows = zip(index.task.tolist(), index.question_id.tolist(), strict=True)
            self._tasks = sorted({task for task, name in rows if learnt is None or name in learnt})
        described = {
            "path": data.store_dir,
            "digests": {str(number): record.digest for number, record in rounds.items()},
            "sampling": None if sampling is None else asdict(sampling),
            "tasks": self._tasks,
        }
        return {**facts, "store": described}


def describe_training(trainer: Trainer) -> dict[str, Any]:
    """Return what else the weights depend on: steps, precision, rows of a step. Every process calls it."""
    facts: dict[str, Any] = {"steps": trainer.estimated_stepping_batches, "precision": str(trainer.precision)}
    facts |= {"gradient_clip_val": trainer.gradient_clip_val}
    data: SampledData = data_module_of(trainer)
    if data is None:
        return facts
    rows = data.training_settings()
    questions = hashlib.sha256(json.dumps(rows.pop("questions", [])).encode()).hexdigest()
    return facts | {"rows": json.loads(json.dumps(rows, default=str)), "questions_sha256": questions}
