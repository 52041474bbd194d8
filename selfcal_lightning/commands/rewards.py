"""``selfcal rollout`` and ``import-prefixes``: success rates of the prefixes of responses."""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.core.files import check_replaceable, has_first_keys, read_json_lines, write_json_lines
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.pools.importing import ImportReport, import_pool
from selfcal_lightning.data.pools.line_format import TRL_FIELDS, StepLabels, trl_row
from selfcal_lightning.data.pools.published import SUCCESS_FIELDS, write_success_pool
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.store.manifest import StoreFingerprint, round_file
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.sampling.rollouts import RolloutSource, check_source, describe_prefixes
from selfcal_lightning.engines.sampling.running import GenerationSettings, sample_questions
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, stated_prompt
from selfcal_lightning.models.folders import model_folder, resolve_model, weights_sha256
from selfcal_lightning.records import IMPORTED, SamplingSettings
from selfcal_lightning.rewards.rates import PREFIXES_FILE, read_rollouts


@dataclass(frozen=True)
class RolloutReport:
    prefixes: int
    rolled_out: int
    rollouts: int
    success: float | None


def run_rollout(
    samples_dir: str,
    store_dir: str,
    model: str | None = None,
    split: str = "train",
    limit: int | None = None,
    responses: int = 8,
    prefixes: int | None = None,
    at: list[int] | None = None,
    num_rollouts: int = 8,
    steps: Steps = "auto",
    export: str | None = None,
    export_trl: str | None = None,
    labels: StepLabels = "hard",
    engine: EngineSettings = EngineSettings(),
    sampling: SamplingSettings | None = None,
    seed: int = 0,
    revision: str | None = None,
    adapter: str | None = None,
    devices: int = 1,
    shard: str = "0/1",
    questions_per_shard: int = 64,
    max_failures: int = MAX_FAILURES,
    extend: bool = False,
) -> RolloutReport:
    """Continue the prefixes of stored responses several times each, into a store of their own.

    Equal prefixes of responses to a question are one, and are rolled out once. What is stored is the whole response,
    prefix and continuation. After a kill, the same command continues, also with other ``devices`` and
    ``shard``; more prefixes or responses are added to what is there.

    Args:
        samples_dir: Store of the responses whose prefixes are continued.
        store_dir: Folder of the store for the rollouts.
        model: Folder or hub name of the policy, or "bundled"; null takes the model that sampled the responses.
        split: Takes responses of this split.
        limit: Takes only this many questions, by id; null takes all.
        responses: Takes only this many responses to each question.
        prefixes: Takes this many prefixes of each response, evenly spread over its inner steps; null takes all of them.
        at: Ends prefixes after these numbers of steps, such as [1, 2, 5], if a response has more; null: ``prefixes``.
        num_rollouts: Draws this many rollouts from each prefix.
        steps: Where steps end: sentence, line, blank_line, heading, marker:TEXT (after that text), or auto, the
            coarsest of the first four that a response has.
        export: Writes `question`, `reasoning_prefix` and `success_prob` of every prefix to this JSON-lines file, with
            the empty prefix of each question and whole responses.
        export_trl: Writes TRL's `prompt`, `completions` and `labels` to this JSON-lines file, for every response whose
            steps are all rolled out.
        labels: Labels of `export_trl`: "hard" (any rollout from the step was right) or "rate" (the share that was).
        engine: Which engine samples, and how.
        sampling: How continuations are drawn; null draws them as the responses were.
        seed: Seeds the run.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter to sample with.
        devices: Number of worker processes on this machine.
        shard: Continues share i of n of the prefixes, written "i/n", on this machine.
        questions_per_shard: Prefixes in one file of the store. A killed run loses at most the files it was writing.
        max_failures: Stops the run after this many failed requests in a row.
        extend: Draws more rollouts from prefixes that have fewer than ``num_rollouts``. Existing ones stay, and the new
            ones are those that a single larger run would draw.
    """
    source = RolloutSource(samples_dir, split, limit, responses, prefixes, steps, None if at is None else tuple(at))
    if labels not in get_args(StepLabels):
        raise unknown_name("labels", labels, get_args(StepLabels))
    check_source(source)
    policy = SampleStore(samples_dir).round_manifest().fingerprint
    settings = GenerationSettings(
        model=_policy_of(policy, model, revision=revision),
        store_dir=store_dir,
        task=[],
        split=split,
        limit=limit,
        store_split=split,
        prompt=stated_prompt(policy.prompt.further),
        num_samples=num_rollouts,
        engine=engine.of(revision=revision or policy.model.revision, adapter=adapter),
        sampling=sampling or policy.sampling or SamplingSettings(),
        seed=seed,
        query=policy.prompt.query or DEFAULT_QUERY,
        questions_per_shard=questions_per_shard,
        max_failures=max_failures,
        extend=extend,
        rollouts=source,
    )
    if export is not None and export_trl is not None and Path(export).resolve() == Path(export_trl).resolve():
        raise InputError(f"`export` and `export_trl` must be different files, got {export!r} twice.")
    for option, path, keys, kind in (
        ("export", export, SUCCESS_FIELDS, "earlier success rates"),
        ("export_trl", export_trl, TRL_FIELDS, "an earlier file for TRL"),
    ):
        if path is not None:
            check_replaceable(path, partial(has_first_keys, keys), option=option, kind=kind)
    if Path(store_dir).exists() and Path(store_dir).samefile(samples_dir):
        raise InputError(f"Expected `store_dir` to be another folder than `samples_dir`, but got {store_dir!r} twice.")
    check_at_least(1, num_rollouts=num_rollouts)
    if not extend and round_file(Path(store_dir), 0).is_file():
        known = SampleStore(store_dir).round_manifest().samples_of(split)
        if known is not None and num_rollouts > known:
            raise InputError(
                f"Expected `num_rollouts` to be at most {known}, the rollouts of a prefix in {store_dir}, but got "
                f"{num_rollouts}. Set `extend` to draw the others, use another `store_dir`, or ask for fewer."
            )
    chat = settings.chat()
    wanted = source.read(chat, longest=settings.sampling.max_new_tokens, tell=True)
    if (export is not None or export_trl is not None) and all(one.question.reference is None for one in wanted):
        option = "export_trl" if export is None else "export"
        raise InputError(f"`{option}` needs reference answers, but no question in {samples_dir} has one. Leave it out.")
    sample_questions(settings, devices=devices, shard=shard)
    kept = Path(store_dir) / PREFIXES_FILE
    earlier = {line["id"]: line for _, line in read_json_lines(kept)} if kept.is_file() else {}
    described = {**earlier, **{line["id"]: line for line in describe_prefixes(wanted, chat)}}
    write_json_lines(kept, list(described.values()))
    counts, rates = read_rollouts(store_dir) if (Path(store_dir) / "manifest.json").is_file() else ({}, {})
    found = [counts[one.question.id] for one in wanted if one.question.id in counts]
    shares = [rates[one.question.id].share for one in wanted if one.question.id in rates]
    if export is not None:
        outer = list(source.outer_rates(chat))
        inner = [(described[name]["question"], described[name]["reasoning_prefix"], rates[name].share)
                 for name in described if name in rates]  # fmt: skip
        write_json_lines(Path(export), [dict(zip(SUCCESS_FIELDS, row, strict=True)) for row in (*outer, *inner)])
        whole = f"{len(outer):,} questions and whole responses"
        say(f"Wrote the success rates of {len(inner):,} prefixes and of {whole} to {export}")
    if export_trl is not None:
        labelled = list(source.labelled(chat, rates))
        rows = [trl_row(*one, labels) for one in labelled if one is not None]
        write_json_lines(Path(export_trl), rows)
        say(
            f"Wrote the steps of {len(rows):,} responses to {export_trl}; left out {len(labelled) - len(rows):,} "
            "without steps or a label, or of which some steps are not rolled out"
        )
    say(f"{len(found):,} of {len(wanted):,} distinct prefixes have {sum(found):,} rollouts in {store_dir}")
    return RolloutReport(len(wanted), len(found), sum(found), sum(shares) / len(shares) if shares else None)


def _policy_of(policy: StoreFingerprint, model: str | None, *, revision: str | None) -> str:
    """Return the model to roll out with: the one that sampled the responses, where that is known."""
    sampled = policy.model
    if model is None:
        if sampled.model in (None, IMPORTED):
            raise InputError("Expected `model` to name the policy, but got null for responses made elsewhere.")
        return resolve_model(sampled.model)
    place = resolve_model(model)
    model_folder(place, revision=revision)
    if sampled.weights_sha256 not in (None, weights_sha256(place, revision=revision)):
        raise InputError(
            f"Expected `model` to be the policy that sampled the responses, {sampled.model!r}, but got {model!r} with "
            "other weights. Leave `model` out, or sample responses of this one first."
        )
    return place


def run_import_prefixes(
    path: str, store_dir: str, task: str, split: str = "train", separator: str = "\n"
) -> ImportReport:
    """Read `question`, `reasoning_prefix`, `success_prob` of JSON lines into a store to train a reward model on.

    A line with `prompt`, `completions` and `labels`, as TRL has them, is a prefix for each of its steps.

    Every prefix becomes a response, whose rate is what `--model.target success_prob` learns at its end. Train without
    `train`, `validation` and `test`, which would sample responses, with as many `num_samples` as a question has
    prefixes at most, and as `total_tuples` the number of all. A prefix that is given different rates learns their mean.
    A record with an empty prefix, the rate of the question alone, is left out and counted: there is nothing of a
    response to read.

    Args:
        path: The JSON-lines file, as `selfcal rollout --export` writes it.
        store_dir: Folder of the store to write. Importing the same file again completes it.
        task: Task of the questions, which writes their prompts, such as local_number.
        split: Stores the questions under this split.
        separator: Text between two steps in TRL's rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "prefixes.jsonl"
        counts = write_success_pool(path, pool, task=task, split=split, separator=separator)
        report = import_pool(pool, store_dir, prefixes_of=path)
    of = f"{report.questions:,} questions, at most {counts.most:,} of one,"
    say(f"Imported {counts.prefixes:,} prefixes of {of} from {path} to {store_dir}")
    if counts.contradicting:
        say(f"Prefixes with different rates in {path}: {counts.contradicting:,}. Each has the mean of its rates.")
    if counts.bare or counts.without_steps:
        empty = f"{counts.bare:,} records with an empty `reasoning_prefix`, {counts.without_steps:,} rows without steps"
        say(f"Left out of {path}: {empty}: there is nothing of a response to read in them.")
    return replace(report, dropped=counts.bare + counts.without_steps)
