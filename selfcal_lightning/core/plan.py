"""The plan of a run: what it will do, computed before anything is sampled, loaded or written."""

import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from selfcal_lightning.core.errors import InputError

WIDTH = 80
GIB, MIB = 2**30, 2**20
LONG_SECONDS = 3600  # of sampling on a CPU, from which on a note says so
# Of the bundled model's store of 7,600 responses: 654 bytes each, of 43 tokens. Longer ones take less a token.
BYTES_PER_RESPONSE, BYTES_PER_TOKEN = 300, 8


@dataclass(frozen=True, slots=True)
class QuestionCount:
    """Questions of one task in one split; ``number`` is None where only reading the hub would tell."""

    split: str
    task: str
    number: int | None
    is_limit: bool = False

    def __str__(self) -> str:
        number = "all" if self.number is None else f"{self.number:,}"
        return f"{'up to ' if self.is_limit and self.number is not None else ''}{number} {self.task}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Responses to draw into a store."""

    store_dir: str
    responses: int | None
    stored: int = 0
    most_tokens: int = 0
    mean_tokens: float | None = None
    bytes_each: float | None = None

    @property
    def missing(self) -> int | None:
        return None if self.responses is None else max(0, self.responses - self.stored)

    @property
    def disk_bytes(self) -> float | None:
        """Bytes to be written; an upper bound if no response is stored yet."""
        each = self.bytes_each or BYTES_PER_RESPONSE + BYTES_PER_TOKEN * self.most_tokens
        return None if self.missing is None else self.missing * each

    def __str__(self) -> str:
        if self.missing is None:
            return f"as many as the questions ask for, into {self.store_dir}"
        if self.missing == 0:
            return f"none to sample: all {self.responses:,} are in {self.store_dir}"
        return f"{self.missing:,} to sample, {self.stored:,} are in {self.store_dir} already"

    @property
    def tokens_text(self) -> str:
        """How many tokens will be sampled; empty if none."""
        if not self.missing:
            return ""
        most = f"at most {self.missing * self.most_tokens:,} (`max_new_tokens` is {self.most_tokens:,})"
        if self.mean_tokens is None:
            return f"{most}; nothing sampled yet tells how many of them"
        about = self.missing * self.mean_tokens
        return f"about {about:,.0f}, by the mean of {self.mean_tokens:.0f} of those in the store; {most}"


@dataclass(frozen=True, slots=True)
class Training:
    """Optimiser steps: ``steps`` of ``rows_per_step`` rows over ``epochs``; a row has at most ``most_tokens``."""

    steps: int
    rows_per_step: int
    epochs: int | None
    most_tokens: int | None = None

    def __str__(self) -> str:
        epochs = "" if self.epochs is None else f" in {self.epochs} epoch{'s' if self.epochs != 1 else ''}"
        return f"{self.steps:,} optimiser steps of {self.rows_per_step:,} rows{epochs}"


@dataclass(frozen=True, slots=True)
class Speed:
    """Estimated seconds a token, sampled or trained on."""

    sampled: float
    trained: float
    device: str

    def over(self, processes: int) -> Self:
        return replace(self, sampled=self.sampled / processes, trained=self.trained / processes)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in each process; None where the model is not on this disk."""

    weights: int | None
    trained: int | None
    available: int | None
    device: str
    activations: int | None = None  # kept for the backward pass of one micro-batch of the longest rows
    processes: int = 1

    def __str__(self) -> str:
        free = "" if self.available is None else f" ({show_bytes(self.available)} are free on the {self.device})"
        if self.weights is None:
            return f"unknown: the model is not on this disk yet{free}"
        parts = [f"weights {show_bytes(self.weights)}"]
        if self.trained:
            parts.append(f"what is trained, with gradients and moments, {show_bytes(self.trained)}")
        if self.activations:
            parts.append(f"activations of a micro-batch at most {show_bytes(self.activations)}")
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        more = "caches" if self.activations else "caches and activations"
        return f"{', '.join(parts)}{each}; {more} come on top{free}"


@dataclass(frozen=True, slots=True)
class Place:
    """Something that is written: what, where, and how many bytes at most (None: small)."""

    what: str
    path: str
    size: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a run will do; its participants give parts of it, which :func:`merge_plans` adds up."""

    model: tuple[str, ...] = ()
    questions: tuple[QuestionCount, ...] = ()
    sampling: tuple[Sampling, ...] = ()
    training: tuple[Training, ...] = ()
    speed: tuple[Speed, ...] = ()
    memory: tuple[Memory, ...] = ()
    places: tuple[Place, ...] = ()
    stopped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        splits: dict[str, list[str]] = {}
        for count in self.questions:
            splits.setdefault(count.split, []).append(str(count))
        notes, seconds = list(self.notes), _sampling_seconds(self)[0]
        if seconds >= LONG_SECONDS and self.speed[0].device == "CPU":
            way_out = "lower `num_samples` or `sampling.max_new_tokens`, or use a GPU"
            notes.append(f"Sampling may take {show_seconds(seconds)} on this CPU: {way_out}.")
        rows = [
            ("model", "; ".join(self.model)),
            ("questions", "; ".join(f"{split}: {', '.join(counts)}" for split, counts in splits.items())),
            ("responses", "; ".join(map(str, self.sampling))),
            ("tokens", "; ".join(row.tokens_text for row in self.sampling)),
            ("training", "; ".join(map(str, self.training))),
            ("time", _time_text(self)),
            ("memory", "; ".join(map(str, self.memory))),
            ("disk", _disk_text(self)),
            ("writes", ", ".join(f"{place.path} ({place.what})" for place in self.places)),
            ("if stopped", " ".join(self.stopped)),
            *(("note", note) for note in notes),
        ]
        layout: dict[str, Any] = {"subsequent_indent": " " * 13, "break_long_words": False, "break_on_hyphens": False}
        filled = (textwrap.fill(text, WIDTH, initial_indent=f"  {name:<11}", **layout) for name, text in rows if text)
        return "\n".join(filled)


@runtime_checkable
class Participant(Protocol):
    """A callback, module or data module with a part in the plan of a run of the Trainer."""

    def plan_run(self, verb: str, trainer: Any, module: Any, data: Any) -> Plan:
        """Refuse what cannot work in ``verb``, and return this one's part of its plan.

        No model is loaded, nothing is sampled, downloaded or written.
        """


def merge_plans(plans: Sequence[Plan]) -> Plan:
    """Add up plans in their order; equal rows appear once, and the sampling of a store is one row."""
    names = [field.name for field in fields(Plan)]
    rows = {name: tuple(dict.fromkeys(row for plan in plans for row in getattr(plan, name))) for name in names}
    stores: dict[str, Sampling] = {}
    for row in (row for plan in plans for row in plan.sampling):
        if (before := stores.get(row.store_dir)) is not None:
            known = before.responses is not None and row.responses is not None
            total = (before.responses or 0) + (row.responses or 0) if known else None
            row = replace(row, responses=total, stored=before.stored + row.stored)
        stores[row.store_dir] = row
    return Plan(**rows | {"sampling": tuple(stores.values())})


def check_places(plan: Plan) -> None:
    """Refuse folders that cannot be written, and disks that cannot hold what is certain to come."""
    for place in plan.places:
        folder = existing_folder(place.path)
        if not os.access(folder, os.W_OK):
            wanted = f"to write {place.what} to {place.path}"
            raise InputError(f"Expected {wanted}, but {folder} cannot be written by this user. Choose another folder.")
    for sampling in plan.sampling:
        needed = None if sampling.bytes_each is None else sampling.disk_bytes  # an upper bound is not certain
        free = free_bytes(sampling.store_dir)
        if needed is not None and needed > free:
            wanted = f"{show_bytes(needed)} of free disk for the samples in {sampling.store_dir}"
            way = "Free some, choose another `store_dir`, or lower `num_samples`."
            raise InputError(f"Expected {wanted}, but got {show_bytes(free)}. {way}")


def existing_folder(path: str | Path) -> Path:
    """Return the nearest folder above ``path`` (or itself) that exists."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        if place == Path(path).absolute():
            return place.parent
        raise InputError(f"Expected {path} to lie in a folder, but {place} is a file. Choose another place.")
    return place


def free_bytes(path: str | Path) -> int:
    """Return the free bytes of the disk of ``path``, which need not exist."""
    return shutil.disk_usage(existing_folder(path)).free


def show_bytes(number: float) -> str:
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / MIB:,.1f} MiB"


def _sampling_seconds(plan: Plan) -> tuple[float, bool]:
    """Return how long sampling takes, and whether that is only an upper bound."""
    speed = max((speed.sampled for speed in plan.speed), default=0.0)
    drawn = [row for row in plan.sampling if row.missing]
    tokens = sum((row.missing or 0) * (row.mean_tokens or row.most_tokens) for row in drawn)
    return tokens * speed, any(row.mean_tokens is None for row in drawn)


def _time_text(plan: Plan) -> str:
    parts = []
    seconds, is_bound = _sampling_seconds(plan)
    if seconds:
        parts.append(f"sampling {'at most' if is_bound else 'about'} {show_seconds(seconds)}")
    speed = max((speed.trained for speed in plan.speed), default=0.0)
    rows = [row for row in plan.training if row.most_tokens]
    if speed and rows:
        tokens = sum(row.steps * row.rows_per_step * (row.most_tokens or 0) for row in rows)
        parts.append(f"training at most {show_seconds(tokens * speed)}")
    if not parts:
        return ""
    return f"{', '.join(parts)} on this {plan.speed[0].device}: a guess from the model's size and this machine's speed"


def show_seconds(number: float) -> str:
    """Return a duration as text, in its largest unit."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 3 * 86400)):
        if number < most:
            return f"{number / size:.0f} {unit}"
    return f"{number / 86400:,.0f} days"


def _disk_text(plan: Plan) -> str:
    sizes = [(sampling.store_dir, sampling.disk_bytes) for sampling in plan.sampling]
    sizes += [(place.path, place.size) for place in plan.places]
    known = [size for _, size in sizes if size]
    if not known:
        return ""
    unknown = any(sampling.missing is None for sampling in plan.sampling)
    exact = all(sampling.bytes_each is not None for sampling in plan.sampling)
    about = "at least" if unknown else "about" if exact else "at most"
    return f"{about} {show_bytes(sum(known))}; {show_bytes(free_bytes(sizes[0][0]))} are free at {sizes[0][0]}"
