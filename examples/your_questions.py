"""Train an activated adapter on your own questions, without labels, and answer with it.

python examples/your_questions.py [FOLDER]
"""

import sys
from pathlib import Path

import selfcal_lightning as sc


def your_questions() -> list[dict[str, object]]:
    """Stand-in for your questions: a list like this, or the path of a JSON-lines file. `answer` is optional."""
    problems = sc.get_task("word_problems").load("train", limit=60)
    return [{"question": problem.text, "answer": problem.reference} for problem in problems]


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/your_questions")
    calibrated = sc.calibrate("bundled", your_questions(), output_dir=folder, settings={"data.num_samples": 6})
    print("Written:", calibrated.adapter, dict(calibrated.counts))
    print("ECE on validation questions:", round(calibrated.metrics["val/calibration/ECE"], 3))
    found = sc.answer(
        "bundled",
        [{"question": "Felix has 14 marbles. Sofia gives Felix 9 more. How many marbles does Felix have now?"}],
        adapter=calibrated.adapter,
        sampling=sc.SamplingSettings(max_new_tokens=120),
    )
    print(found[0].answer, found[0].confidence, found[0].samples_used)
