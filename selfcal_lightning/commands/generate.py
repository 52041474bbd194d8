"""``selfcal generate``: sample responses with their confidences into a store, resumable, on many GPUs and machines."""

import sys
from typing import Any

from selfcal_lightning.engines.sampling.running import GenerationSettings, check_run, plan_run, sample_questions
from selfcal_lightning.engines.sampling.sampler import GenerationReport
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.folders import resolve_model


def run_generate(
    model: str,
    store_dir: str,
    task: list[str] | str,
    split: str = "train",
    store_split: str | None = None,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
    devices: int = 1,
    shard: str = "0/1",
    repair: bool = False,
    check: bool = False,
    **settings: Any,
) -> GenerationReport:
    """Sample responses to the questions of tasks, with P(True) of each, into a store.

    After a kill, the same command continues, also with other ``devices`` and ``shard``, and ends with the samples of an
    unbroken run. On n machines with a shared folder, start machine i with
    ``--shard i/n``; the one that finishes last joins the parts, and readers see them from then on.

    Args:
        model: Folder or hub name of the model, or "bundled" for the tiny model that comes with the package.
        store_dir: Folder of the store, which holds nothing else. Made if absent, completed if present.
        task: Name of a task, or a list of names.
        split: Split of the task's data set.
        store_split: Stores the samples under this split (training reads "train" and "validation"); null is ``split``.
        engine: Which engine samples, and how.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter to sample with.
        devices: Number of worker processes on this machine: one for each GPU, or CPU processes. With
            `tensor_parallel_size` n, each takes n GPUs.
        shard: Samples share i of n of the questions, written "i/n", on this machine.
        repair: First moves damaged files of the store aside, and drops questions with responses that are empty because
            their requests failed; both are sampled again.
        check: Checks names, paths, memory and disk, prints the plan, and stops before anything is sampled.
        settings: Fields of ``GenerationSettings``.
    """
    run = GenerationSettings(
        model=resolve_model(model),
        store_dir=store_dir,
        task=[task] if isinstance(task, str) else list(task),
        split=split,
        store_split=store_split or split,
        engine=engine.of(revision=revision, adapter=adapter),
        rollouts=None,
        **settings,
    )
    if check:
        check_run(run, devices=devices, shard=shard)
        sys.stdout.write(f"selfcal generate: checked; nothing is sampled or written. The plan:\n{plan_run(run)}\n")
        return GenerationReport(store_dir, 0, 0, 0, 0, 0, 0, 0, 0.0)
    return sample_questions(run, devices=devices, shard=shard, repair=repair)


generate = run_generate
