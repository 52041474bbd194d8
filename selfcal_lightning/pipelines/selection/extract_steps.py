"""``selfcal extract-steps``: the key steps of the responses of a selection, by rules or by asking a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.prompts.chat_format import DEFAULT_QUERY
from selfcal_lightning.runtime.progress import Progress
from selfcal_lightning.selection.files import Selection, read_selection
from selfcal_lightning.selection.joining import examples
from selfcal_lightning.selection.key_steps.asking import EngineExtractor
from selfcal_lightning.selection.key_steps.base import Extracted, StepExtractor
from selfcal_lightning.selection.key_steps.files import KeySteps, check_extractor, write_key_steps
from selfcal_lightning.selection.key_steps.rules import RuleExtractor

CHUNK = 64  # responses after which what was found is on disk


def run_extract_steps(
    selection: str,
    backend: Literal["rules", "engine"] = "rules",
    store_dir: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    engine: EngineSettings = EngineSettings(),
    max_new_tokens: int = 1024,
    max_failures: int = MAX_FAILURES,
    overwrite: bool = False,
) -> KeySteps:
    """Find the key steps of the kept responses of a selection.

    They go to key_steps.json in the folder of the selection, with how many responses gave steps, needed a second
    request or gave none. A run that was stopped goes on; a service that is down leaves nothing behind for the responses
    that it did not answer.

    Args:
        selection: Folder of the selection.
        backend: "rules" takes the equations of a response and needs no model; "engine" asks ``model``.
        store_dir: Folder of the store, where it was moved; null is the one that the selection names.
        model: Folder or hub name of the model that is asked.
        revision: Its revision on the hub.
        engine: Which engine runs the model, and how.
        max_new_tokens: Longest reply.
        max_failures: Requests that may fail in a row, such as those to a server that is out of order; then the run
            stops.
        overwrite: Whether steps that were extracted in another way may be replaced.

    Returns:
        The key steps.
    """
    if (backend == "engine") != (model is not None):
        raise InputError(
            f"Expected `model` with `backend` engine, and there alone, but got {model!r} with {backend!r}."
        )
    chosen = read_selection(selection)
    if model is not None:
        check_engine(engine.of(revision=revision), model)
    with _opened(model, revision, engine, max_new_tokens, max_failures) as extractor:
        steps = _extract(chosen, extractor, store_dir=store_dir, overwrite=overwrite)
    sys.stdout.write(describe(steps))
    return steps


@contextmanager
def _opened(
    model: str | None, revision: str | None, engine: EngineSettings, max_new_tokens: int, max_failures: int
) -> Iterator[StepExtractor]:
    """Yield what finds the steps; an engine is closed in the end."""
    if model is None:
        yield RuleExtractor()
        return
    options = engine.of(revision=revision)
    chat = load_chat(options, model, query=DEFAULT_QUERY)
    opened = open_engine(options, model, chat=chat)
    try:
        yield EngineExtractor(opened, chat, max_new_tokens=max_new_tokens, max_failures=max_failures)
    finally:
        opened.close()


def _extract(chosen: Selection, extractor: StepExtractor, *, store_dir: str | None, overwrite: bool) -> KeySteps:
    """Find what is not found yet, and keep it chunk by chunk, also where the service gives way."""
    described = extractor.describe()
    found: list[Extracted] = check_extractor(chosen, described, overwrite=overwrite)
    known = {one.key for one in found}
    left = [
        one
        for one in examples(chosen, store_dir=store_dir)
        if (one.row.question_id, one.row.round, one.sample.index) not in known
    ]
    with Progress(len(left), label="Extracting steps") as progress:
        for start in range(0, len(left), CHUNK):
            try:
                for one in extractor.extract(left[start : start + CHUNK]):
                    found.append(one)
                    progress.update(1)
            finally:
                write_key_steps(chosen, described, found)
    return write_key_steps(chosen, described, found)


def describe(steps: KeySteps) -> str:
    """Return the rates as text for people."""
    rates = steps.rates
    total = rates["responses"] or 1
    without = ", ".join(f"{number:,} {reason}" for reason, number in rates["without_steps"].items()) or "none"
    lines = [
        f"{rates['with_steps']:,} of {rates['responses']:,} responses have key steps "
        f"({rates['with_steps'] / total:.1%}), {rates['repaired']:,} of them after a second request.",
        f"Without: {without}.",
        f"{rates['steps']:,} steps in {rates['forms']:,} forms; left out: {rates['ungrounded_forms']:,} forms with a "
        f"number that the response lacks, {rates['leaking_forms']:,} that are the answer.",
        f"{rates['true_steps']:,} of {rates['checked_steps']:,} steps with arithmetic are true.",
        "",
    ]
    return "\n".join(lines)
