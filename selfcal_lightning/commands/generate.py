"""``selfcal generate``: sample responses with their confidences into a store, resumable, on many GPUs and machines."""

from __future__ import annotations

import sys

from selfcal_lightning.data.tasks.base import Part
from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.sampling.running import GenerationSettings, check_run, plan_run, sample_questions
from selfcal_lightning.engines.sampling.sampler import GenerationReport
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import SamplingSettings


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
    extend: bool = False,
    plan: str | None = None,
    engine: EngineSettings = EngineSettings(),
    sampling: SamplingSettings = SamplingSettings(),
    seed: int = 0,
    query: str = DEFAULT_QUERY,
    revision: str | None = None,
    adapter: str | None = None,
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
        extend: Draw more responses to the questions of ``store_split`` where the store has fewer than ``num_samples``
            of each; what is there stays, and the others are those of a run that draws all at once. Other splits keep
            their number.
        plan: File of `selfcal allocate` that says how many responses each question gets, in the place of
            ``num_samples``; it names exactly the questions of the run.
        engine: Which engine samples, and how.
        sampling: How responses are drawn.
        seed: Seed of the run; every sample has its own, derived from it.
        query: The confidence query.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter to sample with.
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
    """
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
        engine=engine.of(revision=revision, adapter=adapter),
        sampling=sampling,
        seed=seed,
        query=query,
        questions_per_shard=questions_per_shard,
        max_failures=max_failures,
        plan=plan,
        extend=extend,
    )
    if check:
        check_run(settings, devices=devices, shard=shard)
        sys.stdout.write(f"selfcal generate: checked; nothing is sampled or written. The plan:\n{plan_run(settings)}\n")
        return GenerationReport(store_dir, 0, 0, 0, 0, 0, 0, 0, 0.0)
    return sample_questions(settings, devices=devices, shard=shard, repair=repair)


generate = run_generate
