"""A run that samples: its plan, its share of the questions on this machine's devices, and the joining of its parts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from selfcal_lightning.engines.opening import check_can_draw
from selfcal_lightning.errors import InputError
from selfcal_lightning.generation.existing import is_complete, open_existing
from selfcal_lightning.generation.process_share import GenerationSettings, part_name, sample_share
from selfcal_lightning.generation.report import GenerationReport
from selfcal_lightning.generation.shares import missing_questions, select_share
from selfcal_lightning.generation.workers import run_workers
from selfcal_lightning.model_files.locations import BUNDLED_NAME, resolve_model
from selfcal_lightning.plugins import loaded_plugins
from selfcal_lightning.records import Question
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.interruptions import keeping
from selfcal_lightning.runtime.plan import Place, Plan, check_places
from selfcal_lightning.runtime.progress import Progress, say
from selfcal_lightning.store.manifest import check_place
from selfcal_lightning.store.parts import part_entries
from selfcal_lightning.store.plan import plan_sampling
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.registry import get_task
from selfcal_lightning.tasks.sources import count_source

COUNTS = ("generated", "unreadable", "truncated", "cut_read", "refused", "left_out")


def parse_shard(shard: str) -> tuple[int, int]:
    """Return (i, n) of "i/n".

    Example:
        >>> parse_shard("1/4")
        (1, 4)
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f"Expected `shard` to be 'i/n' with 0 <= i < n, such as '0/4', but got {shard!r}.")
    return int(match[1]), int(match[2])


def check_run(settings: GenerationSettings, *, devices: int = 1, shard: str = "0/1") -> tuple[int, int]:
    """Refuse what can be refused before anything is loaded, and return (i, n) of ``shard``.

    Raises:
        InputError: A setting cannot be.
    """
    check_place(Path(settings.store_dir))
    place = parse_shard(shard)
    if devices < 1:
        raise InputError(f"Expected `devices` to be at least 1, but got {devices}.")
    settings.check()
    return place


def sample_questions(
    settings: GenerationSettings, *, devices: int = 1, shard: str = "0/1", repair: bool = False
) -> GenerationReport:
    """Sample this machine's share of the questions into the store, and join its parts when all are there.

    Args:
        settings: The run.
        devices: Worker processes on this machine.
        shard: "i/n", this machine's share.
        repair: First move damaged files of the store aside, and drop questions of which responses are empty.

    Returns:
        Counts of what this machine did.

    Raises:
        EngineStoppedError: The engine cannot go on, or too many requests failed in a row.
        RunError: Questions were left out, or a worker failed. What is complete is kept in all cases.
        InputError: A setting cannot be, or is not that of the store.
    """
    number, total = check_run(settings, devices=devices, shard=shard)
    folder = Path(settings.store_dir)
    say(f"Looking at the questions, the model {settings.model} and {folder}")
    questions = settings.questions()
    if repair and (folder / "rounds").exists():
        say(f"Repair of {folder}: {SampleStore(folder).repair()}")
    share = select_share(questions, (number, total))
    here = f" (share {shard} here)" if total > 1 else ""
    if _has_all(settings, share):
        report = GenerationReport(settings.store_dir, len(share), len(share), 0, 0, 0, 0, 0, 0.0)
        say(f"All {len(share):,} questions{here} are in {folder} already: nothing is sampled.")
    else:
        check_places(plan_run(settings, share))
        _keep_configuration(
            {**asdict(settings), "devices": devices, "shard": shard, "plugins": loaded_plugins()}, folder, number
        )
        number_each = (
            f"{settings.num_samples} samples to each of" if settings.plan is None else "the samples planned for"
        )
        say(f"Writing {number_each} {len(questions):,} questions{here} to {folder}")
        # Worker d of machine i takes those of the machine's questions whose hash, over n, leaves d: `select_share`.
        shares = [(number + total * device, total * devices) for device in range(devices)]
        with keeping(lambda: _what_is_kept(folder)):
            if devices == 1:
                report = sample_share(settings, shard=shares[0], progress=True)
            else:
                report = _sample_on_devices(settings, share, shares)
        say(str(report))
        report.check_complete()
    _join_when_complete(SampleStore(folder), {question.id for question in questions}, total=total)
    return report


def plan_run(settings: GenerationSettings, questions: Sequence[Question] | None = None) -> Plan:
    """Return what a run will do.

    Args:
        settings: The run.
        questions: Its questions; None counts those of the hub by the limit that was set, without asking it.
    """
    counts = [count_source(settings, name, role=settings.store_split) for name in settings.task]
    known = questions
    if questions is None and not any(get_task(name).is_remote(path=settings.path) for name in settings.task):
        known = settings.questions()
    numbers = [count.number for count in counts]
    plan = settings.sample_plan()
    sampling = plan_sampling(
        settings.store_dir,
        None if known is None else {question.id for question in known},
        num_samples=settings.num_samples,
        planned=None if plan is None else plan.samples,
        most_tokens=settings.sampling.max_new_tokens,
        most_questions=None if None in numbers else sum(number or 0 for number in numbers),
    )
    name = BUNDLED_NAME if settings.model == resolve_model(BUNDLED_NAME) else settings.model
    model = name if settings.engine.adapter is None else f"{name} with the adapter {settings.engine.adapter}"
    places = (Place("samples", settings.store_dir),)
    return Plan((f"{model}, engine {settings.engine.name}",), tuple(counts), (sampling,), places=places)


def _what_is_kept(store_dir: Path) -> str:
    store = SampleStore(store_dir)
    number = len(store.question_ids(include_parts=True)) if part_entries(store_dir) else 0
    return f"{number:,} questions with all their samples are in {store_dir}; the same command goes on from there."


def _has_all(settings: GenerationSettings, share: list[Question]) -> bool:
    """Return whether the store has the whole share; settings that are not the store's are refused at once."""
    check_can_draw(settings.engine, settings.sampling)
    if settings.engine.is_remote:
        return False
    plan = settings.sample_plan()
    store = open_existing(
        settings.store_dir,
        model=settings.model,
        revision=settings.engine.revision,
        adapter=settings.engine.adapter,
        chat=settings.chat(),
        sampling=settings.sampling,
        seed=settings.seed,
        num_samples=settings.num_samples if plan is None else None,
        plan=None if plan is None else plan.digest,
        splits=(settings.store_split,),
        top_up=settings.top_up,
    )
    return is_complete(store, {settings.store_split: share})


def _sample_on_devices(
    settings: GenerationSettings, share: list[Question], shards: list[tuple[int, int]]
) -> GenerationReport:
    """Sample ``share`` with one worker process for each of ``shards`` and add up their reports."""
    started = time.monotonic()
    wanted = settings.num_samples if settings.plan is None else None
    store, parts = SampleStore(settings.store_dir, num_samples=wanted), {part_name(shard) for shard in shards}
    new = not (store.path / "rounds").exists()
    missing = share if new else missing_questions(share, store, split=settings.store_split, round=0)
    before = store.committed_questions(parts=parts)
    busy = [shard for shard in shards if select_share(missing, shard)]  # no model is loaded to do nothing
    # Of a plan, or of what is topped up, nobody sees from here which questions are done, and how many responses.
    each, unit = (settings.num_samples, "responses")
    if settings.plan is not None or settings.top_up:
        each, unit = 1, "questions"
    with Progress(len(missing) * each, label=f"Sampling {settings.store_split}", unit=unit) as bar:

        def tick() -> None:
            done = (store.committed_questions(parts=parts) - before) * each
            bar.update(done - bar.done)

        reports = run_workers(asdict(settings), busy, gpus=settings.engine.num_gpus, on_tick=tick)
    return GenerationReport(
        store_dir=settings.store_dir,
        questions=len(share),
        reused=len(share) - len(missing),
        seconds=time.monotonic() - started,
        **{name: sum(report[name] for report in reports) for name in COUNTS},
    )


def _join_when_complete(store: SampleStore, wanted: set[str], *, total: int) -> None:
    """Join the parts when every question of the run is there: of ``total`` machines, the one that finishes last."""
    missing = len(wanted - store.question_ids(include_parts=True))
    if missing:
        say(f"{missing:,} questions belong to other shards and are not there yet; the last to finish joins the parts.")
        return
    manifest = store.join()
    if total > 1:
        say(f"Joined: {manifest.questions:,} questions, {manifest.rows:,} samples in {store.path / 'manifest.json'}")


def _keep_configuration(arguments: dict[str, Any], store_dir: Path, number: int) -> None:
    """Leave the resolved arguments beside the samples."""
    folder = store_dir / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"generate-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{number}.json"
    write_atomically(folder / name, to_json(json.loads(json.dumps(arguments))))
