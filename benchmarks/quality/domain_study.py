"""How well prompt states recognise questions that a confidence was not trained on: ``domain.{json,md}``."""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.study import RESULTS
from shared.tables import table, write_report

import selfcal_lightning as sc
from selfcal_lightning.confidence.domain import Domain, prompt_states
from selfcal_lightning.inference.answering import read_questions
from selfcal_lightning.metrics.discrimination import auroc

FACTS = [
    {"question": f"What is the capital of {country}?"}
    for country in ("France", "Ghana", "Peru", "Japan", "Norway", "Kenya", "Chile", "Egypt", "Spain", "Nepal")
]


def as_markdown(report: Mapping[str, Any]) -> str:
    rows = [
        [row["questions"], str(row["number"]), f"{row['warned']:.1%}",
         "–" if row["auroc"] is None else f"{row['auroc']:.3f}"]
        for row in report["rows"]
    ]  # fmt: skip
    made = "Made by `python benchmarks/quality/domain_study.py`."
    lines = table(["questions", "number", "warned", "AUROC of the distance"], rows)
    return "\n".join(["# Questions unlike the training ones", "", made, "", *lines, ""])


def main() -> None:
    draw = random.Random(0)
    sums = [{"question": f"What is {draw.randint(2, 60)}{draw.choice('+-*')}{draw.randint(2, 60)}?"} for _ in range(40)]
    engine, task = sc.TransformersEngine("bundled"), sc.get_task("word_problems")
    domain = Domain.fit(prompt_states(engine, task.load("train", limit=512)))
    tests = {
        "held-out questions, same templates": task.load("test_id", limit=300),
        "other templates": task.load("test_ood", limit=300),
        "plain arithmetic": read_questions(sums, task="word_problems"),
        "capitals": read_questions(FACTS, task="word_problems"),
    }
    distances = {name: domain.distance(prompt_states(engine, questions)) for name, questions in tests.items()}
    known = next(iter(distances.values()))
    rows = []
    for name, values in distances.items():
        is_other = np.repeat([True, False], [len(values), len(known)])
        rows.append({
            "questions": name, "number": len(values), "warned": float((values > domain.threshold).mean()),
            "auroc": None if values is known else auroc(np.concatenate([values, known]), is_other),
        })  # fmt: skip
    report = {"threshold": domain.threshold, "rows": rows}
    write_report(RESULTS, "domain", report, as_markdown(report), indent=2)


if __name__ == "__main__":
    main()
