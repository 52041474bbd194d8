"""A run that samples: its plan, its share of the questions on this machine's devices, and the joining of its parts."""

import _thread
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.core.files import to_json, write_atomically
from selfcal_lightning.core.imports import keep_bitsandbytes_quiet
from selfcal_lightning.core.last_resort import FAILED, explain, wants_traceback
from selfcal_lightning.core.plan import Place, Plan, check_places
from selfcal_lightning.core.plugins import load_plugins_of_parent, loaded_plugins
from selfcal_lightning.core.processes import watch_parent
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.core.signals import INTERRUPTION, keeping
from selfcal_lightning.data.store.manifest import check_place
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.parts import part_entries
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Part
from selfcal_lightning.data.tasks.registry import check_source, count_source, get_task, load_source
from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.opening import check_can_draw, check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling import sampler
from selfcal_lightning.engines.sampling.plan import SamplePlan, load_plan
from selfcal_lightning.engines.sampling.rollouts import Prefix, RolloutSource
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, Prompt
from selfcal_lightning.models.folders import BUNDLED_NAME, resolve_model
from selfcal_lightning.records import Question, SamplingSettings


@dataclass(frozen=True)
class GenerationSettings:
    """What all processes of a run share: the resolved arguments of ``selfcal generate``.

    With ``rollouts``, prefixes of stored responses replace the questions of tasks.

    Attributes:
        path: Local file: questions (`question`, `answer`, `id`, `task`) for a `local_...` task, else rows with the
            columns of the task's hub data set. Null reads the hub.
        part: Takes only the "train", "validation" or "calibration" part (80, 10, 10 %, by a hash of the text).
        limit: Takes only this many questions of each task; null takes all.
        offset: Skips this many questions of each task first.
        chain_of_thought: Asks for reasoning before the answer.
        prompt: A prompt of your own: `--prompt.system TEXT`, `--prompt.base none`, or `--prompt FILE.yaml` with
            `system` and `examples` (each with `question` and `response`). Null is the task's.
        num_samples: Draws this many responses to each question.
        extend: Draws more responses to questions of ``store_split`` that have fewer than ``num_samples``. Existing ones
            stay, and the new ones are those that a single larger run would draw. Other splits keep their number.
        plan: File of `selfcal allocate` that says how many responses each question gets, instead of ``num_samples``. It
            must name exactly the questions of the run.
        sampling: How responses are drawn.
        seed: Seeds the run; every sample has its own seed, derived from this one.
        query: The confidence query.
        questions_per_shard: Questions in one file of the store. A killed run loses at most the files it was writing.
        max_failures: Stops the run after this many failed requests in a row, such as those to a server that is down.
            Questions with a failed request are left out, and the next run samples them.
    """

    model: str
    store_dir: str
    task: list[str]
    split: str
    store_split: str
    num_samples: int = 32
    engine: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    query: str = DEFAULT_QUERY
    seed: int = 0
    path: str | None = None
    part: Part | None = None
    limit: int | None = None
    offset: int = 0
    chain_of_thought: bool = True
    prompt: Prompt | None = None
    questions_per_shard: int = 64
    max_failures: int = MAX_FAILURES
    plan: str | None = None
    extend: bool = False
    rollouts: RolloutSource | None = None

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Self:
        """Return the settings that ``dataclasses.asdict`` made ``content`` of, perhaps in another process."""
        engine, sampling = EngineOptions(**content["engine"]), SamplingSettings(**content["sampling"])
        prompt, rollouts = content["prompt"] and Prompt.from_json(content["prompt"]), content["rollouts"]
        own = {"engine": engine, "sampling": sampling, "prompt": prompt}
        return cls(**{**content, **own, "rollouts": rollouts and RolloutSource(**rollouts)})

    def chat(self) -> ChatFormat:
        return load_chat(self.engine, self.model, query=self.query, prompt=self.prompt)

    def check(self) -> None:
        """Check everything that needs no model in memory, cheapest first."""
        check_at_least(1, num_samples=self.num_samples, questions_per_shard=self.questions_per_shard)
        check_at_least(1, max_failures=self.max_failures)
        if self.extend and self.plan is not None:
            raise InputError("Expected `extend` without a `plan`, which says how many responses each question gets.")
        if not self.task and self.rollouts is None:
            raise InputError("Expected `task` to name at least one task, but got none.")
        if self.path is not None and len(self.task) > 1:
            raise InputError(f"Expected one `task` when `path` is given, but got {self.task}. Run them one by one.")
        for name in self.task:
            check_source(self, name)
        check_place(Path(self.store_dir))
        _ = self.planned  # reads it, which refuses what is no plan
        check_engine(self.engine, self.model)

    def questions(self) -> list[Question]:
        if self.rollouts is not None:
            return [prefix.question for prefix in self.prefixes]
        questions = [question for name in self.task for question in load_source(self, name, prompt=self.prompt)]
        sampler.check_questions(questions)
        return questions if self.planned is None else self.planned.chosen(questions)

    @cached_property
    def prefixes(self) -> list[Prefix]:
        """What is continued where there are ``rollouts``."""
        source = self.rollouts
        return [] if source is None else source.read(self.chat(), longest=self.sampling.max_new_tokens)

    @cached_property
    def planned(self) -> SamplePlan | None:
        """The plan; None where every question gets ``num_samples`` responses."""
        return None if self.plan is None else load_plan(self.plan)

    @property
    def of_store(self) -> dict[str, Any]:
        """What the samples of a store are, besides the model and the prompt."""
        names = ("sampling", "seed", "num_samples", "extend")
        return {"plan": self.planned, **{name: getattr(self, name) for name in names}}


def sample_share(settings: GenerationSettings, *, shard: tuple[int, int], progress: bool) -> sampler.GenerationReport:
    """Load the model and sample one share into its own part of the store."""
    questions, chat = settings.questions(), settings.chat()
    engine = open_engine(settings.engine, settings.model, chat=chat)
    try:
        return sampler.generate_samples(
            questions,
            settings.store_dir,
            split=settings.store_split,
            engine=engine,
            chat=chat,
            **settings.of_store,
            prefixes={one.question.id: one.prefix_ids for one in settings.prefixes},
            shard=shard,
            questions_per_shard=settings.questions_per_shard,
            max_failures=settings.max_failures,
            progress=progress,
        )
    finally:
        engine.close()


POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0


def run_workers(
    settings: Mapping[str, Any], shards: Sequence[tuple[int, int]], *, gpus: int = 1, on_tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Run a worker for each of ``shards`` to the end and return their reports; one that fails leaves the others be."""
    environments = [worker_environment(position, len(shards), gpus=gpus) for position in range(len(shards))]
    with tempfile.TemporaryDirectory(prefix="selfcal-") as folder:
        reports = [Path(folder) / f"{position}.json" for position in range(len(shards))]
        workers: list[subprocess.Popen[str]] = []
        try:
            for shard, report, environment in zip(shards, reports, environments, strict=True):
                job = {"settings": dict(settings), "shard": list(shard), "report": str(report)}
                workers.append(_start(job, environment))
            while any([worker.poll() is None for worker in workers]):  # polls all of them
                on_tick()
                time.sleep(POLL_SECONDS)
            on_tick()
        finally:
            _end(workers)
        if failed := [position for position, worker in enumerate(workers) if worker.returncode != 0]:
            ended = f"worker {failed[0]} ended with status {workers[failed[0]].returncode}"
            found = f"{ended} ({len(failed)} failed; see their messages above)"
            way_out = "What was committed is kept: start the same command again to continue."
            raise RunError(f"Expected {len(workers)} workers to finish, but {found}. {way_out}")
        return [json.loads(report.read_text()) for report in reports]


def worker_environment(position: int, workers: int, *, gpus: int = 1) -> dict[str, str]:
    import torch

    environment = dict(os.environ)
    count = torch.cuda.device_count()
    if count == 0:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        return environment
    if count < workers * gpus:
        each = "" if gpus == 1 else f", each of which takes {gpus} (`tensor_parallel_size`)"
        raise InputError(
            f"Expected `devices` to be at most {count // gpus} with {count} GPUs in sight, but got {workers}{each}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(device) for device in range(count)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[position * gpus : (position + 1) * gpus])
    return environment


def _start(job: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "selfcal_lightning.engines.sampling.running"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True, process_group=0)  # noqa: S603
    print(json.dumps(job), file=worker.stdin, flush=True)
    return worker


def _end(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Cut the lifelines and wait; a worker that does not end is killed."""
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
    deadline = time.monotonic() + GRACE_SECONDS + 5.0
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def work() -> int:
    """Run the job given on standard input and return the exit status."""
    keep_bitsandbytes_quiet()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=watch_parent, args=(_thread.interrupt_main, GRACE_SECONDS), daemon=True).start()
    number, total = job["shard"]
    try:
        load_plugins_of_parent()
        report = sample_share(GenerationSettings.from_plain(job["settings"]), shard=(number, total), progress=False)
    except KeyboardInterrupt:  # the parent, which was asked to stop, says so for all
        return INTERRUPTION.status
    except Exception as error:  # the parent hears of it by this message and the status
        if wants_traceback():
            raise
        say(explain(error, who=f"worker {number} of {total}"))
        return FAILED
    Path(job["report"]).write_text(json.dumps(asdict(report)))
    return 0


COUNTS = ("generated", "unreadable", "truncated", "cut_read", "refused", "left_out")


def parse_shard(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f"Expected `shard` to be 'i/n' with 0 <= i < n, such as '0/4', but got {shard!r}.")
    return int(match[1]), int(match[2])


def check_run(settings: GenerationSettings, *, devices: int = 1, shard: str = "0/1") -> tuple[int, int]:
    """Refuse what can be refused before anything is loaded, and return (i, n) of ``shard``."""
    place = parse_shard(shard)
    check_at_least(1, devices=devices)
    settings.check()
    return place


def sample_questions(
    settings: GenerationSettings, *, devices: int = 1, shard: str = "0/1", repair: bool = False
) -> sampler.GenerationReport:
    """Sample this machine's share of the questions into the store, and join its parts when all are there."""
    number, total = check_run(settings, devices=devices, shard=shard)
    folder = Path(settings.store_dir)
    say(f"Looking at the questions, the model {settings.model} and {folder}")
    questions = settings.questions()
    if repair and (folder / "rounds").exists():
        say(f"Repair of {folder}: {SampleStore(folder).repair()}")
    share = sampler.select_share(questions, (number, total))
    what = "questions" if settings.rollouts is None else "prefixes"
    here = f"{what} (share {shard} here)" if total > 1 else what
    if _has_all(settings, share):
        report = sampler.GenerationReport(settings.store_dir, len(share), len(share))
        say(f"All {len(share):,} {here} are in {folder} already: nothing is sampled.")
    else:
        check_places(plan_run(settings, share))
        arguments = {**asdict(settings), "devices": devices, "shard": shard, "plugins": loaded_plugins()}
        file = folder / "runs" / f"generate-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(arguments))
        samples = "1 sample" if settings.num_samples == 1 else f"{settings.num_samples} samples"
        each = "the samples planned for" if settings.plan else f"{samples} to each of"
        say(f"Writing {each} {len(questions):,} {here} to {folder}")
        # Of machine i of n, worker d takes share i + n d of n * devices; see `select_share`.
        shares = [(number + total * device, total * devices) for device in range(devices)]
        with keeping(lambda: _what_is_kept(folder)):
            if devices == 1:
                report = sample_share(settings, shard=shares[0], progress=True)
            else:
                report = _sample_on_devices(settings, share, shares)
        report = replace(report, what=what)
        say(str(report))
        report.check_complete()
    store = SampleStore(folder)
    if missing := len({question.id for question in questions} - store.question_ids(include_parts=True)):
        say(f"{missing:,} questions belong to other shards and are not there yet; the last to finish joins the parts.")
        return report
    manifest = store.join()
    if total > 1:
        say(f"Joined: {manifest.questions:,} questions, {manifest.rows:,} samples in {store.path / 'manifest.json'}")
    return report


def plan_run(settings: GenerationSettings, questions: Sequence[Question] | None = None) -> Plan:
    counts = [count_source(settings, name, role=settings.store_split) for name in settings.task]
    known = questions
    if questions is None and not any(get_task(name).is_remote(path=settings.path) for name in settings.task):
        known = settings.questions()
    numbers = [count.number for count in counts]
    sampling = plan_sampling(
        settings.store_dir,
        None if known is None else {question.id for question in known},
        num_samples=settings.num_samples,
        planned=None if settings.planned is None else settings.planned.samples,
        most_tokens=settings.sampling.max_new_tokens,
        most_questions=None if None in numbers else sum(number or 0 for number in numbers),
    )
    name = BUNDLED_NAME if settings.model == resolve_model(BUNDLED_NAME) else settings.model
    model = name if settings.engine.adapter is None else f"{name} with the adapter {settings.engine.adapter}"
    speed = None
    if not settings.engine.is_remote and sampling.missing:
        from selfcal_lightning.models.causal_lm import guess_speed  # loads PyTorch

        speed = guess_speed(settings.model, revision=settings.engine.revision)
    return Plan(
        (f"{model}, engine {settings.engine.name}",),
        tuple(counts),
        (sampling,),
        speed=() if speed is None else (speed,),
        places=(Place("samples", settings.store_dir),),
    )


def _what_is_kept(store_dir: Path) -> str:
    store = SampleStore(store_dir)
    number = len(store.question_ids(include_parts=True)) if part_entries(store_dir) else 0
    return f"{number:,} questions with all their samples are in {store_dir}; the same command continues from there."


def _has_all(settings: GenerationSettings, share: list[Question]) -> bool:
    """Return whether the store has the whole share; settings that are not its own are refused at once."""
    engine = settings.engine
    check_can_draw(engine, settings.sampling)
    return not engine.is_remote and sampler.is_complete(
        settings.store_dir,
        {settings.store_split: share},
        model=settings.model,
        revision=engine.revision,
        adapter=engine.adapter,
        chat=settings.chat(),
        **settings.of_store,
    )


def _sample_on_devices(
    settings: GenerationSettings, share: list[Question], shards: list[tuple[int, int]]
) -> sampler.GenerationReport:
    """Sample ``share`` with one worker process for each of ``shards`` and add up their reports."""
    started = time.monotonic()
    store = SampleStore(settings.store_dir, num_samples=None if settings.plan else settings.num_samples)
    parts = {sampler.part_name(shard) for shard in shards}
    new = not (store.path / "rounds").exists()
    missing = share if new else sampler.missing_questions(share, store, split=settings.store_split, round=0)
    before = store.committed_questions(parts=parts)
    busy = [shard for shard in shards if sampler.select_share(missing, shard)]  # no model is loaded to do nothing
    # With a plan, or when a store is extended, how many responses a finished question got is not known here.
    uneven = settings.plan is not None or settings.extend
    each, unit = (1, "questions") if uneven else (settings.num_samples, "responses")
    with Progress(len(missing) * each, label=f"Sampling {settings.store_split}", unit=unit) as bar:

        def tick() -> None:
            done = (store.committed_questions(parts=parts) - before) * each
            bar.update(done - bar.done)

        reports = run_workers(asdict(settings), busy, gpus=settings.engine.num_gpus, on_tick=tick)
    counts = {name: sum(report[name] for report in reports) for name in COUNTS}
    reused, seconds = len(share) - len(missing), time.monotonic() - started
    return sampler.GenerationReport(settings.store_dir, len(share), reused, seconds=seconds, **counts)


if __name__ == "__main__":
    sys.exit(work())
