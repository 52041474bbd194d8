"""A question and steps as the token ids that a reward model reads, and the positions of its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import step_prefixes, token_step_ends
from selfcal_lightning.models.chat_format import FIXED_DATE, ChatFormat
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample
from selfcal_lightning.rewards.formats import RewardFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfcal_lightning.models.packing import PrefixTree


@dataclass(frozen=True, slots=True)
class RewardInput:
    ids: tuple[int, ...]
    positions: tuple[int, ...]  # where the scores are read [K], rising


class RewardEncoder:
    def __init__(self, format: RewardFormat, tokenizer: PreTrainedTokenizerBase) -> None:
        self._format, self._tokenizer = format, tokenizer
        self._last: tuple[tuple[Message, ...], tuple[int, ...]] | None = None
        self._separator = self._single(format.separator, "separator") if format.separator else None
        self.output_ids = tuple(self._single(text, "output_tokens") for text in format.output_tokens)
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._control_tokens = tuple(sorted(added | set(tokenizer.all_special_tokens)))
        is_chat = format.uses_chat or format.layout in ("turns", "chat", "continued")
        if is_chat and tokenizer.chat_template is None:
            raise InputError(f"Expected a reward model of {format.name!r} to have a chat template, but got none.")

    def check_fits(self, num_tokens: int, *, of: str) -> None:
        """Raise InputError if the tokenizer has more tokens than the model ``of`` has embeddings."""
        if (known := len(self._tokenizer)) > num_tokens:
            raise InputError(f"The tokenizer of {of} has {known:,} tokens, but the model {num_tokens:,} embeddings.")

    def encode(self, question: str, steps: Sequence[str]) -> RewardInput | None:
        """Return the ids and the K positions of a question and K steps.

        None if the question or a step contains the separator or a special token, which would be read as one.
        """
        if any(token in text for text in (question, *steps) for token in self._control_tokens):
            return None
        write = {"marked": self._marked, "pieces": self._pieces, "turns": self._turns}.get(self._format.layout)
        if write is not None:
            return write(question, steps)
        asked = self._format.question.format(question=question)
        ids = self._chat([("user", asked), ("assistant", "".join(steps))])
        return RewardInput(ids, (len(ids) - 1,))

    def asked(self, question: Question, begun: Sequence[int] = ()) -> RewardInput:
        """Return the chat given to a policy and what it has written so far, read at the last token."""
        ids = (*self._prompt_of(question), *begun)
        return RewardInput(ids, (len(ids) - 1,))

    def continued(self, entry: QuestionSamples, sample: Sample, steps: Steps) -> RewardInput | None:
        """Return the ids and the K positions of a response after the chat given to its policy; None without steps.

        Reads the drawn tokens if policy and reward model write the prompt alike; else it encodes the text.
        """
        prompt = self._prompt_of(entry.question)
        drawn = sample.token_ids if entry.prompt_ids == prompt else None
        response = self._policy.response_ids(sample.text) if drawn is None else tuple(drawn)
        ends = token_step_ends(self._tokenizer, response, steps)
        if not ends:
            return None
        return RewardInput((*prompt, *response), tuple(len(prompt) + end - 1 for end in ends))

    def _prompt_of(self, question: Question) -> tuple[int, ...]:
        """Return the prompt of a question; the last one is cached."""
        if self._last is None or self._last[0] != question.messages:
            self._last = question.messages, self._policy.prompt_ids(question.messages)
        return self._last[1]

    @cached_property
    def _policy(self) -> ChatFormat:
        return ChatFormat(self._tokenizer)

    def _marked(self, question: str, steps: Sequence[str]) -> RewardInput | None:
        form = self._format
        asked = form.question.format(question=question)
        answer = form.joiner.join(form.step.format(step=step, separator=form.separator) for step in steps)
        if form.uses_chat:
            ids = self._chat([("user", asked), ("assistant", answer)])
        else:
            ids = tuple(self._tokenizer.encode(asked + answer))
        positions = tuple(place for place, token in enumerate(ids) if token == self._separator)
        return RewardInput(ids, positions) if len(positions) == len(steps) else None

    def _pieces(self, question: str, steps: Sequence[str]) -> RewardInput | None:
        bos = self._tokenizer.bos_token_id
        ids = [] if bos is None else [bos]
        ids += self._plain(self._format.question.format(question=question))
        positions = []
        for step in steps:
            ids += self._plain(step)
            if self._separator is not None:
                ids.append(self._separator)
            positions.append(len(ids) - 1)
        return RewardInput(tuple(ids), tuple(positions))

    def _turns(self, question: str, steps: Sequence[str]) -> RewardInput | None:
        turns: list[tuple[str, str]] = []
        prefixes = []
        asked = self._format.question.format(question=question)
        for number, step in enumerate(steps):
            turns.append(("user", step if number else asked + step))
            prefixes.append(self._chat(turns, asks=True))
            turns.append(("assistant", self._format.reply))
        ids = prefixes[-1]  # nothing is read behind the last turn
        if any(ids[: len(prefix)] != prefix for prefix in prefixes):  # a template that rewrites earlier turns
            return None
        return RewardInput(ids, tuple(len(prefix) - 1 for prefix in prefixes))

    def _chat(self, turns: Sequence[tuple[str, str]], *, asks: bool = False) -> tuple[int, ...]:
        from jinja2.exceptions import TemplateError

        system = () if self._format.system is None else (("system", self._format.system),)
        chat = [{"role": role, "content": content} for role, content in (*system, *turns)]

        # Some templates write today's date, which would make scores depend on the day.
        is_dated = "strftime_now" in str(self._tokenizer.chat_template)
        date: dict[str, Any] = {"date_string": FIXED_DATE} if is_dated else {}
        try:
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks, **date)
        except TemplateError as error:
            roles = [turn["role"] for turn in chat]
            raise InputError(f"The chat template refused the roles {roles}: {error}") from error
        return tuple(self._plain(str(text)))

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _single(self, text: str, option: str) -> int:
        ids = self._plain(text)
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            found = self._tokenizer.convert_ids_to_tokens(ids)
            raise InputError(f"`{option}` of {self._format.name!r} must be single tokens, but {text!r} is {found}.")
        return ids[0]


def bare_question(question: Question) -> str:
    """Return the text of a question, or the last user turn of its chat."""
    if question.text:
        return question.text
    return next((turn.content for turn in reversed(question.messages) if turn.role == "user"), "")


Group = list[RewardInput]
T = TypeVar("T")


class PackedRow(NamedTuple):
    ids: list[int]
    trees: list[PrefixTree]  # common beginnings, and what follows each of them
    positions: list[list[int]]  # where the scores of every input are read in the row [B][K]


def pack(groups: Iterable[Sequence[RewardInput]]) -> PackedRow:
    """Pack groups of inputs into a row of trees; inputs without a common beginning become separate trees."""
    from selfcal_lightning.models.packing import PrefixTree

    row = PackedRow([], [], [])
    for group in groups:
        for tree in [group] if common_start(group) else [[one] for one in group]:
            start, prompt = len(row.ids), common_start(tree)
            row.ids.extend(tree[0].ids[:prompt])
            for one in tree:
                behind = len(row.ids) - prompt
                row.positions.append([place + (start if place < prompt else behind) for place in one.positions])
                row.ids.extend(one.ids[prompt:])
            row.trees.append(PrefixTree(start, prompt, tuple(len(one.ids) - prompt for one in tree)))
    return row


def common_start(group: Sequence[RewardInput]) -> int:
    first, last = (choose(one.ids for one in group) for choose in (min, max))
    pairs = zip(first, last, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def batches(groups: Iterable[Sequence[RewardInput]], *, limit: int) -> Iterator[list[Group]]:
    """Yield groups whose rows have at most ``limit`` tokens; longer groups are split, single inputs may be longer."""
    parts = (part for group in groups for part in runs_that_fit(group, lambda part: _num_tokens(part) <= limit))
    sized = ((part, _num_tokens(part)) for part in parts)
    for batch in runs_that_fit(sized, lambda batch: sum(size for _, size in batch) <= limit):
        yield [part for part, _ in batch]


def runs_that_fit(items: Iterable[T], fits: Callable[[list[T]], bool]) -> Iterator[list[T]]:
    """Yield the items in lists, in order, each as long as it fits; what does not fit alone is alone."""
    run: list[T] = []
    for one in items:
        if run and not fits([*run, one]):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _num_tokens(group: Sequence[RewardInput]) -> int:
    return sum(len(one.ids) for one in group) - (len(group) - 1) * common_start(group)


_OTHER_STEP = "\u241e"  # shares no beginning with a step


@dataclass(frozen=True, slots=True)
class WrittenResponse:
    """A question and a response with K steps, as a public reward model reads them in training."""

    ids: tuple[int, ...]
    start: int  # number of ids that all responses to the question share
    positions: tuple[int, ...]  # where the scores are read [K], rising, none before ``start``
    prefixes: tuple[str, ...]  # stripped text up to the end of each step [K]


class RewardWriter:
    def __init__(self, encoder: RewardEncoder, steps: Steps) -> None:
        self._encoder, self._steps = encoder, steps
        self._last: tuple[str, tuple[int, ...]] | None = None

    def write(self, question: Question, text: str) -> WrittenResponse | None:
        """Return a response as the model reads it; None without a step, or with a separator or special token in it."""
        steps = step_prefixes(text, self._steps)
        asked = bare_question(question)
        written = self._encoder.encode(asked, [step for step, _ in steps]) if steps else None
        if written is None:
            return None
        begun = common_start([written, RewardInput(self._other(asked), ())])
        start = min(begun, written.positions[0])
        return WrittenResponse(written.ids, start, written.positions, tuple(prefix for _, prefix in steps))

    def _other(self, question: str) -> tuple[int, ...]:
        """Return the ids of another response to a question; the last ones are cached."""
        if self._last is None or self._last[0] != question:
            other = self._encoder.encode(question, [_OTHER_STEP])
            self._last = question, () if other is None else other.ids
        return self._last[1]
