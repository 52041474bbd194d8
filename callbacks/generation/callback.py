"""Fill the sample store before it is read: by the base model at first, by the model in training in later rounds."""

from __future__ import annotations

import gc
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from selfcal_lightning.callbacks.generation.engines import MEMORY, Place, start_engine, start_round_engine
from selfcal_lightning.callbacks.generation.joining import join_shares, wait_for_shares
from selfcal_lightning.callbacks.generation.plan import check_generation_settings, plan_generation, splits_of
from selfcal_lightning.callbacks.generation.rounds import (
    ResumedAt,
    check_can_regenerate,
    check_engine,
    check_kept_adapters,
    is_over,
    last_checkpoint_files,
    report_round,
    resumed_at,
    training_digest,
)
from selfcal_lightning.callbacks.preemption import interrupt_of
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.generation.existing import is_complete, open_existing
from selfcal_lightning.generation.process_share import part_name
from selfcal_lightning.generation.rounds.adapters import adapter_folder, checkpoint_file, keep_adapter, serving
from selfcal_lightning.generation.sampler import generate_samples, store_fingerprint
from selfcal_lightning.generation.shares import select_share
from selfcal_lightning.model_files.locations import resolve_model
from selfcal_lightning.prompts.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.runtime.plan import Participant, Plan
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.runtime.rendezvous import Rendezvous
from selfcal_lightning.runtime.stop_signals import Interrupt, never
from selfcal_lightning.store.manifest import check_place
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.training.contracts import check_members
from selfcal_lightning.training.sampled_data import QuestionData, question_data
from selfcal_lightning.training.trained_modules import BasedModule, RoundModule

Splits = dict[str, list[Question]]


class SSCGeneration(Callback):
    """Samples round 0, the base model's responses with their P(True), where the store lacks it, and later rounds.

    Round 0 is sampled in ``setup``, before the module loads its weights, so that the engine has the GPU to itself.
    Questions, store folder and number of samples are read from the data module, model, revision and query from the
    module. Every process samples its own share of the questions; then they wait for each other. What the store holds
    is reused, also after a kill.

    Later rounds, where the data module asks for them (``regenerate_every_n_epochs``), are sampled at the end of an
    epoch with the adapter as it is then, of the training questions only. That adapter and a checkpoint of the trainer
    are written to ``adapters/`` in the store's folder before the first sample is drawn, and the checkpoint as
    ``last-round.ckpt`` beside those of a ``ModelCheckpoint``, where ``ckpt_path: last`` finds it; a run that is killed
    meanwhile and resumed, from there or from earlier on, completes the round with the adapter that lies there. An
    engine that does not serve it is refused before it samples. ``round/...`` logs what a round is like and how far its
    targets moved.

    Args:
        engine: Which engine, and how: transformers, or vllm (an extra), which runs in a process of its own on the
            trainer's GPU, whose compute mode must therefore be the default one, not an exclusive one. With
            ``tensor_parallel_size: 2`` among its ``engine_args`` process p of a machine samples with the GPUs 2p and
            2p + 1. In later rounds the transformers engine runs the trainer's own model where ``dtype`` is "auto" or
            the trainer's, and loads the base model once more for another.
        sampling: How responses are drawn.
        seed: Of sampling; every sample has its own, derived from it.
        gpu_memory_utilization: Share of the GPU's memory for vLLM; None is its default. In later rounds it is the most
            that is taken of what the trainer leaves free.
        questions_per_shard: Questions in one file of the store; what a kill can cost.
        shard_by_shard: Sample file after file. With the transformers engine on a CPU a killed run then ends with the
            samples of an unbroken one to the last bit of their confidences; otherwise texts are equal and confidences
            differ by about 1e-6. It costs speed at the end of every file.
        stall_timeout: Seconds without a sign of life from another process after which waiting for it ends.
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
        check_generation_settings(
            engine,
            gpu_memory_utilization=gpu_memory_utilization,
            questions_per_shard=questions_per_shard,
            stall_timeout=stall_timeout,
        )
        self.sampling = sampling
        further = dict(engine.engine_args)
        if MEMORY in further:
            raise InputError(f"Expected `engine_args` without `{MEMORY}`, which has an option of its own, but got it.")
        if gpu_memory_utilization is not None:
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

    def plan_run(self, verb: str, trainer: Trainer, module: RoundModule, data: object) -> Plan:
        """Refuse an engine that is not installed, and return how many responses are to be drawn."""
        checked = question_data(data, who=type(self).__name__)
        self._check_module(module, checked)
        return plan_generation(self, verb, trainer, checked)

    def _check_module(self, module: object, data: QuestionData) -> None:
        """Refuse a module that does not say what is sampled from; later rounds need one that trains the generator."""
        contract = BasedModule if data.regenerate_every_n_epochs is None else RoundModule
        check_members(module, contract, who=type(self).__name__, kind="a module")

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the training whose rounds these are."""
        return {"training": self._training}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note of which training the checkpoint is."""
        self._resumed_training = state_dict.get("training")

    def setup(self, trainer: Trainer, pl_module: RoundModule, stage: str) -> None:
        """Sample what is missing of the splits that ``stage`` reads, in round 0."""
        data = _data_module(trainer)
        self._check_module(pl_module, data)
        check_place(Path(data.store_dir))
        pl_module.check_support()  # before the long work; the model itself is built after it
        # What others would refuse in their own `setup`, which comes after this one has sampled.
        for one in trainer.callbacks:
            if one is not self and isinstance(one, Participant):
                one.plan_run(stage, trainer, pl_module, data)
        splits = {name: questions for name in splits_of(stage, data) if (questions := data.questions(name))}
        self._resumed, self._unreported, self._reported = None, [], None
        if stage == "fit" and data.regenerate_every_n_epochs is not None:
            check_can_regenerate(
                trainer, pl_module, has_questions="train" in splits, engine=self.engine.name, dtype=self.engine.dtype
            )
            self._unreported = [0]
        if not splits:
            _say(
                trainer, f"SSCGeneration: no question sources are configured; the samples in {data.store_dir} are used."
            )
            return
        token = trainer.strategy.broadcast(uuid.uuid4().hex)  # the last collective before the long work
        self._meetings = Path(data.store_dir) / "meetings" / token
        self._interrupt = interrupt_of(trainer, stage)
        meeting = self._meeting(trainer, "round-000")
        with meeting.working():
            self._fill(trainer, pl_module, splits, interrupt=meeting.check)
        self._join(trainer, meeting, splits)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: RoundModule, checkpoint: dict[str, Any]) -> None:
        """Note where training goes on: its loop knows it only after the loaders are built."""
        self._resumed, self._unreported = resumed_at(checkpoint), []

    def on_fit_start(self, trainer: Trainer, pl_module: RoundModule) -> None:
        """Complete the round that a resumed run goes on with, if it was killed before or while that was sampled."""
        place = self._resumed
        if _data_module(trainer).regenerate_every_n_epochs is None:
            return
        self._training = training_digest(trainer, pl_module, round=None)
        if place is None:
            return
        if self._resumed_training not in (None, self._training):
            raise InputError(
                "Expected a checkpoint of this training, since its generation rounds go on, but got one of a training "
                "with other settings or questions. Go back to those, or start without `ckpt_path` and with another "
                "`dirpath` of ModelCheckpoint."
            )
        if not is_over(trainer, epochs=place.epoch, steps=place.global_step):
            self._regenerate(trainer, pl_module, place)

    def on_train_start(self, trainer: Trainer, pl_module: RoundModule) -> None:
        """Log the round that training begins with, and refuse later ones that are of another training."""
        if _data_module(trainer).regenerate_every_n_epochs is not None:
            check_kept_adapters(trainer, pl_module)
        self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: RoundModule) -> None:
        """Sample the round of the next epoch where a new one begins with it."""
        data, following = _data_module(trainer), trainer.current_epoch + 1
        if data.round_of(following) == data.round_of(trainer.current_epoch):
            return
        if is_over(trainer, epochs=following, steps=trainer.global_step):
            return
        # First the checkpoints of this epoch's end: a run that goes on from the one below does not reach it again.
        for checkpoint in trainer.checkpoint_callbacks:
            checkpoint.on_train_epoch_end(trainer, pl_module)
        folder = adapter_folder(data.store_dir, data.round_of(following))
        if not trainer.strategy.broadcast(folder.exists()):
            trainer.save_checkpoint(checkpoint_file(data.store_dir, data.round_of(following)))
        for last in last_checkpoint_files(trainer):
            trainer.save_checkpoint(last)
        self._regenerate(trainer, pl_module, ResumedAt(following, True, trainer.global_step))
        self._report(trainer)

    def teardown(self, trainer: Trainer, pl_module: RoundModule, stage: str) -> None:
        """Remove the files that the processes waited by."""
        if self._meetings is not None and trainer.is_global_zero:
            shutil.rmtree(self._meetings, ignore_errors=True)
        self._meetings = None

    def _meeting(self, trainer: Trainer, name: str) -> Rendezvous:
        """Return where all processes wait for each other's part of the work ``name``, without a collective."""
        return Rendezvous(
            self._meetings / name,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            stall_timeout=self.stall_timeout,
            interrupt=self._interrupt,
        )

    def _regenerate(self, trainer: Trainer, module: RoundModule, place: ResumedAt) -> None:
        """Sample what is missing of the round that ``place`` is trained on, with the adapter kept for it.

        In the middle of an epoch the adapter must be there; where it is not, the loader names the missing round.
        """
        data = _data_module(trainer)
        round = data.round_of(place.epoch)
        folder = adapter_folder(data.store_dir, round)
        if round == 0 or not (place.at_start or trainer.strategy.broadcast(folder.exists())):
            return
        splits = {"train": data.questions("train")}
        digest = training_digest(trainer, module, round=round)
        with self._meeting(trainer, f"round-{round:03d}-adapter").together():
            if trainer.is_global_zero and place.at_start:
                keep_adapter(module, data.store_dir, round=round, training=digest)
        meeting = self._meeting(trainer, f"round-{round:03d}")
        with meeting.working(), serving(module, folder):
            self._fill(trainer, module, splits, round=round, interrupt=meeting.check)
        self._join(trainer, meeting, splits, round=round)
        if place.at_start and round != self._reported:
            self._unreported.append(round)

    def _report(self, trainer: Trainer) -> None:
        """Log the rounds that were sampled since the last report."""
        for round in self._unreported:
            self._reported = round
            if trainer.is_global_zero:
                report_round(trainer, round, step=trainer.global_step)
        self._unreported = []

    def _fill(
        self,
        trainer: Trainer,
        module: RoundModule,
        splits: Splits,
        *,
        interrupt: Interrupt,
        round: int = 0,
    ) -> None:
        """Sample this process's share of every split. The engine is started only where something is missing."""
        data, shard = _data_module(trainer), (trainer.global_rank, trainer.world_size)
        model = resolve_model(module.base_model)
        chat = ChatFormat(load_tokenizer(model, revision=module.revision), query=module.query, prompt=module.prompt)
        adapter = str(adapter_folder(data.store_dir, round)) if round else None
        existing = open_existing(
            data.store_dir,
            model=model,
            revision=module.revision,
            chat=chat,
            sampling=self.sampling,
            seed=self.seed,
            num_samples=data.num_samples,
            adapter=adapter,
            quantization=module.quantization if round else None,  # only later rounds run the trainer's own model
            round=round,
            splits=splits,
        )
        if is_complete(existing, splits, shard=shard, round=round):
            total = sum(map(len, splits.values()))
            mine = sum(len(select_share(questions, shard)) for questions in splits.values())
            whose = "all" if shard[1] == 1 else f"process {shard[0]}'s {mine:,} of"
            reused = f"samples of {whose} {total:,} questions are reused from {data.store_dir}"
            say(f"SSCGeneration: round {round}, {reused}.")
            return
        engine = self._start(trainer, module, chat, adapter)
        try:
            if round:
                difference = check_engine(engine, trainer, module, chat, round=round, shard=shard)
                say(f"SSCGeneration: round {round}, process {shard[0]}: the engine differs by {difference:.2g} nats.")
            store = SampleStore.create_or_open(
                data.store_dir,
                store_fingerprint(engine, chat, self.sampling, self.seed),
                num_samples=data.num_samples,
                engine=engine.describe(),
                round=round,
                splits=splits,
            )
            for split, questions in splits.items():
                _say(
                    trainer,
                    f"SSCGeneration: round {round}, {split}, {data.num_samples} samples a question, into "
                    f"{data.store_dir}",
                )
                report = generate_samples(
                    questions,
                    split=split,
                    engine=engine,
                    chat=chat,
                    store=store,
                    num_samples=data.num_samples,
                    sampling=self.sampling,
                    seed=self.seed,
                    round=round,
                    part=part_name(shard),
                    shard=shard,
                    questions_per_shard=self.questions_per_shard,
                    shard_by_shard=self.shard_by_shard,
                    progress=trainer.is_global_zero,
                    interrupt=interrupt,
                )
                say(f"SSCGeneration: {split}, process {shard[0]} of {shard[1]}: {report}")
                report.check_complete()
        finally:
            engine.close()
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _start(self, trainer: Trainer, module: RoundModule, chat: ChatFormat, adapter: str | None) -> Engine:
        """Start the engine on this process's device: over the base model, or beside the trainer with ``adapter``."""
        options = replace(self.engine, revision=module.revision)
        place = Place(trainer.strategy.root_device, trainer.local_rank, trainer.num_devices)
        if adapter is None:
            return start_engine(options, module.base_model, chat, place=place)
        return start_round_engine(options, module, chat, adapter=adapter, place=place)

    def _join(self, trainer: Trainer, meeting: Rendezvous, splits: Splits, *, round: int = 0) -> None:
        """Wait for the shares of all processes, and show them to readers."""
        store = SampleStore(_data_module(trainer).store_dir)
        wanted = {question.id for questions in splits.values() for question in questions}
        wait_for_shares(meeting, store, wanted, round=round)
        meetings = (self._meeting(trainer, f"round-{round:03d}-{name}") for name in ("joined", "seen"))
        join_shares(*meetings, store, wanted, round=round)
        manifest = store.manifest
        _say(
            trainer,
            f"SSCGeneration: {store.path} holds {manifest.questions:,} questions, {manifest.rows:,} rows.",
        )


def _data_module(trainer: Trainer) -> QuestionData:
    return question_data(trainer.datamodule, who=SSCGeneration.__name__)


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        say(text)
