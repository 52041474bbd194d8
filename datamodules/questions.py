"""Where the questions of a split come from, and the checks that keep splits apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from selfcal_lightning.confidence import splits
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import QuestionCount
from selfcal_lightning.data.tasks.registry import QuestionSlice, count_source, load_source
from selfcal_lightning.models.chat_format import Prompt
from selfcal_lightning.records import Question, duplicate_ids

WAY_OUT = "Use other splits or files, disjoint parts (`offset` and `limit`), or take these questions out of one."


@dataclass(frozen=True)
class QuestionSource(QuestionSlice):
    """Questions of one task that take part in training, validation or test.

    Attributes:
        share: Part of the training tuples that go to this task, in (0, 1]. State it for every source or for none; with
            none, all tasks get the same part. Sources of one task add up.
    """

    split: str = "train"
    share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise InputError(f"`share` must lie in (0, 1], but got {self.share}.")


def load_questions(sources: Sequence[QuestionSource], *, role: str, prompt: Prompt | None = None) -> list[Question]:
    questions: list[Question] = []
    for source in sources:
        try:
            questions += load_source(source, source.task, prompt=prompt)
        except ValueError as error:
            raise InputError(f"The `{role}` source {source} cannot be read: {error}") from error
    repeated = duplicate_ids(questions)
    if repeated:
        raise InputError(f"`{role}` repeats {len(repeated)} question ids, such as {repeated[0]!r}: sources overlap.")
    return questions


def check_disjoint(
    questions: Sequence[Question], others: Sequence[Question], *, roles: tuple[str, str] = ("train", "validation")
) -> None:
    """Refuse questions in two splits: split by question, never by response."""
    splits.check_disjoint(questions, others, names=(f"`{roles[0]}`", f"`{roles[1]}`"), way_out=WAY_OUT)
    wordings = {question.messages for question in questions}
    same = [question.id for question in others if question.messages in wordings]
    if same:
        rank_zero_warn(
            f"{len(same)} of {len(others)} {roles[1]} questions are worded exactly like a {roles[0]} question "
            f"(for example {same[0]!r}): `{roles[1]}` looks better than it is."
        )


def task_shares(sources: Sequence[QuestionSource]) -> dict[str, float]:
    """Return the share of every task, in the order in which they are first named."""
    stated = [source for source in sources if source.share is not None]
    tasks = list(dict.fromkeys(source.task for source in sources))
    if not stated:
        return {task: 1.0 / len(tasks) for task in tasks}
    if len(stated) < len(sources):
        raise InputError(f"State `share` for all {len(sources)} training sources or for none, but got {len(stated)}.")
    shares = {task: sum(source.share or 0.0 for source in sources if source.task == task) for task in tasks}
    if sum(shares.values()) > 1.0 + 1e-9:
        raise InputError(f"The shares must add up to at most 1, but got {sum(shares.values()):.4g}: {shares}.")
    return shares


def splits_of(verb: str, predict_split: str) -> tuple[str, ...]:
    """Return the splits that a verb of the Trainer reads; only `predict` reads ``predict_split``."""
    return {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}.get(verb, (predict_split,))


def count_questions(
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
