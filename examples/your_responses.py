"""Evaluate responses that you already have: write them as JSON lines, and get metrics with intervals.

python examples/your_responses.py [FOLDER]
"""

import json
import random
import sys
from pathlib import Path

import selfcal_lightning as sc


def your_responses(questions: int = 60, samples: int = 8) -> list[dict[str, object]]:
    """Stand-in for your responses: texts, and for each a number that says how sure the model was."""
    draw = random.Random(0)
    lines = []
    for number in range(questions):
        chance = draw.random()
        responses = []
        for _ in range(samples):
            is_right = draw.random() < chance
            sure = min(1.0, max(0.0, draw.gauss(0.7 if is_right else 0.4, 0.2)))
            answer = number if is_right else number + draw.randint(1, 3)
            responses.append({"text": f"The answer is {answer}.", "tokens": 6, "confidence": {"p_true": sure}})
        lines.append({"id": f"q{number}", "task": "local_number", "split": "test", "question": f"What is {number} + 0?",
                      "reference": str(number), "responses": responses})  # fmt: skip
    return lines


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/your_responses")
    folder.mkdir(parents=True, exist_ok=True)
    pool = folder / "responses.jsonl"
    pool.write_text("".join(json.dumps(line) + "\n" for line in your_responses()))
    found = sc.evaluate(
        {"mine": str(pool)},
        output_dir=folder / "evaluation",
        strategies=["self_consistency"],
        tables="short",
    )
    results = found.results
    print("ECE", round(results["own.test.ece.mine"], 3), "AUROC", round(results["own.test.auroc.mine"], 3))
