"""``/v1/systemone``: a chance for each allowed answer, in the fields of vLLM's structured decisions."""

import json
import string
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from selfcal_lightning.serving.bodies import Refused, Strict

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
Options = list[tuple[str, str, Any]]  # the label that the model replies with, the name, and the description


class DecisionQuestion(Strict):
    type: Literal["noul", "choice", "score"]
    instructions: Any = ""
    criteria: Any = None

    def options(self, name: str) -> Options:
        """Return the options, or raise Refused where the ``criteria`` of this question are not what its type takes."""
        _, labels, wanted = TYPES[self.type]
        given, found = self.criteria, list[tuple[str, Any]]()
        if self.type == "noul" and (given is None or (isinstance(given, dict) and given.keys() <= {"true", "false"})):
            found = [("yes", (given or {}).get("true")), ("no", (given or {}).get("false"))]
        elif self.type == "choice" and isinstance(given, dict):
            found = [(str(option), text) for option, text in given.items()]
        elif self.type == "score" and isinstance(given, list) and len(given) > 1:
            found = [(str(level), None) for level in given]
        if not 1 <= len(found) <= len(labels):
            raise Refused(400, f"Expected `criteria` {wanted}.", param=f"questions.{name}.criteria")
        return [(label, *option) for label, option in zip(labels, found, strict=False)]

    def answer(self, options: Options, stated: Sequence[float]) -> dict[str, Any]:
        """Return the answer by the confidence in each option; their shares add up to 1.

        ``confidence`` is the calibrated chance that the option of most confidence is right.
        """
        total = sum(stated)
        shares = [value / total if total > 0.0 else 1.0 / len(stated) for value in stated]
        top = max(range(len(stated)), key=stated.__getitem__)
        found: dict[str, Any] = {"type": self.type, "confidence": stated[top]}
        if self.type == "score":
            found["score"] = sum(level * share for level, share in enumerate(shares))
            found["legend"] = {label: name for label, name, _ in options}
        else:
            found[self.type] = shares[0] if self.type == "noul" else options[top][1]
        names = [label if self.type == "score" else name for label, name, _ in options]
        return found | {"probabilities": dict(zip(names, shares, strict=True))}


class DecisionBody(Strict):
    model: str | None = None
    state: Any
    questions: Annotated[dict[str, DecisionQuestion], Field(min_length=1, max_length=64)]
    instructions: str | None = None
    request_id: str | None = None

    def text_of(self, question: DecisionQuestion, options: Options) -> str:
        state = self.state if isinstance(self.state, str) else json.dumps(self.state, ensure_ascii=False)
        asked = f"Question: {question.instructions}" if question.instructions else None
        lines = [self.instructions, f"{state}\n", asked]
        for label, name, description in options:
            parts = (name if question.type != "noul" else None, description)
            shown = " - ".join(str(part) for part in parts if part not in (None, ""))
            lines.append(f"{label}: {shown}".removesuffix(": "))
        return "\n".join(line for line in [*lines, TYPES[question.type][0]] if line)
