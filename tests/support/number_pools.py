from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.store_samples import write_lines


def write_number_pool(path: Path, responses: Mapping[str, Sequence[Mapping[str, Any]]], **fields: Any) -> Path:
    """Write questions with their responses, by id. The reference is "1"; ``fields`` are those of every line."""
    shared = {"task": "local_number", "reference": "1", **fields}
    return write_lines(
        path, *({"id": name, "question": f"{name}?", **shared, "responses": given} for name, given in responses.items())
    )


def write_pool(path: Path, *, questions: int = 4, samples: int = 4, confidence: str = "p_true") -> str:
    """Write questions whose answer is 7, and responses that say 7 or 8, with a confidence and a log-probability."""
    responses = {}
    for number in range(questions):
        responses[f"q{number}"] = [
            {"text": f"The answer is {7 if (number + k) % 3 else 8}.", "tokens": 5,
             "confidence": {confidence: 0.2 + 0.25 * ((number + k) % 4), "logprob": -1.0 - k}}
            for k in range(samples)
        ]  # fmt: skip
    return str(write_number_pool(path, responses, task="gsm8k", reference="7", split="calibration"))
