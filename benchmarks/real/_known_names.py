"""A reader of country facts that knows all names, the test questions' among them: what it does to the figures."""

import json
import re
import sys
from functools import cached_property
from pathlib import Path

from shared.study import ROOT

sys.path.insert(0, str(ROOT / "examples" / "smollm"))

from country_facts import DATA, SPLITS, CountryAnswers, fold

MOST_WORDS = 8


class KnownNames(CountryAnswers):
    """Reads the first known name after the verb; where there is none, what the reader by form reads."""

    @cached_property
    def names(self) -> set[str]:
        lines = [line for split in SPLITS for line in (Path(DATA) / f"{split}.jsonl").read_text().splitlines()]
        answers = [json.loads(line)["answer"] for line in lines]
        return {fold(name) for answer in answers for name in ([answer] if isinstance(answer, str) else answer)} - {""}

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        sentence = re.split(r"[.!?;:\n](?:\s|$)", text.strip(), maxsplit=1)[0]
        words = re.split(r"\b(?:is|are|uses|use|called)\b", sentence, maxsplit=1)[-1].split()
        for start in range(len(words)):
            for end in range(min(len(words), start + MOST_WORDS), start, -1):
                if (name := fold(" ".join(words[start:end]).strip(',()"“”'))) in self.names:
                    return name
        return super().extract(text, finished=finished)
