"""Fill the sample store before it is read: by the base model at first, by the model in training in later rounds."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from selfcal_lightning.callbacks.preemption import interrupt_of
from selfcal_lightning.core import processes as rendezvous
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.core.plan import Participant, Place, Plan
from selfcal_lightning.core.processes import Rendezvous
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.core.signals import Interrupt, never
from selfcal_lightning.data.store.manifest import check_place
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, StoreCorruptError
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import open_engine, serve_model
from selfcal_lightning.engines.sampling import sampler
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings, memory_share
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import resolve_model, weights_bytes, weights_sha256
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.training import rounds
from selfcal_lightning.training.calibrated_model import ConfidenceModel
from selfcal_lightning.training.checkpoints import INCIDENTAL
from selfcal_lightning.training.model_parallel import callbacks_of, data_module_of, decides_at_epoch_end
from selfcal_lightning.training.modules import ScoringModule, check_defines, needed_data
from selfcal_lightning.training.settings import check_positive
from selfcal_lightning.training.support import way_of

if TYPE_CHECKING:
    from selfcal_lightning.datamodules.ssc.stored_data import Split, StoredDataModule


MEMORY = "gpu_memory_utilization"


class EnginePlace(NamedTuple):
    device: torch.device
    local_rank: int = 0
    processes: int = 1


def start_engine(options: EngineOptions, model: str, chat: ChatFormat, *, place: EnginePlace) -> Engine:
    """Start an engine on the process's device, or on GPUs that no other process's engine takes."""
    own: dict[str, Any] = {}
    if options.name == "transformers":
        own = {"device": str(place.device)}
    elif place.device.type == "cuda":
        count, start = options.num_gpus, place.local_rank * options.num_gpus
        there, needed = torch.cuda.device_count(), place.processes * count
        if count > 1 and needed > there:
            raise InputError(
                f"{place.processes} engine(s) of `tensor_parallel_size` {count} need {needed} GPUs, but got {there}. "
                "Start fewer processes (`trainer.devices`), or lower `tensor_parallel_size`."
            )
        own = {"devices": [place.device.index] if count == 1 else list(range(start, start + count))}
    return open_engine(replace(options, engine_args={**own, **options.engine_args}), model, chat=chat)


def start_round_engine(
    options: EngineOptions, module: ConfidenceModel, chat: ChatFormat, *, adapter: str, place: EnginePlace
) -> Engine:
    """Start the engine of a later round: the trainer's own model, or an engine of its own for vLLM or another dtype."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    model = resolve_model(module.base_model)
    own_dtype = str(module.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    if options.name == "transformers" and options.dtype in ("auto", own_dtype):
        digest, bits = weights_sha256(adapter), module.memory.quantization
        return serve_model(options, module.model, chat=chat, source=model, adapter_sha256=digest, quantization=bits)
    options = replace(options, adapter=adapter)
    if options.name == "vllm" and place.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(place.device)
        weights = engine_weights_bytes(model, revision=options.revision, dtype=options.dtype) // options.num_gpus
        share = memory_share(free, total, weights=weights, limit=options.engine_args.get(MEMORY))
        options = replace(options, engine_args={**options.engine_args, MEMORY: share})
    return start_engine(options, model, chat, place=place)


def engine_weights_bytes(model: str, *, revision: str | None, dtype: str) -> int:
    """Return the bytes that a model's weights take in vLLM on a GPU."""
    try:
        files = WeightFiles.of_model(model, revision=revision)
    except ValueError:  # files of other names, or something that the engine's own start will name
        return weights_bytes(model, revision=revision)
    if dtype != "auto":
        return files.bytes_in(getattr(torch, dtype))
    return files.bytes_in(torch.bfloat16) if files.first_float_dtype() == torch.float32 else files.total_bytes


# A shard that is named and not there yet, or a stale handle: for a moment, on a network disk.
LATE = (OSError, StoreCorruptError)


def wait_for_shares(meeting: Rendezvous, store: SampleStore, wanted: set[str], *, round: int) -> None:
    """Wait until every process has sampled its share; the first one shows how far all of them are."""
    if meeting.rank != 0 or meeting.world_size == 1:
        meeting.meet()
        return
    parts = {sampler.part_name((rank, meeting.world_size)) for rank in range(meeting.world_size)}
    try:
        before = store.committed_questions(parts=parts, round=round)
        missing = len(wanted - store.question_ids(round=round, include_parts=True))
    except LATE:  # others are writing; a bar is not worth a run
        meeting.meet()
        return
    with Progress(missing, label=f"Round {round}, other processes", unit="questions") as bar:

        def look() -> None:
            try:
                done = store.committed_questions(parts=parts, round=round) - before
            except LATE:  # the next look will tell
                return
            bar.update(min(done, missing) - bar.done)

        meeting.meet(look)
        look()


def join_shares(joining: Rendezvous, looking: Rendezvous, store: SampleStore, wanted: set[str], *, round: int) -> None:
    """Show readers what all processes have written: the first one joins the parts, then the others look."""
    with joining.together():
        if joining.rank == 0:
            _look_until_there(joining, store, wanted, round=round, join=True)
    with looking.together():  # nobody continues into a collective that another one does not reach
        if looking.rank != 0:
            _look_until_there(looking, store, wanted, round=round, join=False)


def _look_until_there(meeting: Rendezvous, store: SampleStore, wanted: set[str], *, round: int, join: bool) -> None:
    # A network file system may show another machine's files late: who misses something looks again.
    started = time.monotonic()
    patience = meeting.stall_timeout if meeting.world_size > 1 else 0.0
    while True:
        try:
            if join:
                store.join()
            if not (missing := wanted - store.question_ids(round=round)):
                return
            problem: Exception = RuntimeError(
                f"{store.path} lacks round {round} of {len(missing)} of {len(wanted)} questions, such as "
                f"{min(missing)!r}. All processes must see one file system, and sample the same questions."
            )
        except LATE as error:
            problem = error
        if time.monotonic() - started >= patience:
            raise problem
        meeting.check()
        time.sleep(rendezvous.POLL_SECONDS)


TRAINER_SETTINGS = ("gradient_clip_val", "gradient_clip_algorithm", "precision")
CHECKED_QUESTIONS, CHECKED_SAMPLES = 6, 2


class ResumedAt(NamedTuple):
    epoch: int
    at_start: bool
    global_step: int


def resumed_at(checkpoint: Mapping[str, Any]) -> ResumedAt:
    # One written between the last batch of an epoch and its end counts the epoch as begun and not as completed.
    loop = checkpoint["loops"]["fit_loop"]
    epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    completed, step = epochs["completed"], checkpoint["global_step"]
    if epochs["started"] == completed:
        return ResumedAt(completed, True, step)
    if batches["is_last_batch"]:
        return ResumedAt(completed + 1, True, step)
    return ResumedAt(completed, batches["current"]["ready"] == 0, step)


def is_over(trainer: Trainer, *, epochs: int, steps: int) -> bool:
    """Return, between two epochs, whether training stops now, so that another round would not be read."""
    if trainer.received_sigterm or (trainer.max_steps != -1 and steps >= trainer.max_steps):
        return True
    if trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs:
        return True
    return trainer.should_stop and epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)


def check_can_regenerate(trainer: Trainer, module: ConfidenceModel, engine: EngineOptions, has_questions: bool) -> None:
    """Raise InputError, before any sampling, for what later rounds do not work with."""
    problems = {
        "needs `train` sources in the data module": not has_questions,
        "needs `lora` settings: every round keeps its adapter": module.lora is None,
        "needs joint training (`lora.activated: false`): others do not change the samples": module.activated,
        "does not work with FSDP2: use the strategy auto or ddp": way_of(trainer.strategy) == "FSDP2",
    }
    if problem := next((problem for problem, is_there in problems.items() if is_there), None):
        raise InputError(f"`regenerate_every_n_epochs` {problem}.")
    if module.memory.quantization is not None:
        own = module.adapter.torch_dtype
        if own == "auto":
            own = "float32" if trainer.strategy.root_device.type == "cpu" else "bfloat16"
        if engine.name != "transformers" or engine.dtype not in ("auto", own):
            raise InputError(
                f"Later rounds with `quantization` need `engine: transformers` with `dtype: auto` (or {own}), but got "
                f"{engine.name} with {engine.dtype}, which would serve the base model as stored."
            )
    for callback in callbacks_of(trainer):
        if isinstance(callback, EarlyStopping | Timer) and decides_at_epoch_end(trainer, callback):
            early = "check_on_train_epoch_end: false"
            raise InputError(
                f"{type(callback).__name__} decides at an epoch's end, after the next round has been sampled: set its "
                f"`{'interval: step' if isinstance(callback, Timer) else early}`."
            )


def training_digest(trainer: Trainer, module: ConfidenceModel, *, round: int | None) -> str:
    """Return a hash of what the weights at the beginning of ``round`` depend on, as far as settings say."""
    content = {
        "module": {name: value for name, value in module.hparams.items() if name not in INCIDENTAL},
        "data": _data(trainer).training_settings(),
        "trainer": {name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        "steps": None if round is None else trainer.estimated_stepping_batches,
        "round": round,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _data(trainer: Trainer) -> StoredDataModule:
    return needed_data(data_module_of(trainer), who="SSCGeneration", remedy="use SSCDataModule")


def _index(data: StoredDataModule, round: int) -> SampleIndex:
    index = SampleStore(data.store_dir, num_samples=data.num_samples).index(split="train", round=round)
    wanted = {question.id for question in data.questions("train")}
    return index.select(np.array([name in wanted for name in index.question_id], dtype=bool))


Splits = dict[str, list[Question]]


class SSCGeneration(Callback):
    """Samples round 0 (the base model's responses with their P(True)) if the store lacks it, and later rounds.

    Round 0 is sampled in ``setup``, before the module loads its weights, so that the engine has the GPU to itself.
    Questions, store folder and number of samples are read from the data module, model, revision and query from the
    module. Every process samples its own share of the questions; then they wait for each other. Responses in the store
    are reused, also after a kill.

    Later rounds (``regenerate_every_n_epochs`` of the data module) are sampled at the end of an epoch with the current
    adapter, of the training questions only. That adapter and a checkpoint of the trainer are first written to
    ``adapters/`` in the store's folder, and the checkpoint as ``last-round.ckpt`` next to those of a
    ``ModelCheckpoint``, where ``ckpt_path: last`` finds it. A run that is killed and resumed completes the round with
    that adapter. An engine that does not serve that adapter is refused. ``round/...`` logs statistics of each round and
    how far its targets moved.

    Args:
        engine: Which engine, and how: transformers, or vllm (an extra), which runs in a process of its own on the
            trainer's GPU (compute mode "default"). With ``tensor_parallel_size: 2`` among its ``engine_args`` process p
            of a machine samples with the GPUs 2p and 2p + 1. In later rounds the transformers engine runs the trainer's
            own model where ``dtype`` is "auto" or the trainer's, and loads the base model once more for another.
        sampling: Sampling settings.
        seed: Seeds sampling; every sample has its own seed, derived from this one.
        gpu_memory_utilization: Share of the GPU's memory for vLLM; null is vLLM's default. In later rounds it caps what
            vLLM takes of the memory that the trainer leaves free.
        questions_per_shard: Questions in one file of the store. A killed run loses at most the files it was writing.
        shard_by_shard: Samples file after file, which is slower. A killed run with the transformers engine on a CPU
            then gets the same confidences as an unbroken one, to the last bit; otherwise texts are equal and
            confidences differ by about 1e-6.
        stall_timeout: Stops waiting for another process after this many seconds without a sign of life.
    """

    def __init__(
        self,
        *,
        engine: EngineSettings = EngineSettings(),
        sampling: SamplingSettings = SamplingSettings(),
        seed: int = 0,
        gpu_memory_utilization: float | None = None,
        questions_per_shard: int = 64,
        shard_by_shard: bool = False,
        stall_timeout: float = 600.0,
    ) -> None:
        engine.check_local()
        check_at_least(1, questions_per_shard=questions_per_shard)
        check_positive(stall_timeout=stall_timeout)
        self.sampling = sampling
        further = dict(engine.engine_args)
        if MEMORY in further:
            raise InputError(f"`engine_args` must not hold `{MEMORY}`, which is an option of SSCGeneration.")
        if gpu_memory_utilization is not None:
            if engine.name == "transformers":
                raise InputError(f"`{MEMORY}` {gpu_memory_utilization} is for vLLM, but the engine is transformers.")
            if not 0.0 < gpu_memory_utilization <= 1.0:
                raise InputError(f"`{MEMORY}` must lie in (0, 1], but got {gpu_memory_utilization}.")
            further[MEMORY] = gpu_memory_utilization
        self.engine = replace(engine, engine_args=further).of()
        self.seed = seed
        self.questions_per_shard, self.shard_by_shard = questions_per_shard, shard_by_shard
        self.stall_timeout = stall_timeout
        self._meetings: Path | None = None
        self._interrupt: Interrupt = never
        self._resumed: ResumedAt | None = None
        self._unreported: list[int] = []
        self._reported: int | None = None
        self._training: str | None = None  # digest of the training, where later rounds are sampled
        self._resumed_training: str | None = None

    def plan_run(self, verb: str, trainer: Trainer, module: ConfidenceModel, data: Any) -> Plan:
        data = needed_data(data, who="SSCGeneration", remedy="use SSCDataModule")
        self._check_module(module, data)
        if self.engine.name == "vllm":
            check_installed("vllm", extra="vllm")
        splits = [split for split in data.splits(verb) if data.sources[split]]
        if not splits:
            return Plan(notes=(f"No sources of questions are configured: the samples in {data.store_dir} are used.",))
        known = data.known_questions(verb)
        limits = [source.limit for split in splits for source in data.sources[split]]
        sampling = plan_sampling(
            data.store_dir,
            None if known is None else {question.id for split in splits for question in known[split]},
            num_samples=data.num_samples,
            most_tokens=self.sampling.max_new_tokens,
            most_questions=None if None in limits else sum(limits),
        )
        notes: tuple[str, ...] = ()
        every, epochs = data.regenerate_every_n_epochs, trainer.max_epochs
        if every is not None and epochs not in (None, -1) and (later := math.ceil(epochs / every) - 1):
            notes = (f"Rounds that sample the training questions again, as many responses each: {later}.",)
        return Plan(sampling=(sampling,), places=(Place("samples", data.store_dir),), notes=notes)

    def _check_module(self, module: object, data: StoredDataModule) -> None:
        """Refuse a module that does not say what is sampled from; later rounds need one that trains the generator."""
        kind = ScoringModule if data.regenerate_every_n_epochs is None else ConfidenceModel
        check_defines(module, kind, who="SSCGeneration")

    def state_dict(self) -> dict[str, Any]:
        return {"training": self._training}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_training = state_dict.get("training")

    def setup(self, trainer: Trainer, pl_module: ConfidenceModel, stage: str) -> None:
        """Sample what is missing of the splits that ``stage`` reads, in round 0."""
        data = _data(trainer)
        self._check_module(pl_module, data)
        check_place(Path(data.store_dir))
        pl_module.check_support()  # before the long work; the model itself is built after it
        # What others would refuse in their own `setup`, which comes after this one has sampled.
        for one in callbacks_of(trainer):
            if one is not self and isinstance(one, Participant):
                one.plan_run(stage, trainer, pl_module, data)
        names = data.splits(stage)
        splits = {name: questions for name in names if (questions := data.questions(cast("Split", name)))}
        self._resumed, self._unreported, self._reported = None, [], None
        if stage == "fit" and data.regenerate_every_n_epochs is not None:
            check_can_regenerate(trainer, pl_module, self.engine, has_questions="train" in splits)
            self._unreported = [0]
        if not splits:
            _say(trainer, f"no question sources are configured; the samples in {data.store_dir} are used.")
            return
        token = trainer.strategy.broadcast(uuid.uuid4().hex)  # the last collective before the long work
        self._meetings = Path(data.store_dir) / "meetings" / token
        self._interrupt = interrupt_of(trainer, stage)
        meeting = self._meeting(trainer, "round-000")
        with meeting.working():
            self._fill(trainer, pl_module, splits, interrupt=meeting.check)
        self._join(trainer, meeting, splits)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: ConfidenceModel, checkpoint: dict[str, Any]) -> None:
        """Record where training resumes: its loop knows it only after the loaders are built."""
        self._resumed, self._unreported = resumed_at(checkpoint), []

    def on_fit_start(self, trainer: Trainer, pl_module: ConfidenceModel) -> None:
        """Complete the round that a resumed run continues with, if it was killed before or during its sampling."""
        place = self._resumed
        if _data(trainer).regenerate_every_n_epochs is None:
            return
        self._training = training_digest(trainer, pl_module, round=None)
        if place is None:
            return
        if self._resumed_training not in (None, self._training):
            raise InputError(
                "The checkpoint is of a training with other settings or questions, and its generation rounds would go "
                "on. Restore those, or start without `ckpt_path` and with another `dirpath` of ModelCheckpoint."
            )
        if not is_over(trainer, epochs=place.epoch, steps=place.global_step):
            self._regenerate(trainer, pl_module, place)

    def on_train_start(self, trainer: Trainer, pl_module: ConfidenceModel) -> None:
        """Log the round that training begins with, and refuse later ones of another training."""
        data = _data(trainer)
        if data.regenerate_every_n_epochs is not None:
            for folder in sorted(rounds.adapter_folder(data.store_dir, 0).parent.glob("round-[0-9][0-9][0-9]")):
                round = int(folder.name.removeprefix("round-"))
                if round > data.round_of(trainer.current_epoch):
                    rounds.check_same_training(folder, round, training_digest(trainer, pl_module, round=round))
        self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: ConfidenceModel) -> None:
        """Sample the round of the next epoch where a new one begins with it."""
        data, following = _data(trainer), trainer.current_epoch + 1
        if data.round_of(following) == data.round_of(trainer.current_epoch):
            return
        if is_over(trainer, epochs=following, steps=trainer.global_step):
            return
        # First the checkpoints of this epoch's end: a run that continues from the one below does not reach it again.
        for checkpoint in trainer.checkpoint_callbacks:
            checkpoint.on_train_epoch_end(trainer, pl_module)
        folder = rounds.adapter_folder(data.store_dir, data.round_of(following))
        if not trainer.strategy.broadcast(folder.exists()):
            trainer.save_checkpoint(folder.with_suffix(".ckpt"))
        # Where `ckpt_path: last` finds it: under "last..." in the folder of a ModelCheckpoint.
        folders = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        if folders and folders[0]:
            trainer.save_checkpoint(f"{folders[0]}/{ModelCheckpoint.CHECKPOINT_NAME_LAST}-round.ckpt")
        self._regenerate(trainer, pl_module, ResumedAt(following, True, trainer.global_step))
        self._report(trainer)

    def teardown(self, trainer: Trainer, pl_module: ConfidenceModel, stage: str) -> None:
        if self._meetings is not None and trainer.is_global_zero:
            shutil.rmtree(self._meetings, ignore_errors=True)
        self._meetings = None

    def _meeting(self, trainer: Trainer, name: str) -> Rendezvous:
        """Return where all processes wait for each other's part of the work ``name``, without a collective."""
        return Rendezvous(
            cast("Path", self._meetings) / name,  # set in `setup`, before anything is sampled
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            stall_timeout=self.stall_timeout,
            interrupt=self._interrupt,
        )

    def _regenerate(self, trainer: Trainer, module: ConfidenceModel, place: ResumedAt) -> None:
        """Sample what is missing of the round that ``place`` is trained on, with the adapter kept for it."""
        data = _data(trainer)
        round = data.round_of(place.epoch)
        folder = rounds.adapter_folder(data.store_dir, round)
        # In the middle of an epoch the adapter must be there; where it is not, the loader names the missing round.
        if round == 0 or not (place.at_start or trainer.strategy.broadcast(folder.exists())):
            return
        splits = {"train": data.questions("train")}
        digest = training_digest(trainer, module, round=round)
        with self._meeting(trainer, f"round-{round:03d}-adapter").together():
            if trainer.is_global_zero and place.at_start:
                rounds.keep_adapter(module, data.store_dir, round=round, training=digest)
        meeting = self._meeting(trainer, f"round-{round:03d}")
        with meeting.working(), rounds.serving(module, folder):
            self._fill(trainer, module, splits, round=round, interrupt=meeting.check)
        self._join(trainer, meeting, splits, round=round)
        if place.at_start and round != self._reported:
            self._unreported.append(round)

    def _report(self, trainer: Trainer) -> None:
        """Log the rounds of the training questions as ``round/...`` and say them."""
        data = _data(trainer)
        settings = {"raw": data.p_true == "raw", "drop_none": data.drop_none}
        for round in self._unreported:
            self._reported = round
            if not trainer.is_global_zero:
                continue
            later = _index(data, round)
            values = {"Number": float(round), **rounds.describe_round(later, **settings)}
            if round > 0:
                both = (rounds.question_targets(index, **settings) for index in (_index(data, round - 1), later))
                values |= rounds.describe_shift(*both)
            for logger in trainer.loggers:
                logger.log_metrics({f"round/{name}": value for name, value in values.items()}, step=trainer.global_step)
            told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            say(f"SSCGeneration: round {round}: {told}")
        self._unreported = []

    def _fill(
        self, trainer: Trainer, module: ConfidenceModel, splits: Splits, *, interrupt: Interrupt, round: int = 0
    ) -> None:
        """Sample this process's share of every split. The engine is started only where something is missing."""
        data, shard = _data(trainer), (trainer.global_rank, trainer.world_size)
        model = resolve_model(module.base_model)
        chat = ChatFormat(load_tokenizer(model, revision=module.revision), query=module.query, prompt=module.prompt)
        adapter = str(rounds.adapter_folder(data.store_dir, round)) if round else None
        asked: dict[str, Any] = {
            "chat": chat, "sampling": self.sampling, "seed": self.seed, "num_samples": data.num_samples,
            "round": round, "shard": shard,
        }  # fmt: skip
        if sampler.is_complete(
            data.store_dir,
            splits,
            model=model,
            revision=module.revision,
            adapter=adapter,
            quantization=module.memory.quantization if round else None,  # only later rounds run the trainer's own model
            **asked,
        ):
            total = sum(map(len, splits.values()))
            mine = sum(len(sampler.select_share(questions, shard)) for questions in splits.values())
            whose = "all" if shard[1] == 1 else f"process {shard[0]}'s {mine:,} of"
            reused = f"samples of {whose} {total:,} questions are reused from {data.store_dir}."
            say(f"SSCGeneration: round {round}, {reused}")
            return
        engine = self._start(trainer, module, chat, adapter)
        try:
            if round:
                difference = self._check_engine(engine, trainer, module, chat, round)
                say(f"SSCGeneration: round {round}, process {shard[0]}: the engine differs by {difference:.2g} nats.")
            for split, questions in splits.items():
                _say(trainer, f"round {round}, {split}, {data.num_samples} samples a question, into {data.store_dir}")
                report = sampler.generate_samples(
                    questions,
                    data.store_dir,
                    split=split,
                    engine=engine,
                    questions_per_shard=self.questions_per_shard,
                    shard_by_shard=self.shard_by_shard,
                    progress=trainer.is_global_zero,
                    interrupt=interrupt,
                    **asked,
                )
                say(f"SSCGeneration: {split}, process {shard[0]} of {shard[1]}: {report}")
                report.check_complete()
        finally:
            engine.close()
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _start(self, trainer: Trainer, module: ConfidenceModel, chat: ChatFormat, adapter: str | None) -> Engine:
        """Start the engine on the base model, or next to the trainer with ``adapter``."""
        options = replace(self.engine, revision=module.revision)
        place = EnginePlace(trainer.strategy.root_device, trainer.local_rank, trainer.num_devices)
        if adapter is None:
            return start_engine(options, module.base_model, chat, place=place)
        return start_round_engine(options, module, chat, adapter=adapter, place=place)

    def _check_engine(
        self, engine: Engine, trainer: Trainer, module: ConfidenceModel, chat: ChatFormat, round: int
    ) -> float:
        data, index = _data(trainer), _index(_data(trainer), round - 1)
        questions = data.questions("train")
        mine = sampler.select_share(questions, (trainer.global_rank, trainer.world_size)) or questions
        names = [question.id for question in mine][:CHECKED_QUESTIONS]
        rows = np.flatnonzero(np.isin(index.question_id.astype(str), names) & (index.sample_index < CHECKED_SAMPLES))
        store = SampleStore(data.store_dir, num_samples=data.num_samples)
        probes = rounds.make_probes(store.read_rows(index.locate(rows)), chat, max_length=engine.max_context)
        before = rounds.adapter_folder(data.store_dir, round - 1)
        earlier = rounds.serving(module, before) if round > 1 and before.exists() else None
        return rounds.check_adapter(engine, module.model, probes, earlier=earlier)

    def _join(self, trainer: Trainer, meeting: Rendezvous, splits: Splits, *, round: int = 0) -> None:
        """Wait for the shares of all processes, and show them to readers."""
        store = SampleStore(_data(trainer).store_dir)
        wanted = {question.id for questions in splits.values() for question in questions}
        wait_for_shares(meeting, store, wanted, round=round)
        joined, seen = (self._meeting(trainer, f"round-{round:03d}-{name}") for name in ("joined", "seen"))
        join_shares(joined, seen, store, wanted, round=round)
        manifest = store.manifest
        _say(trainer, f"{store.path} holds {manifest.questions:,} questions, {manifest.rows:,} rows.")


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        say(f"SSCGeneration: {text}")
