"""A process to kill: samples with the fake engine into the store of argv[1]; argv[2:] are i, n, steps to die at.

The last number counts calls of `os.replace` and of `os.fsync`; the process kills itself right before that one.
"""

import os
import signal
import sys
from pathlib import Path

from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions

from selfcal_lightning.engines.sampling.sampler import GenerationReport, generate_samples
from selfcal_lightning.records import SamplingSettings

NUM_SAMPLES, SEED, SAMPLING = 3, 7, SamplingSettings(max_new_tokens=64)
QUESTIONS = fake_questions(40)


def sample_share(path: Path, *, shard: tuple[int, int] = (0, 1), seconds_per_poll: float = 0.0) -> GenerationReport:
    settings = {"sampling": SAMPLING, "seed": SEED, "num_samples": NUM_SAMPLES, "split": "train", "tasks": FakeTask}
    return generate_samples(
        QUESTIONS, path, engine=FakeEngine(seconds_per_poll=seconds_per_poll), chat=FakeChat(), shard=shard,
        questions_per_shard=2, progress=False, **settings,
    )  # fmt: skip


def die_at(step: int) -> None:
    """Kill this process right before its call number ``step`` of `os.fsync` or `os.replace`."""
    calls = 0
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def counted(*arguments: object, original: object = original) -> object:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)  # type: ignore[operator]

        setattr(os, name, counted)


if __name__ == "__main__":
    folder, number, total, last_step = sys.argv[1:]
    if int(last_step):
        die_at(int(last_step))
    sample_share(Path(folder), shard=(int(number), int(total)), seconds_per_poll=0.01)
