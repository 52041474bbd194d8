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
        store_dir: Folder of the store, which holds nothing else. Made if absent, completed if present.
        task: Name of a task, or a list of names.
        split: Split of the task's data set.
        path: Local file: questions (`question`, `answer`, `id`, `task`) for a `local_...` task, else rows with the
            columns of the task's hub data set. Null reads the hub.
        part: Takes only the "train", "validation" or "calibration" part (80, 10, 10 %, by a hash of the text).
        limit: Takes only this many questions of each task; null takes all.
        offset: Skips this many questions of each task first.
        store_split: Stores the samples under this split (training reads "train" and "validation"); null is ``split``.
        chain_of_thought: Asks for reasoning before the answer.
        prompt: A prompt of your own: `--prompt.system TEXT`, `--prompt.base none`, or `--prompt FILE.yaml` with
            `system` and `examples` (each with `question` and `response`). Null is the task's.
        num_samples: Draws this many responses to each question.
        extend: Draws more responses to questions of ``store_split`` that have fewer than ``num_samples``. Existing ones
            stay, and the new ones are those that a single larger run would draw. Other splits keep their number.
        plan: File of `selfcal allocate` that says how many responses each question gets, instead of ``num_samples``. It
            must name exactly the questions of the run.
        engine: Which engine samples, and how.
        sampling: How responses are drawn.
        seed: Seeds the run; every sample has its own seed, derived from this one.
        query: The confidence query.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter to sample with.
        devices: Number of worker processes on this machine: one for each GPU, or CPU processes. With
            `tensor_parallel_size` n, each takes n GPUs.
        shard: Samples share i of n of the questions, written "i/n", on this machine.
        questions_per_shard: Questions in one file of the store. A killed run loses at most the files it was writing.
        max_failures: Stops the run after this many failed requests in a row, such as those to a server that is down.
            Questions with a failed request are left out, and the next run samples them.
        repair: First moves damaged files of the store aside, and drops questions with responses that are empty because
            their requests failed; both are sampled again.
        check: Checks names, paths, memory and disk, prints the plan, and stops before anything is sampled.
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
