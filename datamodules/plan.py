"""What a run of the Trainer will read, counted and checked from the settings: no store is opened, no hub is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import Plan, QuestionCount, Training
from selfcal_lightning.data.tasks.registry import check_source, count_source, get_task
from selfcal_lightning.datamodules.checks import check_agreement, check_reload, check_trainer
from selfcal_lightning.datamodules.questions import QuestionSource, task_shares
from selfcal_lightning.datamodules.ssc.sampler import limited_batches, steps_per_epoch
from selfcal_lightning.datamodules.ssc.tuples import rows_per_step
from selfcal_lightning.models.names import is_on_disk
from selfcal_lightning.records import Question

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from selfcal_lightning.datamodules.ssc.mixture import Mixture
    from selfcal_lightning.datamodules.ssc.stored_data import StoredDataModule

PROMPTS_TRIED = 8


def splits_of(verb: str, predict_split: str) -> tuple[str, ...]:
    """Return the splits that a verb of the Trainer reads.

    Example:
        >>> splits_of("fit", "test"), splits_of("predict", "test")
        (('train', 'validation'), ('test',))
    """
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
    mixture = data.mixture(task_shares(data.sources["train"]))
    return Plan(
        questions=counts,
        training=(plan_training(mixture, batch_size=data.batch_size, most_tokens=data.max_length, trainer=trainer),),
    )


def check_data(data: StoredDataModule, verb: str, trainer: Trainer) -> None:
    """Refuse sources that there are not, and a trainer that would deal rows otherwise; see :func:`plan_data`."""
    check_sources(data.sources.values())
    check_trainer(trainer)
    if verb == "fit":
        check_agreement(data.num_samples, data.row_target)
        check_reload(trainer, data.regenerate_every_n_epochs)


def check_room(data: StoredDataModule, verb: str) -> None:
    """Refuse a ``max_length`` that no question fits, prompt and confidence query and one token of a response.

    Only the shortest prompts are encoded; those that do not fit while others do are dropped with a count later.
    """
    chat = data.collator().chat
    if chat is None:  # rows are written for another model, and what does not fit is counted when it is read
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


def check_sources(splits: Iterable[Sequence[QuestionSource]]) -> None:
    """Refuse a task, a split or a file that there is not, in the sources of any split."""
    for source in chain.from_iterable(splits):
        check_source(source, source.task)


def are_local(splits: Iterable[Sequence[QuestionSource]]) -> bool:
    """Return whether the questions of all splits can be had without the hub."""
    return not any(get_task(source.task).is_remote(path=source.path) for source in chain.from_iterable(splits))


def count_sources(
    sources: Mapping[str, Sequence[QuestionSource]],
    splits: Sequence[str],
    known: Mapping[str, Sequence[Question]] | None,
) -> tuple[QuestionCount, ...]:
    """Return how many questions there are, by split and task."""
    counts: list[QuestionCount] = []
    for split in splits:
        if known is not None:
            rows = [QuestionCount(split, question.task, 1) for question in known[split]]
        else:
            rows = [count_source(one, one.task, role=split) for one in sources[split]]
        counts += [_add([row for row in rows if row.task == task]) for task in dict.fromkeys(row.task for row in rows)]
    return tuple(counts)


def plan_training(mixture: Mixture, *, batch_size: int, most_tokens: int, trainer: Trainer) -> Training:
    """Return the optimiser steps of a training."""
    rows = rows_per_step(batch_size, trainer)
    micro_steps = steps_per_epoch(mixture.rows_per_epoch, rows) * trainer.accumulate_grad_batches
    limited = limited_batches(micro_steps, trainer.limit_train_batches)
    each = math.ceil(limited / trainer.accumulate_grad_batches)
    epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
    planned = [each * epochs] if epochs is not None else []
    planned += [trainer.max_steps] if trainer.max_steps != -1 else []
    return Training(min(planned, default=each), rows, epochs, most_tokens)


def _add(rows: Sequence[QuestionCount]) -> QuestionCount:
    numbers = [row.number for row in rows]
    total = None if None in numbers else sum(number or 0 for number in numbers)
    return QuestionCount(rows[0].split, rows[0].task, total, is_limit=any(row.is_limit for row in rows))
