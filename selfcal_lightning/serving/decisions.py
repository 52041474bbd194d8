"""``/v1/systemone``: a chance for each allowed answer, in the fields of vLLM's structured decisions."""

import json
import string
from collections.abc import Sequence
from typing import Any

from selfcal_lightning.serving.bodies import DecisionBody, DecisionQuestion, Refused

# How the model is told to reply, and with what; `criteria` of each type in words.
TYPES: dict[str, tuple[str, Sequence[str], str]] = {
    "noul": ("Answer with yes or no only.", ("yes", "no"), "to be null or to describe `true` and `false`"),
    "choice": (
        "Answer with the letter of one option only.",
        string.ascii_uppercase,
        "to map 1 to 26 names of options to a description or null",
    ),
    "score": ("Answer with the number of one level only.", string.digits, "to be a list of 2 to 10 levels"),
}


class Decision:
    """A question with its options: names, descriptions, and the labels that the model replies with."""

    def __init__(self, name: str, question: DecisionQuestion) -> None:
        self.type, self.instructions = question.type, question.instructions
        self.reply, labels, wanted = TYPES[question.type]
        found = _options(question.type, question.criteria)
        if found is None or len(found) > len(labels):
            raise Refused(400, f"Expected `criteria` {wanted}.", param=f"questions.{name}.criteria")
        self.names, self.descriptions = [name for name, _ in found], [text for _, text in found]
        self.labels = list(labels[: len(found)])

    def text(self, body: DecisionBody) -> str:
        state = body.state if isinstance(body.state, str) else json.dumps(body.state, ensure_ascii=False)
        lines = [body.instructions, f"{state}\n", f"Question: {self.instructions}" if self.instructions else None]
        for label, name, description in zip(self.labels, self.names, self.descriptions, strict=True):
            shown = (name if self.type != "noul" else None, description)
            lines.append(
                f"{label}: {' - '.join(str(part) for part in shown if part not in (None, ''))}".removesuffix(": ")
            )
        return "\n".join(line for line in [*lines, self.reply] if line)

    def answer(self, stated: Sequence[float]) -> dict[str, Any]:
        """Return the answer by the confidence in each option; their shares add up to 1.

        ``confidence`` is the calibrated chance that the option of most confidence is right.
        """
        total = sum(stated)
        shares = [value / total if total > 0.0 else 1.0 / len(stated) for value in stated]
        top = max(range(len(stated)), key=stated.__getitem__)
        found: dict[str, Any] = {"type": self.type, "confidence": stated[top]}
        if self.type == "score":
            found["score"] = sum(level * share for level, share in enumerate(shares))
            found["legend"] = dict(zip(self.labels, self.names, strict=True))
        else:
            found[self.type] = shares[0] if self.type == "noul" else self.names[top]
        names = self.labels if self.type == "score" else self.names
        return found | {"probabilities": dict(zip(names, shares, strict=True))}


def _options(kind: str, criteria: Any) -> list[tuple[str, Any]] | None:
    """Return names and descriptions of the options; None where ``criteria`` is not what the type takes."""
    if kind == "noul" and (criteria is None or (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"})):
        return [("yes", (criteria or {}).get("true")), ("no", (criteria or {}).get("false"))]
    if kind == "choice" and isinstance(criteria, dict) and criteria:
        return [(str(name), text) for name, text in criteria.items()]
    if kind == "score" and isinstance(criteria, list) and len(criteria) > 1:
        return [(str(level), None) for level in criteria]
    return None
