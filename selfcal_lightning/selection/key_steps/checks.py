"""What a step has to pass: it is short, said once, made of the response's numbers, and not the answer itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from selfcal_lightning.functional.equations import find_equations
from selfcal_lightning.functional.step_rewards import canonical_step, is_number, step_key, step_numbers
from selfcal_lightning.selection.joining import Example
from selfcal_lightning.selection.key_steps.base import NOTHING_LEFT, Extracted, KeyStep

_COMPUTING = frozenset("+-*/^")


def checked_steps(example: Example, found: Sequence[Sequence[str]], *, repaired: bool = False) -> Extracted:
    """Return the key steps that are left of what was found in a response.

    Args:
        example: The response.
        found: Steps, each as forms that say the same.
        repaired: Whether a second request was needed.
    """
    text, answer = example.sample.text, example.row.answer or ""
    numbers, leak = step_numbers(text), _forms_of_answer(answer)
    steps: list[KeyStep] = []
    seen: set[tuple[str, ...]] = set()
    ungrounded = leaking = 0
    for forms in found:
        kept: dict[tuple[str, ...], str] = {}
        for form in map(str.strip, forms):
            tokens = canonical_step(form)
            if not tokens:
                continue
            if not step_numbers(form) <= numbers:
                ungrounded += 1
            elif _leaks(tokens, leak) and not _is_article(form, answer):
                leaking += 1
            else:
                kept.setdefault(tokens, form)
        keys = {step_key(form) for form in kept.values()}
        if kept and not keys & seen:
            seen |= keys
            steps.append(_step(tuple(kept.values()), text))
    row = example.row
    index = example.sample.index
    if not steps:
        return Extracted(row.question_id, row.round, index, None, NOTHING_LEFT, repaired, ungrounded, leaking)
    return Extracted(row.question_id, row.round, index, tuple(steps), None, repaired, ungrounded, leaking)


def _step(forms: tuple[str, ...], text: str) -> KeyStep:
    places = [(at, at + len(form)) for form in forms if (at := text.find(form)) >= 0]
    checked = [equation.holds for form in forms for equation in find_equations(form)]
    return KeyStep(forms, places[0] if places else None, all(checked) if checked else None)


def _forms_of_answer(answer: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the answer's tokens, from its first number (with its sign) to its last where it has one; its numbers."""
    tokens = canonical_step(answer)
    places = [at for at, token in enumerate(tokens) if is_number(token)]
    if places:
        first = places[0] - (tokens[max(places[0] - 1, 0)] == "-")
        tokens = tokens[first : places[-1] + 1]
    return tokens, step_numbers(answer)


def _leaks(tokens: tuple[str, ...], answer: tuple[tuple[str, ...], frozenset[str]]) -> bool:
    """Return whether a form says the answer and computes nothing: ``x = -12``, ``x = 3/4``, ``the answer is B``.

    The answer's own tokens are taken out; with them go their signs, and what is left computes or has other numbers.
    """
    own, numbers = answer
    rest = _without(tokens, own)
    if len(rest) < len(tokens) and not any(map(is_number, rest)):
        return not numbers or _COMPUTING.isdisjoint(rest)
    said = {token for token in tokens if is_number(token)}
    return bool(numbers) and _COMPUTING.isdisjoint(tokens) and said == set(numbers)


def _is_article(form: str, answer: str) -> bool:
    """Return whether a form has the answer A as an article alone, as in "a prime has two divisors"."""
    return answer.strip() == "A" and "a" in form.split() and not re.search(r"\bA\b", form)


def _without(tokens: tuple[str, ...], run: tuple[str, ...]) -> tuple[str, ...]:
    """Return tokens less a run of them, wherever it stands."""
    left, size, at = [], len(run), 0
    while at < len(tokens):
        is_run = bool(run) and tokens[at : at + size] == run
        left += [] if is_run else [tokens[at]]
        at += size if is_run else 1
    return tuple(left)
