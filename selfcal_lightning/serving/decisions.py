"""``/v1/systemone``: a chance for each allowed answer, in the fields of vLLM's structured decisions."""

from __future__ import annotations

import json
import string
from typing import Any

from selfcal_lightning.serving.bodies import DecisionBody, DecisionQuestion, Refused

REPLY = {
    "noul": "Answer with yes or no only.",
    "choice": "Answer with the letter of one option only.",
    "score": "Answer with the number of one level only.",
}


def options_of(name: str, question: DecisionQuestion) -> list[tuple[str, str | None]]:
    """Return the options of a question: names and descriptions."""
    criteria = question.criteria
    if question.type == "noul" and (
        criteria is None or (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"})
    ):
        return [("yes", (criteria or {}).get("true")), ("no", (criteria or {}).get("false"))]
    if question.type == "choice" and isinstance(criteria, dict) and 1 <= len(criteria) <= len(string.ascii_uppercase):
        return [(str(key), value) for key, value in criteria.items()]
    if question.type == "score" and isinstance(criteria, list) and 2 <= len(criteria) <= len(string.digits):
        return [(str(level), None) for level in criteria]
    wanted = {
        "noul": "to be null or to describe `true` and `false`",
        "choice": "to map 1 to 26 names of options to a description or null",
        "score": "to be a list of 2 to 10 levels",
    }
    raise Refused(400, f"Expected `criteria` {wanted[question.type]}.", param=f"questions.{name}.criteria")


def label_texts(name: str, question: DecisionQuestion) -> list[str]:
    """Return what the model would reply for each option."""
    count = len(options_of(name, question))
    return list(
        {"noul": ("yes", "no"), "choice": string.ascii_uppercase, "score": string.digits}[question.type][:count]
    )


def question_text(body: DecisionBody, question: DecisionQuestion, labels: list[str]) -> str:
    """Return the question as the model reads it, after the state."""
    state = body.state if isinstance(body.state, str) else json.dumps(body.state, ensure_ascii=False)
    options = options_of("", question)
    lines = [body.instructions, f"{state}\n", f"Question: {question.instructions}" if question.instructions else None]
    for label, (name, description) in zip(labels, options, strict=True):
        shown = [name if question.type != "noul" else None, None if description is None else str(description)]
        lines.append(f"{label}: {' - '.join(part for part in shown if part)}".removesuffix(": "))
    return "\n".join(line for line in [*lines, REPLY[question.type]] if line)


def answer_decision(question: DecisionQuestion, labels: list[str], stated: list[float]) -> dict[str, Any]:
    """Return the answer by the confidence in each option; their shares add up to 1.

    ``confidence`` is the calibrated chance that the option of most confidence is right.
    """
    total = sum(stated)
    shares = [value / total if total > 0.0 else 1.0 / len(stated) for value in stated]
    top = max(range(len(stated)), key=stated.__getitem__)
    names = [name for name, _ in options_of("", question)]
    answer: dict[str, Any] = {"type": question.type, "confidence": stated[top]}
    if question.type == "noul":
        return answer | {"noul": shares[0], "probabilities": dict(zip(names, shares, strict=True))}
    if question.type == "choice":
        return answer | {"choice": names[top], "probabilities": dict(zip(names, shares, strict=True))}
    level = sum(i * share for i, share in enumerate(shares))
    legend = dict(zip(labels, names, strict=True))
    return answer | {"score": level, "legend": legend, "probabilities": dict(zip(labels, shares, strict=True))}
