"""``selfcal generate``: sample responses with their confidences into a store, resumable, on many GPUs and machines."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.opening import EngineName, EngineOptions, check_can_draw
from selfcal_lightning.errors import InputError
from selfcal_lightning.files import to_json, write_atomically
from selfcal_lightning.interruptions import keeping
from selfcal_lightning.locations import BUNDLED_NAME, resolve_model
from selfcal_lightning.pipelines.devices import run_workers
from selfcal_lightning.pipelines.progress import Progress, say
from selfcal_lightning.pipelines.reuse import is_complete, open_existing
from selfcal_lightning.pipelines.sampling import GenerationReport, missing_questions, select_share
from selfcal_lightning.pipelines.shares import GenerationSettings, part_name, sample_share
from selfcal_lightning.plan import Place, Plan, check_places
from selfcal_lightning.prompts import DEFAULT_QUERY
from selfcal_lightning.records import Dtype, Question, SamplingSettings
from selfcal_lightning.store import SampleStore
from selfcal_lightning.store_manifest import check_place
from selfcal_lightning.store_parts import part_entries
from selfcal_lightning.store_plan import plan_sampling
from selfcal_lightning.tasks.parts import Part
from selfcal_lightning.tasks.registry import get_task
from selfcal_lightning.tasks.sources import count_source
from selfcal_lightning.user_prompts import Prompt

COUNTS = ("generated", "unreadable", "truncated", "refused", "left_out")


def run_generate(
    model: str,
    store_dir: str,
    task: list[str] | str,
    split: str = "train",
    path: str | None = None,
    part: Part | None = None,
    limit: int | None = None,
    offset: int = 0,
    store_split: str | None = None,
    chain_of_thought: bool = True,
    prompt: Prompt | None = None,
    num_samples: int = 32,
    engine: EngineName = "transformers",
    temperature: float = 0.8,
    edt_scale: float | None = 0.8,
    edt_theta: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 1024,
    seed: int = 0,
    query: str = DEFAULT_QUERY,
    dtype: Dtype = "auto",
    revision: str | None = None,
    adapter: str | None = None,
    max_batch: int | None = None,
    base_url: str | None = None,
    engine_args: dict[str, Any] | None = None,
    devices: int = 1,
    shard: str = "0/1",
    questions_per_shard: int = 64,
    max_failures: int = MAX_FAILURES,
    repair: bool = False,
    check: bool = False,
) -> GenerationReport:
    """Sample responses to the questions of tasks, with P(True) of each, into a store.

    A run that was killed goes on when the same command is started again, also with other ``devices`` and ``shard``,
    and ends with the samples of an unbroken run. On n machines with a shared folder, start machine i with
    ``--shard i/n``; the one that finishes last joins the parts, and readers see them from then on.

    Args:
        model: Folder or hub name of the model, or "bundled" for the tiny model that comes with the package.
        store_dir: Folder of the store, which holds nothing else; made when absent, completed when present.
        task: Name of a task, or a list of names.
        split: Split of the task's data set.
        path: Local file, of a `local_...` task in the one format of questions (`question`, `answer`, `id`, `task`),
            else with the columns of the task's hub data set; null reads the hub.
        part: The part of the questions that is set aside for "train", "validation" or "calibration" by a hash of their
            texts (80, 10, 10 %); null takes all.
        limit: Take the first so many questions of each task; null takes all.
        offset: Skip so many questions of each task before that.
        store_split: Split under which the samples are stored ("train" and "validation" are those that training
            reads); null is the same as ``split``.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.
        prompt: A prompt of one's own: `--prompt.system TEXT`, `--prompt.base none`, or `--prompt FILE.yaml` with
            `system` and `examples` (each with `question` and `response`). Null is the task's.
        num_samples: Responses to each question.
        engine: "transformers", "vllm" (an extra, faster) or "openai" (vLLM's server, on this machine or another).
        temperature: Fixed temperature, or the base of entropy-based dynamic temperature (EDT); 0 is greedy.
        edt_scale: N0 of EDT; null draws at the fixed temperature.
        edt_theta: Exponent theta of EDT.
        top_p: Mass of the nucleus; 1 keeps the whole vocabulary.
        max_new_tokens: Longest response in tokens.
        seed: Seed of the run; every sample has its own, derived from it.
        query: The confidence query.
        dtype: Of the weights; "auto" is the engine's choice.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter to sample with.
        max_batch: Sequences that an engine runs at once; null is the engine's choice.
        base_url: Address of the server, for the engine "openai"; null is http://127.0.0.1:8000/v1.
        engine_args: Further arguments of the engine's class, such as ``--engine_args.server_edt true``.
        devices: Worker processes on this machine, one a GPU (or CPU processes where there is none). Of an engine with
            `tensor_parallel_size` n, each takes n GPUs.
        shard: "i/n", this machine's share of the questions.
        questions_per_shard: Questions in one file of the store; what a kill can cost.
        max_failures: Requests that may fail in a row, such as those to a server that is out of order; then the run
            stops. Questions of which a request failed are left out, and the next run samples them.
        repair: First move damaged files of the store aside, and drop questions of which responses are empty since
            their requests failed, so that they are sampled again.
        check: Check all that can be checked, print the plan, and stop there.

    Returns:
        Counts of what this machine did.

    Raises:
        EngineStoppedError: The engine cannot go on, or ``max_failures`` requests failed in a row.
        RunError: Questions were left out, or a worker failed. What is complete is kept in all cases.
        InputError: A setting cannot be, or is not that of the store.
    """
    arguments = dict(locals())
    check_place(Path(store_dir))
    number, total = parse_shard(shard)
    if devices < 1:
        raise InputError(f"Expected `devices` to be at least 1, but got {devices}.")
    settings = GenerationSettings(
        model=resolve_model(model),
        store_dir=store_dir,
        task=[task] if isinstance(task, str) else list(task),
        split=split,
        path=path,
        part=part,
        limit=limit,
        offset=offset,
        store_split=store_split or split,
        chain_of_thought=chain_of_thought,
        prompt=prompt,
        num_samples=num_samples,
        engine=EngineOptions(engine, revision, adapter, dtype, max_batch, base_url, engine_args or {}),
        sampling=SamplingSettings(temperature, edt_scale, edt_theta, top_p, max_new_tokens),
        seed=seed,
        query=query,
        questions_per_shard=questions_per_shard,
        max_failures=max_failures,
    )
    settings.check()
    if check:
        sys.stdout.write(f"selfcal generate: checked; nothing is sampled or written. The plan:\n{plan_run(settings)}\n")
        return GenerationReport(store_dir, 0, 0, 0, 0, 0, 0, 0, 0.0)
    arguments |= {"model": settings.model, "task": settings.task, "store_split": settings.store_split}
    arguments["prompt"] = None if prompt is None else prompt.as_json()
    questions = settings.questions()
    if repair and (Path(store_dir) / "rounds").exists():
        say(f"Repair of {store_dir}: {SampleStore(store_dir).repair()}")
    share = select_share(questions, (number, total))
    if _has_all(settings, share):
        report = GenerationReport(store_dir, len(share), len(share), 0, 0, 0, 0, 0, 0.0)
        say(f"All {len(share):,} questions{_share_text(total, shard)} are in {store_dir} already: nothing is sampled.")
    else:
        check_places(plan_run(settings, share))
        _keep_configuration(arguments, Path(store_dir), number)
        here = _share_text(total, shard)
        say(f"Writing {num_samples} samples to each of {len(questions):,} questions{here} to {store_dir}")
        # Worker d of machine i takes those of the machine's questions whose hash, over n, leaves d: `select_share`.
        shards = [(number + total * device, total * devices) for device in range(devices)]
        with keeping(lambda: _what_is_kept(Path(store_dir))):
            if devices == 1:
                report = sample_share(settings, shard=shards[0], progress=True)
            else:
                report = _sample_on_devices(settings, share, shards)
        say(str(report))
        report.check_complete()
    _join_when_complete(SampleStore(store_dir), {question.id for question in questions}, total=total)
    return report


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


def plan_run(settings: GenerationSettings, questions: Sequence[Question] | None = None) -> Plan:
    """Return what a run will do.

    Args:
        settings: The run.
        questions: Its questions; None counts those of the hub by the limit that was set, without asking it.
    """
    counts = [
        count_source(
            name,
            settings.split,
            path=settings.path,
            part=settings.part,
            limit=settings.limit,
            offset=settings.offset,
            role=settings.store_split,
        )
        for name in settings.task
    ]
    known = questions
    if questions is None and not any(get_task(name).is_remote(path=settings.path) for name in settings.task):
        known = settings.questions()
    numbers = [count.number for count in counts]
    sampling = plan_sampling(
        settings.store_dir,
        None if known is None else {question.id for question in known},
        num_samples=settings.num_samples,
        most_tokens=settings.sampling.max_new_tokens,
        most_questions=None if None in numbers else sum(number or 0 for number in numbers),
    )
    name = BUNDLED_NAME if settings.model == resolve_model(BUNDLED_NAME) else settings.model
    model = name if settings.engine.adapter is None else f"{name} with the adapter {settings.engine.adapter}"
    places = (Place("samples", settings.store_dir),)
    return Plan((f"{model}, engine {settings.engine.name}",), tuple(counts), (sampling,), places=places)


def _share_text(total: int, shard: str) -> str:
    return f" (share {shard} here)" if total > 1 else ""


def _what_is_kept(store_dir: Path) -> str:
    entries = part_entries(store_dir)
    number = sum(entry.questions for entry in entries)
    return f"{number:,} questions with all their samples are in {store_dir}; the same command goes on from there."


def _has_all(settings: GenerationSettings, share: list[Question]) -> bool:
    """Return whether the store has the whole share; settings that are not the store's are refused at once."""
    check_can_draw(settings.engine, settings.sampling)
    if settings.engine.is_remote:
        return False
    store = open_existing(
        settings.store_dir,
        model=settings.model,
        revision=settings.engine.revision,
        adapter=settings.engine.adapter,
        chat=settings.chat(),
        sampling=settings.sampling,
        seed=settings.seed,
        num_samples=settings.num_samples,
    )
    return is_complete(store, {settings.store_split: share})


def _sample_on_devices(
    settings: GenerationSettings, share: list[Question], shards: list[tuple[int, int]]
) -> GenerationReport:
    """Sample ``share`` with one worker process for each of ``shards`` and add up their reports."""
    started = time.monotonic()
    store, parts = SampleStore(settings.store_dir), {part_name(shard) for shard in shards}
    new = not (store.path / "rounds").exists()
    missing = share if new else missing_questions(share, store, split=settings.store_split, round=0)
    before = store.committed_questions(parts=parts)
    busy = [shard for shard in shards if select_share(missing, shard)]  # no model is loaded to do nothing
    with Progress(len(missing) * settings.num_samples, label=f"Sampling {settings.store_split}") as bar:

        def tick() -> None:
            done = (store.committed_questions(parts=parts) - before) * settings.num_samples
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
