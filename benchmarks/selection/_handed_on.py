"""A selection as others get it: key steps, an export, and whether its reward file judges as the task does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from selfcal_lightning.commands.selection import run_export_rl, run_extract_steps, run_select
from selfcal_lightning.data.store.sample_store import SampleStore

Judge = Callable[[str, str, str], float | None]
CUT = "length"


@dataclass(frozen=True)
class HandedOn:
    """What was counted."""

    kept: int
    with_steps: int
    steps: int
    ungrounded_forms: int
    judged: int
    judged_otherwise: int


def hand_on(store: Path, folder: Path, *, kept: float) -> HandedOn:
    """Select by the defaults, extract key steps by rules, export, and judge all responses by the reward file."""
    selection, export = folder / "selection", folder / "export"
    chosen = run_select(str(store), str(selection), keep_top=kept)
    rates = run_extract_steps(str(selection), overwrite=True).rates
    run_export_rl(str(selection), str(export), "verl")
    judge = _judge_of(export / "reward.py")
    judged = otherwise = 0
    for entry in SampleStore(str(store)).samples():
        for sample in entry.samples:
            if sample.finish != CUT and entry.question.reference is not None:
                judged += 1
                given = judge(f"selfcal/{entry.question.task}", sample.text, entry.question.reference)
                otherwise += given != float(bool(sample.correct))
    return HandedOn(len(chosen.kept), rates["with_steps"], rates["steps"], rates["ungrounded_forms"], judged, otherwise)


def _judge_of(file: Path) -> Judge:
    """Return the function of a reward file that judges one response, as a trainer would load it."""
    spec = importlib.util.spec_from_file_location("exported_reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"Expected {file} to be a module, but got something else.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("Judge", module.judge)
