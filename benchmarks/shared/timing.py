"""How long something takes, and the requests that are timed."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, Request, SamplingSettings, sample_seed

T = TypeVar("T")
SAMPLING = SamplingSettings(temperature=0.8, edt_scale=0.8, edt_theta=1.0, max_new_tokens=120)


def timed(run: Callable[[], T]) -> tuple[float, float, T]:
    """Return wall seconds, seconds of this process's own processor time, and the result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - processor, result


def measured_once(file: Path, measure: Callable[[], T]) -> T:
    """Return what was measured, which ``file`` keeps."""
    if not file.exists():
        file.write_text(json.dumps(measure()))
    return json.loads(file.read_text())


def requests_of(
    questions: Sequence[Question], chat: ChatFormat, sampling: SamplingSettings, *, samples: int = 1, asks: bool = False
) -> list[Request]:
    query = chat.query if asks else None
    return [
        Request(f"{question.id}/{index}", prompt, sampling, sample_seed(0, 0, question.id, index), query)
        for question in questions
        for prompt in [chat.prompt_ids(question.messages)]
        for index in range(samples)
    ]


def cpu_seconds(pid: int | str = "self") -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
