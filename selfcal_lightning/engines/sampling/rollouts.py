"""Which prefixes of stored responses are continued: each distinct one as a question of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.step_settings import Steps, check_steps
from selfcal_lightning.data.steps import Rate, check_marker, prefix_after, prefix_id, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.chat_format import ChatFormat, text_of
from selfcal_lightning.records import Question


class Prefix(NamedTuple):
    """The first steps of a response."""

    question: Question
    parent_id: str
    prefix_ids: tuple[int, ...]
    steps: int
    of: int


class StepsOfResponse(NamedTuple):
    """A response, the ends of its steps, and whether it is right."""

    question: Question
    ids: tuple[int, ...]
    ends: tuple[int, ...]
    correct: bool | None


@dataclass(frozen=True)
class RolloutSource:
    """Stored responses, and which of their prefixes are continued.

    Attributes:
        samples_dir: The store.
        split: Split of the store.
        limit: Takes the first questions by id; None takes all.
        responses: Takes the first responses to each question.
        prefixes: Number of prefixes of a response, spread evenly over its inner steps; None takes all.
        steps: Where steps end.
        at: Numbers of steps after which a prefix ends, instead of ``prefixes``.
    """

    samples_dir: str
    split: str
    limit: int | None
    responses: int
    prefixes: int | None
    steps: Steps
    at: tuple[int, ...] | None = None

    def read(self, chat: ChatFormat, *, longest: int, tell: bool = False) -> list[Prefix]:
        found: dict[str, Prefix] = {}
        too_long: set[str] = set()
        response: StepsOfResponse | None = None
        most_steps, shortest = 0, None
        for response in self._responses(chat):
            most_steps = max(most_steps, len(response.ends))
            for prefix in self._of(response):
                length = len(prefix.prefix_ids)
                shortest = min(length, shortest or length)
                if length < longest:
                    found.setdefault(prefix.question.id, prefix)
                else:
                    too_long.add(prefix.question.id)
        if response is None:
            wanted = f"`samples_dir` to hold responses of the split {self.split!r}"
            raise InputError(f"Expected {wanted}, but got none in {self.samples_dir}. Name another `split`.")
        if shortest is not None and not found:
            wanted = f"`sampling.max_new_tokens`, which counts the prefix too, to be above {shortest}"
            least = f"the length of the shortest prefix in {self.samples_dir}"
            raise InputError(f"Expected {wanted}, {least}, but got {longest}.")
        if self.at is not None and not found and most_steps > 1:
            wanted = f"`at` to name a step before the last of a response in {self.samples_dir}"
            there = f"which have at most {most_steps} by the rule {self.steps!r}"
            raise InputError(f"Expected {wanted}, {there}, but got {list(self.at)}.")
        if not found:
            wanted = f"responses of more than one step in {self.samples_dir}"
            way_out = "Name another `steps`: sentence, line, blank_line, heading or marker:TEXT."
            raise InputError(f"Expected {wanted}, but got none by the rule {self.steps!r}. {way_out}")
        if tell and too_long:
            say(f"{len(too_long):,} prefixes are left out: they fill `sampling.max_new_tokens`, {longest}.")
        return list(found.values())

    def labelled(
        self, chat: ChatFormat, rates: Mapping[str, Rate]
    ) -> Iterator[tuple[str, list[str], list[float]] | None]:
        """Yield the question, the steps and the success rate after each step, of every response.

        None stands for a response without steps, without a verdict, or with a step that was not rolled out.
        """
        for one in self._responses(chat):
            inner = [rates.get(prefix_id(one.question.id, one.ids[:end])) for end in one.ends[:-1]]
            known = [rate.share for rate in inner if rate is not None]
            if not one.ends or one.correct is None or len(known) < len(inner):
                yield None
                continue
            steps = [chat.decode(one.ids[start:end]) for start, end in pairwise((0, *one.ends))]
            yield text_of(one.question), steps, [*known, float(one.correct)]

    def outer_rates(self, chat: ChatFormat) -> Iterator[tuple[str, str, float]]:
        """Yield question, prefix and success rate of empty prefixes and whole responses, which need no rollouts.

        The responses to a question are the rollouts of its empty prefix. What has no verdict is left out.
        """
        for _, group in groupby(self._responses(chat), key=lambda one: one.question.id):
            known = [(one, float(one.correct)) for one in group if one.correct is not None]
            if known:
                question = text_of(known[0][0].question)
                yield question, "", sum(right for _, right in known) / len(known)
                whole = {one.ids: right for one, right in known if one.ends}
                yield from ((question, chat.decode(ids), right) for ids, right in whole.items())

    def _responses(self, chat: ChatFormat) -> Iterator[StepsOfResponse]:
        check_marker(chat.tokenizer, self.steps)
        store = SampleStore(self.samples_dir, num_samples=self.responses)
        for entry in islice(store.samples(split=self.split), self.limit):
            for sample, verdict in zip(entry.samples, entry.verdicts, strict=True):
                ids = chat.response_ids(sample.text) if sample.token_ids is None else tuple(sample.token_ids)
                ends = tuple(token_step_ends(chat.tokenizer, ids, self.steps))
                yield StepsOfResponse(entry.question, ids, ends, verdict)

    def _of(self, one: StepsOfResponse) -> Iterator[Prefix]:
        inner = len(one.ends) - 1
        for k in spread(inner, self.prefixes) if self.at is None else [k for k in sorted(set(self.at)) if k <= inner]:
            stop = prefix_after(one.ends, k)
            prefix = one.ids[:stop]
            own = replace(one.question, id=prefix_id(one.question.id, prefix))
            yield Prefix(own, one.question.id, prefix, k, len(one.ends))


def spread(inner: int, number: int | None) -> list[int]:
    """Return at most ``number`` of the inner steps 1 to ``inner``, evenly spread."""
    if number is None or number >= inner:
        return list(range(1, inner + 1))
    if number == 1:
        return [(inner + 1) // 2]
    return np.round(np.linspace(1, inner, number)).astype(int).tolist()


def describe_prefixes(prefixes: Sequence[Prefix], chat: ChatFormat) -> Iterator[dict[str, Any]]:
    for one in prefixes:
        yield {
            "id": one.question.id,
            "question_id": one.parent_id,
            "question": text_of(one.question),
            "reasoning_prefix": chat.decode(one.prefix_ids),
            "prefix_ids": list(one.prefix_ids),
            "steps": one.steps,
            "of": one.of,
        }


def check_source(source: RolloutSource) -> None:
    check_at_least(1, responses=source.responses, limit=source.limit, prefixes=source.prefixes)
    check_steps("steps", source.steps)
    if source.at is not None and source.prefixes is not None:
        raise InputError(f"Expected `at` or `prefixes`, but got both, {list(source.at)} and {source.prefixes}.")
    if source.at is not None and (not source.at or min(source.at) < 1):
        raise InputError(f"Expected `at` to be numbers of steps from 1, but got {list(source.at)}.")
    if not (Path(source.samples_dir) / "rounds").is_dir():
        raise InputError(
            f"Expected `samples_dir` to be a sample store of `selfcal generate`, but got {source.samples_dir!r}."
        )
