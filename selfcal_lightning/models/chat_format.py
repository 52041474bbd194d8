"""Chat rendering and the confidence query, for any model that ships a chat template.

Everything is derived from the model's own template by rendering sentinels through it, without a table of model names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.models.folders import load_config, refusal_of_code, resolve_model
from selfcal_lightning.models.foreign import check_template
from selfcal_lightning.records import ConfidenceQuery, Message, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER_PROMPT = "user_prompt"  # where the identity of a prompt holds it
Base = Literal["task", "none", "boxed"]
Format = Literal["chat", "plain"]
PLAIN_TEMPLATE = """\
{%- if adds_bos %}{{ bos_token }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" %}{{ "Answer: " }}
{%- elif message.role == "user" and not message.content.startswith("Question:") %}{{ "Question: " }}{% endif -%}
{{- message.content.strip() + ("\\n" if message.role == "user" else "\\n\\n") -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "Answer:" }}{% endif -%}"""
BOXED = (
    "Reason step by step. Then write your final answer, and nothing else, in \\boxed{}; where options are given, the "
    "letter of one."
)


@dataclass(frozen=True, slots=True)
class PromptExample:
    """An example question with its response (few-shot).

    Attributes:
        question: The question, without the task's layout.
        response: The response in full, as the model should write it.
    """

    question: str
    response: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """How questions are put to the model. Part of a store's fingerprint.

    Attributes:
        base: What the prompt starts from: "task", the task's own prompt; "none", the bare question without a system
            text; "boxed", the question and, in the same turn, the instruction to reason and to put the answer in a box.
        system: System text instead of that of ``base``; "" means none, null keeps it.
        examples: Example questions with responses, as turns before the question.
        format: "chat" uses the model's chat template; "plain" writes "Question: ..." and "Answer: ..." for
            base models that have none, and ends a response where it continues to the next question.
    """

    base: Base = "task"
    system: str | None = None
    examples: tuple[PromptExample, ...] = ()
    format: Format = "chat"

    def as_json(self) -> dict[str, Any]:
        """Return the prompt as plain JSON types; the usual format is left out."""
        content = {**asdict(self), "examples": [asdict(example) for example in self.examples]}
        return {name: value for name, value in content.items() if (name, value) != ("format", "chat")}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Prompt:
        """Return the prompt that :meth:`as_json` gave, or that a YAML holds."""
        _check_fields(content, ("base", "system", "examples", "format"), "prompt")
        base, style = content.get("base", "task"), content.get("format", "chat")
        system, examples = content.get("system"), content.get("examples") or ()
        for name, value, known in (("base", base, get_args(Base)), ("format", style, get_args(Format))):
            if value not in known:
                raise InputError(f"Expected `prompt.{name}` to be one of {', '.join(known)}, but got {value!r}.")
        if system is not None and not isinstance(system, str):
            raise InputError(f"Expected `prompt.system` to be text, but got {system!r}.")
        if not isinstance(examples, list | tuple):
            raise InputError(f"Expected `prompt.examples` to be a list, but got {examples!r}.")
        return cls(base, system, tuple(_example(example) for example in examples), style)


def put_prompt(questions: Iterable[Question], prompt: Prompt | None) -> list[Question]:
    """Return the questions rewritten with ``prompt``; None keeps the prompt of each task."""
    if prompt is None:
        return list(questions)
    shown = {example.question.strip() for example in prompt.examples}
    put = []
    for question in questions:
        text = text_of(question)
        if text.strip() in shown:
            # The model would be shown its answer.
            raise InputError(f"Expected `prompt.examples` to be none of the questions, but got {text!r}.")
        put.append(replace(question, messages=_messages(text, question.messages, prompt)))
    return put


def text_of(question: Question) -> str:
    """Return the text of a question; where only its chat is known, the last turn."""
    return question.text or question.messages[-1].content


def same_prompt(one: Prompt | None, other: Prompt | None) -> bool:
    """Return whether two prompts are the same for every question; None is the task's own."""
    return (one or Prompt()) == (other or Prompt())


def stated_prompt(identity: Mapping[str, Any]) -> Prompt | None:
    """Return the user's prompt in a prompt's identity (``ChatFormat.describe``); None without one."""
    found = identity.get(USER_PROMPT)
    return None if found is None else Prompt.from_json(found)


def _messages(text: str, own: tuple[Message, ...], prompt: Prompt) -> tuple[Message, ...]:
    if prompt.base != "task":
        own = (Message("user", f"{text}\n\n{BOXED}" if prompt.base == "boxed" else text),)
    system = tuple(message for message in own if message.role == "system")
    if prompt.system is not None:
        system = (Message("system", prompt.system),) if prompt.system else ()
    *earlier, last = (message for message in own if message.role != "system")
    # Examples stand in the task's layout around the question, such as "Question: ...".
    head, found, tail = last.content.partition(text)
    layout = (head, tail) if found else ("", "")
    turns = [
        message
        for example in prompt.examples
        for message in (Message("user", example.question.join(layout)), Message("assistant", example.response))
    ]
    return (*system, *earlier, *turns, last)


def _example(content: object) -> PromptExample:
    if isinstance(content, PromptExample):
        return content
    if not isinstance(content, Mapping):
        raise InputError(f"Expected an example of the prompt to have `question` and `response`, but got {content!r}.")
    _check_fields(content, ("question", "response"), "prompt.examples")
    for name in ("question", "response"):
        text = content.get(name)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"Expected `{name}` of an example of the prompt to hold text, but got {text!r}.")
    return PromptExample(content["question"], content["response"])


def _check_fields(content: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in content:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InputError(f"Expected the fields of `{where}` to be {', '.join(known)}, but got {name!r}.{hint}")


DEFAULT_QUERY = "Is the answer correct? (Yes/No)"
YES_TEXTS = ("Yes", " Yes", "yes", " yes", "YES", " YES")
NO_TEXTS = ("No", " No", "no", " no", "NO", " NO")

_MARK_CHAR = "\ufdd0"  # a Unicode noncharacter: never in text that is meant for interchange
_MARK = re.compile(f"{_MARK_CHAR}([0-9]+){_MARK_CHAR}")
_SENTINEL = f"{_MARK_CHAR}response{_MARK_CHAR}"
_REASONING_TAG = re.compile(r"<(/?)([\w:]*think[\w:]*)>")
FIXED_DATE = "26 Jul 2024"


def load_tokenizer(model: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model``, a folder, a name on the hub or "bundled", without running its code."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(resolve_model(model), revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions for a damaged tokenizer.json
        place = f"{model!r} (revision {revision!r})"
        none = f"Expected `model` to name a folder or hub repository with a tokenizer, but got {place}: {error}"
        raise InputError(refusal_of_code(model, error) or none) from error
    templates = found.chat_template
    for template in templates.values() if isinstance(templates, dict) else filter(None, [templates]):
        check_template(template, model)
    return found


def generation_end_ids(model: str, *, revision: str | None = None) -> frozenset[int]:
    """Return the end-of-sequence ids of a model's generation settings, else of its (text) configuration."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(resolve_model(model), revision=cast(str, revision)).eos_token_id
    except OSError:  # there is no generation_config.json
        config = load_config(model, revision=revision)
        parts = (config, config.get_text_config())  # of a model of texts and images, either may name them
        ends = next((part.eos_token_id for part in parts if getattr(part, "eos_token_id", None) is not None), None)
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def vocabulary_size(model: str, *, revision: str | None = None) -> int:
    """Return the vocabulary size of a model's configuration; 0 without one, as for a tokenizer alone."""
    try:
        return load_config(model, revision=revision).get_text_config().vocab_size
    except InputError:
        return 0


class ChatFormat:
    """Everything about one tokenizer's chat rendering, on token ids.

    Contents of messages and responses are encoded with special tokens disallowed: a "<|eot_id|>" typed by a user or
    written by a model is text. Where no content holds a control token, ``prompt_ids`` are those of the plainly
    tokenised template. A model that reasons by default does so in its sampling prompt; the confidence query is put
    with reasoning closed, so that the next token is the verdict.

    A system message is folded into the first user turn where the template has no system role. A template that prints
    today's date is given a fixed one, so that a run that crosses midnight keeps its prompts.

    Args:
        tokenizer: The tokenizer; it must have a chat template unless the prompt's format is plain.
        query: Text of the confidence query.
        prompt: The user's prompt that the messages come from (:func:`put_prompt`); None is the task's own.

    Attributes:
        pad_id: Id to pad with.
        end_of_turn_ids: Ids that end a response: the tokenizer's end-of-sequence and what the template writes after
            an assistant's turn.
        query: The P(True) query. The sequence that is scored is prompt ids + response ids without a trailing
            end-of-turn + ``query.suffix_ids``; the next-token distribution after it is read.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, query: str = DEFAULT_QUERY, prompt: Prompt | None = None
    ) -> None:
        self.is_plain = prompt is not None and prompt.format == "plain"
        if tokenizer.chat_template is None and not self.is_plain:
            way = "For a base model use `--prompt.format plain`, or save a `chat_template.jinja`."
            raise InputError(f"Expected {tokenizer.name_or_path!r} to have a chat template, but got None. {way}")
        if not query.strip():
            raise InputError(f"Expected `query` to be a question, but got {query!r}.")
        self.tokenizer = tokenizer
        self.query_text = query
        self.prompt = None if same_prompt(prompt, None) else prompt
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        control_tokens = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, [*control_tokens, _MARK_CHAR])))
        self._template: str = PLAIN_TEMPLATE if self.is_plain else tokenizer.get_chat_template()
        self._folds_system = False
        try:
            roles = [Message("system", _SENTINEL), Message("user", "question")]
            self._folds_system = _SENTINEL not in self._render(roles)
        except ValueError:
            self._folds_system = True
        rendered = self._render([Message("user", "question")])
        controls = [match.start() for match in self._control.finditer(rendered)]
        self._response_anchor = rendered[controls[-1] if controls else 0 :]  # the end of the generation prompt
        suffix_ids = self._query_suffix()
        self.query = ConfidenceQuery(suffix_ids, self._single_tokens(YES_TEXTS), self._single_tokens(NO_TEXTS))
        ends = {tokenizer.eos_token_id}
        if self._control.fullmatch(cast(str, tokenizer.convert_ids_to_tokens(suffix_ids[0]))):
            ends.add(suffix_ids[0])
        ends |= self._next_question_ids() if self.is_plain else set()
        self.end_of_turn_ids: frozenset[int] = frozenset(ends - {None})
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, suffix_ids[0])
        self.pad_id: int = next(i for i in pads if i is not None)

    def prompt_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Return the ids of ``messages`` with an opened assistant turn and at most one BOS.

        Raises InputError when the template refuses the sequence of roles, or has no place for ``tools`` (functions as
        OpenAI writes them).
        """
        literals: list[str] = []
        guarded = [Message(message.role, self._guard(message.content, literals)) for message in messages]
        rendered = self._render(guarded, **({"tools": list(tools)} if tools else {}))
        if tools and (self._control.search(json.dumps(tools)) or rendered == self._render(guarded)):
            raise InputError("Expected no `tools` for a model whose template has no place for them, or control tokens.")
        return self._encode(rendered, literals)

    def response_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a response's content after a prompt, without end-of-turn."""
        literals: list[str] = []
        guarded = self._guard(f" {text}" if self.is_plain and not text[:1].isspace() else text, literals)
        anchor = self._encode(self._response_anchor, ())
        in_place = self._encode(self._response_anchor + guarded, literals)
        if in_place[: len(anchor)] == anchor:
            return in_place[len(anchor) :]
        return self._encode(guarded, literals)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without control tokens."""
        return decode_text(self.tokenizer, token_ids)

    def describe(self) -> dict[str, Any]:
        """Return the identity of the format, as plain JSON types."""
        return {
            "query": self.query_text,
            "suffix_ids": list(self.query.suffix_ids),
            "yes_ids": list(self.query.yes_ids),
            "no_ids": list(self.query.no_ids),
            "template_sha256": hashlib.sha256(self._template.encode()).hexdigest(),
            **({} if self.prompt is None else {USER_PROMPT: self.prompt.as_json()}),
        }

    def _render(self, messages: Iterable[Message], **options: Any) -> str:
        from jinja2.exceptions import TemplateError

        turns = [{"role": message.role, "content": message.content} for message in messages]
        if self._folds_system:
            turns = _fold_system(turns)
        if "strftime_now" in self._template:
            options["date_string"] = FIXED_DATE
        if self.is_plain:
            adds_bos = self.tokenizer.bos_token_id in self.tokenizer.encode("x")[:1]
            options |= {"chat_template": PLAIN_TEMPLATE, "adds_bos": adds_bos}
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
            return cast(str, text)
        except TemplateError as error:
            roles = [turn["role"] for turn in turns]
            name = self.tokenizer.name_or_path
            raise InputError(f"Expected the template of {name!r} to accept the roles {roles}: {error}") from error

    def _query_suffix(self) -> tuple[int, ...]:
        """Return the ids that follow an assistant's content when the query comes next."""
        literals: list[str] = []
        query = Message("user", self._guard(self.query_text, literals))
        turns = [Message("user", "question"), Message("assistant", _SENTINEL), query]
        rendered = self._render(turns, enable_thinking=False)
        if (times := rendered.count(_SENTINEL)) != 1:
            raise self._lacks(f"a chat template that keeps an assistant's content once, but it occurs {times} times")
        suffix = rendered.partition(_SENTINEL)[2]
        for tag in [tag for slash, tag in _REASONING_TAG.findall(suffix)[-1:] if not slash]:
            suffix = f"{suffix.rstrip()}\n\n</{tag}>\n\n"
        return self._encode(suffix, literals)

    def _guard(self, content: str, literals: list[str]) -> str:
        """Replace control tokens in ``content`` by marks and append what they stand for to ``literals``."""

        def mark(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{_MARK_CHAR}{len(literals) - 1}{_MARK_CHAR}"

        return self._control.sub(mark, content)

    def _encode(self, text: str, literals: Sequence[str]) -> tuple[int, ...]:
        """Encode rendered ``text``; marks become the plain-text ids of their ``literals``."""
        if not literals:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for index, piece in enumerate(_MARK.split(text)):
            if index % 2:
                literal = literals[int(piece)]
                ids += self.tokenizer(literal, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return tuple(ids)

    def _next_question_ids(self) -> set[int]:
        """Return the tokens with which a response continues to another question."""
        found = set()
        for before in ("x\n", "x\n\n"):
            pieces = [(i, str(self.tokenizer.decode([i]))) for i in self._encode(f"{before}Question:", ())]
            found |= {i for i, piece in pieces if len(word := piece.strip()) > 2 and "Question:".startswith(word)}
        if not found:
            raise self._lacks("a token for 'Question', at which a response in `prompt.format` plain ends")
        return found

    def _single_tokens(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of the single tokens that decode to one of ``texts``.

        Byte-level vocabularies write a leading space as "\u0120", sentence-piece ones as "\u2581"; the latter add it
        when they encode, so that both spellings are also looked up.
        """
        words = {text.strip() for text in texts}
        vocabulary = self.tokenizer.get_vocab()
        spellings = [prefix + word for word in words for prefix in ("", "\u0120", "\u2581")]
        candidates = {vocabulary[spelling] for spelling in spellings if spelling in vocabulary}
        encoded = (self.tokenizer.encode(text, add_special_tokens=False) for text in texts)
        candidates |= {ids[0] for ids in encoded if len(ids) == 1}
        exact = sorted(i for i in candidates if str(self.tokenizer.decode([i])).strip() in words)
        if not exact:
            raise self._lacks(f"a single token for one of {list(texts)}, which P(True) needs")
        return tuple(exact)

    def _lacks(self, what: str) -> InputError:
        return InputError(f"Expected the tokenizer of {self.tokenizer.name_or_path!r} to have {what}.")


def _fold_system(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Move system messages to the front of the first user turn."""
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    rest = [dict(turn) for turn in turns if turn["role"] != "system"]
    if (first := next((turn for turn in rest if turn["role"] == "user"), None)) is not None:
        first["content"] = "\n\n".join([*system, first["content"]])
    return rest


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[Sequence[int]], str]


def token_pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; joined, they equal ``decode(ids)``.

    A character made of several tokens belongs to the last one. Tokens are decoded after their neighbours, since many
    tokenizers treat the start of a text specially.
    """
    pieces: list[str] = []
    before = start = 0
    for end in range(1, len(ids) + 1):
        shown, text = decode(ids[before:start]), decode(ids[before:end])
        if text.endswith(UNFINISHED) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        before, start = start, end
    whole = decode(ids)
    return pieces if "".join(pieces) == whole else _pieces_of_prefixes(decode, ids, whole)


def _pieces_of_prefixes(decode: Decode, ids: Sequence[int], whole: str) -> list[str]:
    """Return the pieces by decoding every prefix, for decoders with long-range dependencies."""
    lengths = [0]
    for end in range(1, len(ids)):
        text = decode(ids[:end])
        lengths.append(max(lengths[-1], len(text)) if whole.startswith(text) else lengths[-1])
    lengths.append(len(whole))
    return [whole[a:b] for a, b in pairwise(lengths)] if len(ids) else []


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
