"""What all formats are made of: a question as a chat, its label, the chosen response and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Message
from selfcal_lightning.selection.files import Selection
from selfcal_lightning.selection.joining import Example
from selfcal_lightning.selection.key_steps.files import KeySteps
from selfcal_lightning.selection.records import Label, SelectedRow
from selfcal_lightning.tasks.registry import get_task

ExportLabel = Literal["picked", "none"]
_ABILITIES = {"number": "math", "expression": "math", "option letter": "choice", "short text": "qa"}


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A kept question, ready to be written.

    Attributes:
        number: Its place among the rows, from 0.
        question: The bare question.
        messages: The chat that asks it. It is not rendered: a trainer applies its model's template.
        ability: What it asks for, by the type of its answers: math, choice or qa.
        label: Its label.
        response: The chosen response.
        key_steps: Key steps of the chosen response, each as its forms; none where none were extracted.
        row: What the selection says of it.
    """

    number: int
    question: str
    messages: tuple[Message, ...]
    ability: str
    label: Label
    response: str
    key_steps: tuple[tuple[str, ...], ...]
    row: SelectedRow

    @property
    def source(self) -> str:
        """Name of the question's kind, by which the reward file reads answers."""
        return f"selfcal/{self.row.task}"


def training_rows(
    chosen: Iterable[Example], steps: KeySteps | None, *, label: ExportLabel | None = None
) -> list[TrainingRow]:
    """Return the rows of kept questions.

    Args:
        chosen: The kept questions with their responses.
        steps: Their key steps, where they were extracted.
        label: What to label with; None takes the selection's label.

    Raises:
        InputError: A question is known as rendered text only.
    """
    known = {} if steps is None else steps.by_response
    rows: list[TrainingRow] = []
    for number, one in enumerate(chosen):
        if not one.question.messages:
            raise InputError(
                f"Expected question {one.question.id!r} to be known as a chat, but got a rendered prompt: a trainer "
                "would put it into a template once more."
            )
        found = known.get((one.row.question_id, one.row.round, one.sample.index))
        rows.append(
            TrainingRow(
                number=number,
                question=one.question.text,
                messages=one.question.messages,
                ability=_ABILITIES[get_task(one.row.task).answer_type],
                label=_label(one.row, label),
                response=one.sample.text,
                key_steps=tuple(step.forms for step in (found.steps if found else None) or ()),
                row=one.row,
            )
        )
    return rows


def check_label(selection: Selection, label: str | None) -> None:
    """Raise InputError where a label is asked for that the selection does not have.

    The labels of votes are those of all responses, which only ``selfcal select`` sees.
    """
    if label in (None, "picked", "none") or label == selection.manifest["settings"]["label"]:
        return
    own, also = selection.manifest["settings"]["label"], " --references true" if label == "reference" else ""
    raise InputError(
        f"Expected `label` to be picked, none or {own!r}, that of the selection, but got {label!r}. Run "
        f"`selfcal select --label {label}{also}` for it."
    )


def counts_of_rows(rows: Iterable[TrainingRow]) -> Mapping[str, int]:
    """Return how many rows there are, and how many lack a label or key steps."""
    listed = list(rows)
    return {
        "rows": len(listed),
        "without_label": sum(row.label.text is None for row in listed),
        "without_key_steps": sum(not row.key_steps for row in listed),
    }


def _label(row: SelectedRow, label: ExportLabel | None) -> Label:
    if label is None:
        return row.label
    if label == "none":
        return Label("none", None, None, None, None)
    own = row.label if row.label.text == row.answer else Label("picked", row.answer, None, None, None)
    return replace(own, kind="picked")
