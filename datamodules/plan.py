"""Checks of a run, and counts of what it will read, from the settings: no store is opened, no hub is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import Plan, QuestionCount, Training
from selfcal_lightning.data.tasks.registry import check_source, count_source
from selfcal_lightning.datamodules.questions import QuestionSource, task_shares
from selfcal_lightning.datamodules.ssc.sampler import limited_batches, rows_per_step
from selfcal_lightning.models.folders import is_on_disk
from selfcal_lightning.records import Question
from selfcal_lightning.training.model_parallel import callbacks_of, deals_rows_anew

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from selfcal_lightning.datamodules.ssc.stored_data import StoredDataModule

PROMPTS_TRIED = 8


def splits_of(verb: str, predict_split: str) -> tuple[str, ...]:
    """Return the splits that a verb of the Trainer reads; only `predict` reads ``predict_split``."""
    return {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}.get(verb, (predict_split,))


def plan_data(data: StoredDataModule, verb: str, trainer: Trainer) -> Plan:
    """Check what needs no hub, and return the questions and the optimiser steps of a run."""
    check_data(data, verb, trainer)
    known = data.known_questions(verb)
    if known is not None and is_on_disk(data.base_model, revision=data.revision):
        check_room(data, verb)
    counts = count_sources(data.sources, splits_of(verb, data.predict_split), known)
    if verb != "fit" or not (data.fill or data.sources["train"]):
        return Plan(questions=counts)
    rows, accumulate = rows_per_step(data.batch_size, trainer), trainer.accumulate_grad_batches
    steps = math.ceil(data.mixture(task_shares(data.sources["train"])).rows_per_epoch / rows)
    each = math.ceil(limited_batches(steps * accumulate, trainer.limit_train_batches) / accumulate)
    planned, epochs = planned_steps(trainer, each)
    return Plan(questions=counts, training=(Training(planned, rows, epochs, data.max_length),))


def planned_steps(trainer: Trainer, each: int) -> tuple[int, int | None]:
    """Return the optimiser steps of a run with ``each`` an epoch, and its epochs; one epoch where nothing ends it."""
    epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
    planned = [each * epochs] if epochs is not None else []
    planned += [trainer.max_steps] if trainer.max_steps != -1 else []
    return min(planned, default=each), epochs


def check_data(data: StoredDataModule, verb: str, trainer: Trainer) -> None:
    """Refuse missing sources, and trainers that would change the rows of a step or keep the loader of an old round."""
    for source in chain.from_iterable(data.sources.values()):
        check_source(source, source.task)
    if deals_rows_anew(trainer):
        raise InputError(
            f"Set `trainer.use_distributed_sampler: false` (`use_distributed_sampler=False` with {trainer.world_size} "
            "processes): Lightning would redistribute the rows and repeat some."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise InputError("Remove the GradientAccumulationScheduler: optimiser steps are planned ahead.")
    if verb != "fit":
        return
    data.check_num_samples()
    # Every epoch, whatever the interval: after a resume Lightning counts reloads from the epoch that it resumed in.
    if data.regenerate_every_n_epochs is not None and (every := trainer.reload_dataloaders_every_n_epochs) != 1:  # type: ignore[attr-defined]
        raise InputError(
            "Set `trainer.reload_dataloaders_every_n_epochs: 1` with `regenerate_every_n_epochs`: with "
            f"{every}, training would go on with the rows of an earlier round."
        )


def check_room(data: StoredDataModule, verb: str) -> None:
    chat = data.collator().chat
    if chat is None:  # rows are written for another model; what does not fit is counted when it is read
        return
    query = len(chat.query.suffix_ids)
    for split in splits_of(verb, data.predict_split):
        shortest = sorted(data.questions(split), key=lambda one: sum(len(message.content) for message in one.messages))
        lengths = [len(chat.prompt_ids(question.messages)) for question in shortest[:PROMPTS_TRIED]]
        if lengths and min(lengths) + query + 1 > data.max_length:
            raise InputError(
                f"Raise `max_length` {data.max_length}: the shortest prompt of the split {split!r} takes "
                f"{min(lengths)} tokens and the query {query}, which leaves no room for a response."
            )


def count_sources(
    sources: Mapping[str, list[QuestionSource]], splits: Sequence[str], known: Mapping[str, list[Question]] | None
) -> tuple[QuestionCount, ...]:
    counts: list[QuestionCount] = []
    for split in splits:
        if known is not None:
            rows = [QuestionCount(split, question.task, 1) for question in known[split]]
        else:
            rows = [count_source(one, one.task, role=split) for one in sources[split]]
        for task in dict.fromkeys(row.task for row in rows):
            mine = [row for row in rows if row.task == task]
            numbers = [row.number for row in mine]
            total = None if None in numbers else sum(number or 0 for number in numbers)
            counts.append(QuestionCount(split, task, total, is_limit=any(row.is_limit for row in mine)))
    return tuple(counts)
