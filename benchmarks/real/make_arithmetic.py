"""Make the questions of the task ``arithmetic`` with reasoning-gym (PyPI, Apache-2.0); the seed is fixed.

pip install reasoning-gym==0.1.25 && python benchmarks/real/make_arithmetic.py

Three kinds of questions, with the same range of numbers in each split. No two questions differ only in the order of
their numbers. The confirmation split was made later; of the pairs up to 24 that were left, nearly all have the greatest
common divisor 1, so its pairs go up to 36.
"""

import json
import random
import re
from pathlib import Path

import reasoning_gym  # type: ignore[import-not-found]

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm" / "data" / "arithmetic"
SPLITS = {"train": 240, "validation": 60, "test": 240}
LATER_SPLITS = {"confirmation": 180}
SEED, LATER_SEED = 31415926, 27182818
KINDS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 24},
}
LATER_SETTINGS = {"gcd": {"max_value": 36}}


def main() -> None:
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS | LATER_SPLITS}

    def draw(kind: str, settings: dict[str, int], splits: dict[str, int], seed: int) -> None:
        found = []
        for entry in reasoning_gym.create_dataset(kind, size=8000, seed=seed, **settings):
            numbers = sorted(map(int, re.findall(r"\d+", entry["question"])))
            if (key := ("-" in entry["question"], *numbers)) not in used:
                used.add(key)
                found.append((entry["question"].strip(), str(entry["answer"])))
            if len(found) == sum(splits.values()) // len(KINDS):
                break
        # The later a question first comes up, the larger its numbers are.
        random.Random(seed).shuffle(found)
        questions = iter(found)
        for split, count in splits.items():
            for number in range(count // len(KINDS)):
                question, answer = next(questions)
                rows[split].append({"id": f"{kind}-{split}-{number}", "question": question, "answer": answer})

    for kind, settings in KINDS.items():
        used = set[tuple[int, ...]]()  # numbers that no new question may have
        draw(kind, settings, SPLITS, SEED)
        draw(kind, settings | LATER_SETTINGS.get(kind, {}), LATER_SPLITS, LATER_SEED)
    FOLDER.mkdir(exist_ok=True)
    for split, found in rows.items():
        random.Random(SEED).shuffle(found)
        (FOLDER / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
