"""Later rounds of ``SSCGeneration``: when one is due, whose it is, and what is told about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.errors import InputError
from selfcal_lightning.generation.rounds.adapters import adapter_folder, check_same_training, serving
from selfcal_lightning.generation.rounds.drift import describe_round, describe_shift, question_targets
from selfcal_lightning.generation.rounds.engine_check import check_adapter, make_probes
from selfcal_lightning.generation.shares import select_share
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.training.lightning_internals import decides_at_epoch_end
from selfcal_lightning.training.sampled_data import QuestionData, question_data
from selfcal_lightning.training.support import way_of
from selfcal_lightning.training.trained_modules import RoundModule

TRAINER_SETTINGS = ("gradient_clip_val", "gradient_clip_algorithm", "precision")
CHECKED_QUESTIONS, CHECKED_SAMPLES = 6, 2


@dataclass(frozen=True, slots=True)
class ResumedAt:
    """Where a checkpoint goes on.

    Attributes:
        epoch: The epoch whose batches come next.
        at_start: Whether none of them has been trained on, so that the weights are those that a round of this epoch is
            sampled with.
        global_step: Optimiser steps taken.
    """

    epoch: int
    at_start: bool
    global_step: int


def resumed_at(checkpoint: Mapping[str, Any]) -> ResumedAt:
    """Return where training goes on from a checkpoint of Lightning's Trainer.

    Counted are epochs begun and epochs completed. Checkpoints written between the last batch of an epoch and its end
    (after a validation, in ``on_train_epoch_end``) count it as begun and not as completed.

    Args:
        checkpoint: As handed to ``Callback.on_load_checkpoint``.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    completed, step = epochs["completed"], checkpoint["global_step"]
    if epochs["started"] == completed:
        return ResumedAt(completed, True, step)
    if batches["is_last_batch"]:
        return ResumedAt(completed + 1, True, step)
    return ResumedAt(completed, batches["current"]["ready"] == 0, step)


def is_over(trainer: Trainer, *, epochs: int, steps: int) -> bool:
    """Return, between two epochs, whether training stops now, so that another round would not be read.

    Args:
        trainer: The trainer.
        epochs: Epochs that are done.
        steps: Optimiser steps that are done.
    """
    if trainer.received_sigterm or (trainer.max_steps != -1 and steps >= trainer.max_steps):
        return True
    if trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs:
        return True
    return trainer.should_stop and epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)


def last_checkpoint_files(trainer: Trainer) -> list[str]:
    """Return where the checkpoint of a round has to lie so that ``ckpt_path: last`` finds it.

    Lightning looks for names that begin with "last" in the folders of its ModelCheckpoints and takes the newest. Theirs
    need not begin so.
    """
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [f"{folder}/{ModelCheckpoint.CHECKPOINT_NAME_LAST}-round.ckpt" for folder in folders[:1] if folder]


def check_can_regenerate(
    trainer: Trainer, module: RoundModule, *, has_questions: bool, engine: str, dtype: str
) -> None:
    """Raise ValueError, before any sampling, for what later rounds do not work with.

    Args:
        trainer: The trainer.
        module: The module; its model need not be there.
        has_questions: Whether the data module has training questions.
        engine: Name of the engine.
        dtype: What it is asked to run in.
    """
    if not has_questions:
        raise InputError(
            "Expected `train` sources in the data module with `regenerate_every_n_epochs`, but got none: later rounds "
            "ask the questions again. Name the sources, or leave `regenerate_every_n_epochs` out."
        )
    if module.lora is None:
        raise InputError(
            "Expected `lora` settings with `regenerate_every_n_epochs`, but got None: every round keeps the adapter "
            "that it was sampled with, and there is none when all weights are trained. Set `lora`, or leave "
            "`regenerate_every_n_epochs` out."
        )
    if module.activated:
        raise InputError(
            "Expected joint training with `regenerate_every_n_epochs`, but got an activated adapter: it leaves the "
            "generator as it is, so that a later round would be of the same model as the first. Leave "
            "`regenerate_every_n_epochs` out, or set `lora.activated: false`."
        )
    if way_of(trainer.strategy) == "FSDP2":
        raise InputError(
            "Expected a whole model in every process with `regenerate_every_n_epochs`, but got a strategy that cuts it "
            "over processes (FSDP2): none could sample, or check the engine. Use the strategy auto or ddp, or leave "
            "`regenerate_every_n_epochs` out."
        )
    _check_quantized_engine(trainer, module, engine=engine, dtype=dtype)
    for callback in trainer.callbacks:
        _check_stops_in_time(trainer, callback)


def _check_quantized_engine(trainer: Trainer, module: RoundModule, *, engine: str, dtype: str) -> None:
    """Refuse an engine that would load the base model unquantised: its samples would be of another model."""
    if module.quantization is None:
        return
    own = module.torch_dtype
    if own == "auto":
        own = "float32" if trainer.strategy.root_device.type == "cpu" else "bfloat16"
    if engine != "transformers" or dtype not in ("auto", own):
        raise InputError(
            f"Expected `engine: transformers` with `dtype: auto` (or {own}) for later rounds with `quantization` "
            f"{module.quantization!r}, but got {engine} with {dtype}: it would serve the base model as it is stored, "
            "not the one that is trained. Set them so, or leave `regenerate_every_n_epochs` out."
        )


def _check_stops_in_time(trainer: Trainer, callback: Callback) -> None:
    """Refuse a callback that would stop training only after the next round has been sampled in vain."""
    if isinstance(callback, EarlyStopping):
        way_out = "Set its `check_on_train_epoch_end: false`: it then checks after every validation."
    elif isinstance(callback, Timer):
        way_out = "Set its `interval: step`, or `trainer.max_time`."
    else:
        return
    if decides_at_epoch_end(trainer, callback):
        raise InputError(
            f"Expected {type(callback).__name__} to decide before an epoch ends with `regenerate_every_n_epochs`, but "
            f"got one that decides at its end, after the next round has been sampled. {way_out}"
        )


def check_engine(
    engine: Engine,
    trainer: Trainer,
    module: RoundModule,
    chat: ChatFormat,
    *,
    round: int,
    shard: tuple[int, int],
) -> float:
    """Hold the engine of ``round`` against the trainer's model, on responses of the round before.

    Returns:
        The mean absolute difference of log-probability, in nats; see ``pipelines.adapter_check``.

    Args:
        engine: Who is to sample.
        trainer: Whose data module has the questions.
        module: The module, its model in evaluation mode and holding the adapter of the round.
        chat: Renders prompts and the confidence query.
        round: The round to come.
        shard: (i, n), this process's share; its own questions are taken, if it has any.
    """
    data = _data_module(trainer)
    index = _index(data, round - 1)
    store = SampleStore(data.store_dir, num_samples=data.num_samples)
    questions = data.questions("train")
    names = [question.id for question in select_share(questions, shard) or questions][:CHECKED_QUESTIONS]
    rows = np.flatnonzero(np.isin(index.question_id.astype(str), names) & (index.sample_index < CHECKED_SAMPLES))
    probes = make_probes(store.read_rows(index.locate(rows)), chat, max_length=engine.max_context)
    before = adapter_folder(data.store_dir, round - 1)
    earlier = serving(module, before) if round > 1 and before.exists() else None
    return check_adapter(engine, module.model, probes, earlier=earlier)


def training_digest(trainer: Trainer, module: RoundModule, *, round: int | None) -> str:
    """Return a hash of what the weights at the beginning of ``round`` depend on, as far as settings say it.

    Args:
        trainer: The trainer.
        module: The module.
        round: The round; None leaves out how long the training is, so that a finished one may be given more epochs.
    """
    left_out = {"base_model", "revision", "recompute_above"}
    content = {
        "module": {name: value for name, value in module.hparams.items() if name not in left_out},
        "data": _data_module(trainer).training_settings(),
        "trainer": {name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        "steps": None if round is None else trainer.estimated_stepping_batches,
        "round": round,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def check_kept_adapters(trainer: Trainer, module: RoundModule) -> None:
    """Refuse, before training, a store whose later rounds belong to another training.

    Raises:
        ValueError: The adapter of a round that training has not reached yet is of a training with other settings.
    """
    data = _data_module(trainer)
    for folder in sorted(adapter_folder(data.store_dir, 0).parent.glob("round-[0-9][0-9][0-9]")):
        round = int(folder.name.removeprefix("round-"))
        if round > data.round_of(trainer.current_epoch):
            check_same_training(folder, round, training_digest(trainer, module, round=round))


def report_round(trainer: Trainer, round: int, *, step: int) -> dict[str, float]:
    """Describe ``round`` of the training questions, log it as ``round/...`` and say it; for one process."""
    data = _data_module(trainer)
    settings = {"raw": data.p_true == "raw", "drop_none": data.drop_none}
    later = _index(data, round)
    values = {"Number": float(round), **describe_round(later, **settings)}
    if round > 0:
        earlier = _index(data, round - 1)
        values |= describe_shift(question_targets(earlier, **settings), question_targets(later, **settings))
    named = {f"round/{name}": value for name, value in values.items()}
    for logger in trainer.loggers:
        logger.log_metrics(named, step=step)
    told = ", ".join(f"{name.removeprefix('round/')} {value:.4g}" for name, value in named.items())
    say(f"SSCGeneration: round {round}: {told}")
    return named


def _data_module(trainer: Trainer) -> QuestionData:
    return question_data(trainer.datamodule, who="SSCGeneration")


def _index(data: QuestionData, round: int) -> SampleIndex:
    """Return the rows of the training questions in ``round``."""
    index = SampleStore(data.store_dir, num_samples=data.num_samples).index(split="train", round=round)
    wanted = {question.id for question in data.questions("train")}
    return index.select(np.array([name in wanted for name in index.question_id], dtype=bool))
