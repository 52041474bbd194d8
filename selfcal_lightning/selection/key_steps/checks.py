"""What a step has to pass: it is short, said once, made of the response's numbers, and not the answer itself."""

from __future__ import annotations

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
            elif _leaks(tokens, leak):
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
    """Return the answer's tokens and its numbers."""
    return canonical_step(answer), step_numbers(answer)


def _leaks(tokens: tuple[str, ...], answer: tuple[tuple[str, ...], frozenset[str]]) -> bool:
    """Return whether a form says the answer and computes nothing: ``12``, ``x = 12``, ``the answer is 12``."""
    own, numbers = answer
    if tokens == own:
        return True
    said = [token for token in tokens if is_number(token)]
    computes = not _COMPUTING.isdisjoint(tokens)
    return bool(numbers) and not computes and set(said) == set(numbers)
