"""What the rounds of an adaptation were like, held against gold answers afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.rewards import majority, majority_answer, reward_quality
from selfcal_lightning.records import Question, QuestionSamples
from selfcal_lightning.store.columns import counted_samples
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.registry import get_task


def round_labels(store_dir: str | Path, questions: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """Return, by round, what gold answers say of the responses and of their majority.

    - ``pass@1``: share of right responses;
    - ``label_accuracy``: share of questions whose majority is right;
    - ``reward_accuracy``: share of responses that give the majority's answer exactly where they are right: high where
      wrong answers scatter, even if the majority is wrong;
    - ``tokens``: of all responses.

    Args:
        store_dir: The store of the rounds; what it holds of other questions does not count.
        questions: The questions with their gold answers; without one they are left out of all but the tokens.
    """
    store = SampleStore(store_dir)
    found = {}
    for round in sorted(store.manifest.rounds):
        entries = list(counted_samples(store, rows_of(store, questions, round=round), round=round))
        rewards: list[float | None] = []
        right: list[bool | None] = []
        labels: list[bool] = []
        for entry, verdicts in _judged(entries, questions):
            answers = [sample.answer for sample in entry.samples]
            rewards += majority(answers)
            right += [verdicts[answer] for answer in answers]
            label = majority_answer(answers)
            labels.append(label is not None and verdicts[label])
        known = [verdict for verdict in right if verdict is not None]
        found[str(round)] = {
            "pass@1": sum(known) / len(known) if known else None,
            "label_accuracy": sum(labels) / len(labels) if labels else None,
            "reward_accuracy": reward_quality(rewards, right).reward_accuracy,
            "tokens": sum(sample.num_tokens or 0 for entry in entries for sample in entry.samples),
        }
    return found


def cost_in_samples(
    store_dir: str | Path, questions: Sequence[Question], rounds: Mapping[str, Mapping[str, Any]]
) -> int:
    """Return how many responses to each question the base model gives for the tokens of all rounds.

    Args:
        store_dir: The store of the rounds.
        questions: The questions.
        rounds: What :func:`round_labels` says of them.
    """
    store = SampleStore(store_dir)
    lengths = rows_of(store, questions, round=0).num_tokens.clip(min=1)
    return (
        round(sum(row["tokens"] for row in rounds.values()) / (lengths.mean() * len(questions))) if len(lengths) else 0
    )


def rows_of(store: SampleStore, questions: Sequence[Question], *, round: int) -> SampleIndex:
    """Return the columns of a round that belong to some questions."""
    index, names = store.index(split="train", round=round), {question.id for question in questions}
    return index.select(np.array([name in names for name in index.question_id], dtype=bool))


def round_accuracy(store_dir: str | Path, questions: Sequence[Question], *, round: int) -> Floats:
    """Return the share of right responses to each question in a round, [Q], in the order of their ids.

    Args:
        store_dir: The store of the rounds.
        questions: The questions with their gold answers; without one they are left out.
        round: The round.
    """
    store = SampleStore(store_dir)
    entries = sorted(
        counted_samples(store, store.index(split="train", round=round), round=round), key=lambda one: one.question.id
    )
    shares = [
        sum(verdicts[sample.answer] for sample in entry.samples) / len(entry.samples)
        for entry, verdicts in _judged(entries, questions)
    ]
    return np.array(shares, dtype=np.float64)


def _judged(
    entries: Sequence[QuestionSamples], questions: Sequence[Question]
) -> Iterator[tuple[QuestionSamples, Mapping[str | None, bool]]]:
    """Yield the questions that have a gold answer, with whether each answer to them is right."""
    gold = {question.id: question for question in questions if question.reference is not None}
    for entry in entries:
        if (question := gold.get(entry.question.id)) is not None:
            task, answers = get_task(question.task), {sample.answer for sample in entry.samples}
            yield entry, {answer: task.verify(answer, question.reference or "") for answer in answers}
