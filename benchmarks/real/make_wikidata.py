"""Make the questions of the task ``wikidata`` from BIG-bench's qa_wikidata (PyPI, Apache-2.0); the seed is fixed.

pip download --no-deps bigbench==1.0.0 && tar xzf bigbench-1.0.0.tar.gz
python benchmarks/real/make_wikidata.py bigbench-1.0.0/bigbench/benchmark_tasks/qa_wikidata/task.json

Four relations in equal parts, of which SmolLM2-135M-Instruct knows a third to a half. No subject is in two splits. "The
native language of X is" becomes a question.
"""

import json
import random
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm" / "data" / "wikidata"
# Questions of each relation. The confirmation split was drawn later, from what the others had left.
SPLITS = {"train": 40, "validation": 10, "test": 40}
LATER_SPLITS = {"confirmation": 40}
SEED = 20251125
RELATIONS = {
    "citizenship": ("The country of citizenship of ", "Which country is {} a citizen of?"),
    "native": ("The native language of ", "What is the native language of {}?"),
    "official": ("The official language of ", "What is the official language of {}?"),
    "religion": ("The religion of ", "What is the religion of {}?"),
}


def main(source: str) -> None:
    examples = json.loads(Path(source).read_text())["examples"]
    rng, used = random.Random(SEED), set[str]()
    rows = {split: list[dict[str, object]]() for split in SPLITS | LATER_SPLITS}
    answers, subjects = dict[str, dict[str, object]](), dict[str, list[str]]()

    def draw(name: str, splits: dict[str, int]) -> None:
        for split, count in splits.items():
            for number in range(count):
                while (subject := subjects[name].pop()) in used:
                    pass
                used.add(subject)
                asked = {"id": f"{split}{number}-{name}", "question": RELATIONS[name][1].format(subject)}
                rows[split].append({**asked, "answer": answers[name][subject]})

    for name, (begin, _) in RELATIONS.items():
        pattern = re.compile(re.escape(begin) + r"(.+) is$")
        found = ((pattern.match(example["input"]), example["target"]) for example in examples)
        answers[name] = {match[1]: target for match, target in found if match}
        subjects[name] = sorted(answers[name].keys() - used)
        rng.shuffle(subjects[name])
        draw(name, SPLITS)
    for name in RELATIONS:
        draw(name, LATER_SPLITS)
    FOLDER.mkdir(exist_ok=True)
    for split, written in rows.items():
        rng.shuffle(written)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in written)
        (FOLDER / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
