"""Make the questions of the task ``arithmetic`` with reasoning-gym (PyPI, Apache-2.0); the seed is fixed.

pip install reasoning-gym==0.1.25 && python benchmarks/real/make_arithmetic.py

Three kinds of questions, with the same range of numbers in each split. No two questions differ only in the order of
their numbers.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import reasoning_gym  # type: ignore[import-not-found]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm" / "data" / "arithmetic"
SPLITS = {"train": 240, "validation": 60, "test": 240}
SEED = 31415926
KINDS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 24},
}


def main() -> None:
    """Write the three files."""
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for kind, settings in KINDS.items():
        made = reasoning_gym.create_dataset(kind, size=8000, seed=SEED, **settings)
        count = sum(SPLITS.values()) // len(KINDS)
        distinct: dict[tuple[int, ...], tuple[str, str]] = {}
        for entry in made:
            numbers = sorted(map(int, re.findall(r"\d+", entry["question"])))
            distinct.setdefault(("-" in entry["question"], *numbers), (entry["question"].strip(), str(entry["answer"])))
        unique = list(distinct.values())[:count]
        # The later a question first comes up, the larger its numbers are.
        random.Random(SEED).shuffle(unique)
        questions = iter(unique)
        for split, count in SPLITS.items():
            for number in range(count // len(KINDS)):
                question, answer = next(questions)
                rows[split].append({"id": f"{kind}-{split}-{number}", "question": question, "answer": answer})
    FOLDER.mkdir(exist_ok=True)
    for split, found in rows.items():
        random.Random(SEED).shuffle(found)
        (FOLDER / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
