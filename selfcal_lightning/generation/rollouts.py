"""Which prefixes of stored responses are continued, as questions of their own: equal ones are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.steps import prefix_after
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.rewards.prefixes import prefix_id
from selfcal_lightning.rewards.settings import Steps
from selfcal_lightning.rewards.steps import token_step_ends
from selfcal_lightning.store.sample_store import SampleStore

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


class Prefix(NamedTuple):
    """The first steps of a response.

    Attributes:
        question: The question, under the id of the prefix.
        parent_id: Id of the question itself.
        prefix_ids: Token ids of the steps.
        steps: How many there are.
        of: How many steps the response has, the first one that begins with them.
    """

    question: Question
    parent_id: str
    prefix_ids: tuple[int, ...]
    steps: int
    of: int


@dataclass(frozen=True)
class RolloutSource:
    """Stored responses, and which of their prefixes are continued.

    Attributes:
        samples_dir: The store.
        split: Split of the store.
        limit: Take the first so many questions, by id; None takes all.
        responses: Take the first so many responses to each.
        prefixes: Prefixes of a response, spread evenly over its inner steps; None takes all of these.
        steps: Where steps end.
    """

    samples_dir: str
    split: str
    limit: int | None
    responses: int
    prefixes: int | None
    steps: Steps

    def read(self, chat: ChatFormat, *, longest: int) -> list[Prefix]:
        """Return the distinct prefixes, by question.

        Args:
            chat: The policy's chat format.
            longest: Tokens of a response at most; a prefix that fills them has no continuation and is left out.

        Raises:
            InputError: The store has no responses of the split, or they have no steps.
        """
        found: dict[str, Prefix] = {}
        number = 0
        store = SampleStore(self.samples_dir, num_samples=self.responses)
        for number, entry in enumerate(store.samples(split=self.split), start=1):
            if self.limit is not None and number > self.limit:
                break
            for sample in entry.samples:
                for prefix in self._of(entry.question, sample, chat):
                    if len(prefix.prefix_ids) < longest:
                        found.setdefault(prefix.question.id, prefix)
        if not number:
            raise InputError(
                f"Expected `samples_dir` to hold responses of the split {self.split!r}, but got none in "
                f"{self.samples_dir}. Name another `split`, or sample some by `selfcal generate`."
            )
        if not found:
            raise InputError(
                f"Expected responses of more than one step in {self.samples_dir}, but got none by the rule "
                f"{self.steps!r}. Name another `steps`: sentence, line, blank_line or heading."
            )
        return list(found.values())

    def _of(self, question: Question, sample: Sample, chat: ChatFormat) -> Iterator[Prefix]:
        ids = chat.response_ids(sample.text) if sample.token_ids is None else sample.token_ids
        ends = token_step_ends(chat.tokenizer, ids, self.steps)
        for k in spread(len(ends) - 1, self.prefixes):
            stop = prefix_after(ends, k)
            prefix = tuple(ids[:stop])
            own = replace(question, id=prefix_id(question.id, prefix))
            yield Prefix(own, question.id, prefix, k, len(ends))


def spread(inner: int, number: int | None) -> list[int]:
    """Return which of the inner steps 1 to ``inner`` are taken, at most ``number`` of them, evenly spread.

    Example:
        >>> spread(5, None), spread(5, 2), spread(5, 3), spread(0, 4)
        ([1, 2, 3, 4, 5], [1, 5], [1, 3, 5], [])
    """
    if number is None or number >= inner:
        return list(range(1, inner + 1))
    if number == 1:
        return [(inner + 1) // 2]
    return np.round(np.linspace(1, inner, number)).astype(int).tolist()


def describe_prefixes(prefixes: Sequence[Prefix], chat: ChatFormat) -> Iterator[dict[str, Any]]:
    """Yield what a file beside the rollouts says of each prefix, JSON-able."""
    for one in prefixes:
        yield {
            "id": one.question.id,
            "question_id": one.parent_id,
            "question": one.question.text or one.question.messages[-1].content,
            "reasoning_prefix": chat.decode(one.prefix_ids),
            "prefix_ids": list(one.prefix_ids),
            "steps": one.steps,
            "of": one.of,
        }


def check_source(source: RolloutSource) -> None:
    """Raise InputError for numbers that cannot be, and a store that is not there."""
    for name, value in (("responses", source.responses), ("limit", source.limit), ("prefixes", source.prefixes)):
        if value is not None and value < 1:
            raise InputError(f"Expected `{name}` to be at least 1, but got {value}.")
    if not (Path(source.samples_dir) / "rounds").is_dir():
        raise InputError(
            f"Expected `samples_dir` to be a sample store, but got {source.samples_dir!r}. `selfcal generate` makes "
            "one."
        )
