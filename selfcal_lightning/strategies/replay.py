"""Run a strategy on recorded samples with the code that runs it live."""

from __future__ import annotations

from selfcal_lightning.records import QuestionSamples, Verdict
from selfcal_lightning.strategies.base import Strategy, refuse_parts


def replay(strategy: Strategy, entry: QuestionSamples) -> Verdict:
    """Return the verdict of ``strategy`` on the samples of ``entry``, in their order; tokens are not counted.

    Each Ask is answered with the next samples, fewer of them (at last none) where the record ends.

    Raises:
        InputError: The strategy asks for anything but whole responses.
    """
    solving = strategy.solve(entry.question)
    position = 0
    try:
        ask = next(solving)
        while True:
            refuse_parts(ask.kind)
            batch = list(entry.samples[position : position + ask.num_samples])
            position += len(batch)
            ask = solving.send(batch)
    except StopIteration as stop:
        verdict: Verdict = stop.value
        return verdict
