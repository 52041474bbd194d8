"""Make the questions of the task ``wikidata`` from BIG-bench's qa_wikidata (PyPI, Apache-2.0); the seed is fixed.

pip download --no-deps bigbench==1.0.0 && tar xzf bigbench-1.0.0.tar.gz
python benchmarks/real/make_wikidata.py bigbench-1.0.0/bigbench/benchmark_tasks/qa_wikidata/task.json

Four relations in equal parts, of which SmolLM2-135M-Instruct knows a third to a half. No subject is in two splits. "The
native language of X is" becomes a question.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm" / "data" / "wikidata"
SPLITS = {"train": 40, "validation": 10, "test": 40}  # questions of each relation
SEED = 20251125
RELATIONS = {
    "citizenship": ("The country of citizenship of ", "Which country is {} a citizen of?"),
    "native": ("The native language of ", "What is the native language of {}?"),
    "official": ("The official language of ", "What is the official language of {}?"),
    "religion": ("The religion of ", "What is the religion of {}?"),
}


def main(source: str) -> None:
    """Write the three files."""
    examples = json.loads(Path(source).read_text())["examples"]
    rng, rows, used = random.Random(SEED), {split: list[dict[str, object]]() for split in SPLITS}, set[str]()
    for name, (begin, question) in RELATIONS.items():
        pattern = re.compile(re.escape(begin) + r"(.+) is$")
        found = {match[1]: example["target"] for example in examples if (match := pattern.match(example["input"]))}
        subjects = sorted(found.keys() - used)
        rng.shuffle(subjects)
        for split, count in SPLITS.items():
            for number in range(count):
                subject = subjects.pop()
                used.add(subject)
                row = {"id": f"{split}{number}-{name}", "question": question.format(subject), "answer": found[subject]}
                rows[split].append(row)
    FOLDER.mkdir(exist_ok=True)
    for split, written in rows.items():
        rng.shuffle(written)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in written)
        (FOLDER / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
