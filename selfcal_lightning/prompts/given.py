"""A prompt of the user's own in the place of a task's: another system text, examples, or nothing but the question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.records import Message, Question

USER_PROMPT = "user_prompt"  # where the identity of a prompt holds it
BASES = ("task", "none", "boxed")
BOXED = (
    "Reason step by step. Then write your final answer, and nothing else, in \\boxed{}; where options are given, the "
    "letter of one."
)


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A question with the response that the model is shown.

    Attributes:
        question: The question, without the task's layout.
        response: The response in full, as the model should write it.
    """

    question: str
    response: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """How questions are put to the model. It is part of what a store says that its samples are.

    Attributes:
        base: "task" starts from the task's own prompt; "none" from the bare question, without any system text; "boxed"
            from the question and, in the same turn, the instruction to reason and to put the answer in a box, which
            studies of large models give for every data set.
        system: System text in the place of that one; "" is none at all, None keeps it.
        examples: Questions with responses that stand before the question, as turns of the chat.
    """

    base: Literal["task", "none", "boxed"] = "task"
    system: str | None = None
    examples: tuple[PromptExample, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the prompt as plain JSON types."""
        return {**asdict(self), "examples": [asdict(example) for example in self.examples]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Prompt:
        """Return the prompt that :meth:`as_json` gave, or that a YAML holds.

        Raises:
            InputError: A field is unknown, or holds something else.

        Example:
            >>> Prompt.from_json({"system": "Be brief.", "examples": [{"question": "1+1?", "response": "2"}]}).system
            'Be brief.'
        """
        _check_fields(content, ("base", "system", "examples"), "prompt")
        base, system, examples = content.get("base", "task"), content.get("system"), content.get("examples") or ()
        if base not in BASES:
            raise InputError(f"Expected `prompt.base` to be one of {', '.join(BASES)}, but got {base!r}.")
        if system is not None and not isinstance(system, str):
            raise InputError(f"Expected `prompt.system` to be text, but got {system!r}.")
        if not isinstance(examples, list | tuple):
            raise InputError(f"Expected `prompt.examples` to be a list, but got {examples!r}.")
        return cls(base, system, tuple(_example(example) for example in examples))


def put_prompt(questions: Iterable[Question], prompt: Prompt | None) -> list[Question]:
    """Return the questions as they are put with ``prompt``; None leaves each with its task's.

    Raises:
        InputError: A question is one of the examples, whose answer the model would be shown.

    Example:
        >>> own = Message("system", "Think."), Message("user", "Question: 2+2?")
        >>> prompt = Prompt(system="", examples=(PromptExample("1+1?", "Answer: 2"),))
        >>> [put] = put_prompt([Question("q", "local_number", own, "4", "2+2?")], prompt)
        >>> [f"{message.role}: {message.content}" for message in put.messages]
        ['user: Question: 1+1?', 'assistant: Answer: 2', 'user: Question: 2+2?']
    """
    if prompt is None:
        return list(questions)
    shown = {example.question.strip() for example in prompt.examples}
    put = []
    for question in questions:
        if question.text.strip() in shown:
            raise InputError(
                f"Expected the examples of the prompt to be none of the questions, but got {question.text!r}. Take it "
                "out of one of them: the model would be shown its answer."
            )
        put.append(replace(question, messages=_messages(question, prompt)))
    return put


def same_prompt(one: Prompt | None, other: Prompt | None) -> bool:
    """Return whether two prompts put every question alike; None is the task's own."""
    return (one or Prompt()) == (other or Prompt())


def stated_prompt(identity: Mapping[str, Any]) -> Prompt | None:
    """Return the user's prompt in the identity of a prompt (``ChatFormat.describe``), or None where it has none."""
    found = identity.get(USER_PROMPT)
    return None if found is None else Prompt.from_json(found)


def _messages(question: Question, prompt: Prompt) -> tuple[Message, ...]:
    own = question.messages
    if prompt.base != "task":
        own = (Message("user", f"{question.text}\n\n{BOXED}" if prompt.base == "boxed" else question.text),)
    system = tuple(message for message in own if message.role == "system")
    if prompt.system is not None:
        system = (Message("system", prompt.system),) if prompt.system else ()
    *earlier, last = (message for message in own if message.role != "system")
    # Examples stand in the task's layout around the question, such as "Question: ...".
    head, found, tail = last.content.partition(question.text)
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
        if not isinstance(content.get(name), str) or not content[name].strip():
            raise InputError(
                f"Expected `{name}` of an example of the prompt to hold text, but got {content.get(name)!r}."
            )
    return PromptExample(content["question"], content["response"])


def _check_fields(content: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in content:
        if name not in known:
            raise InputError(
                f"Expected the fields of `{where}` to be {', '.join(known)}, but got {name!r}."
                f"{did_you_mean(str(name), known)}"
            )
