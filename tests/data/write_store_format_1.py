"""Write the store in `store_format_1`, with the version of selfcal_lightning before format 2: its first argument.

It holds what a store may: two rounds, two parts, a question that two parts sampled differently, one that was imported
without token ids, one whose request failed, and an annotation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

SAMPLING = {"temperature": 0.8, "edt_scale": None, "edt_theta": 1.0, "top_p": 1.0, "max_new_tokens": 16}
PROMPT = {"query": "Right?", "suffix_ids": [1, 2, 3], "yes_ids": [4], "no_ids": [5], "template_sha256": "t" * 8}
MODEL = {"model": "m", "revision": None, "weights_sha256": "w" * 8, "adapter_sha256": None}


def group(name: str, *, round: int = 0, mark: str = "", ids: bool = True) -> tuple[QuestionSamples, list[int]]:
    """Return a question with two samples, and their lengths."""
    samples = tuple(
        Sample(
            name, index, round, f"{mark}Answer: {index + 3}", (7, 8, 9)[: index + 2] if ids else None, "stop",
            str(index + 3), index == 0, -1.5, 0.5, 0.25, {"length": 0.125 * index},
        )
        for index in range(2)
    )  # fmt: skip
    question = Question(name, "local_number", (Message("user", f"{name}?"),), "3", f"{name}?")
    return QuestionSamples(question, samples, "train", (1, 2) if ids else None), [2, 3]


def main(path: Path) -> None:
    """Write it."""
    engine = {"engine": "fake", "dtype": "float32"}
    for round, adapter in ((0, None), (1, "a" * 8)):
        fingerprint = StoreFingerprint({**MODEL, "adapter_sha256": adapter}, PROMPT, SAMPLING, 7)
        store = SampleStore.create_or_open(path, fingerprint, num_samples=2, engine=engine, round=round)
        with store.writer("a", round=round) as writer:
            writer.append(group("one", round=round)[0])
            if not round:
                entry, lengths = group("elsewhere", ids=False)
                writer.append(entry, num_tokens=lengths)
    store = SampleStore(path)
    with store.writer("b") as writer:
        failed = Sample("two", 1, 0, "", (), None, None, None)
        two = group("two")[0]
        writer.append(QuestionSamples(two.question, (two.samples[0], failed), "validation", (1, 2)))
        writer.append(group("one", mark="other ")[0])
    store.repair()
    annotation, index = Annotation(path, "sure"), store.index()
    annotation.write_part("run", "part", index, np.linspace(0.0, 1.0, len(index)), store.manifest["shards"])
    annotation.publish("run", ["part"], origin={"model": "x"}, details={"split": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
