"""How rollouts ended, read from the store that holds them, and their records for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.steps import MARK, Rate
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.metrics.group_rewards import majority, share, soft_share

PREFIXES_FILE = "prefixes.jsonl"


def read_rates(rollouts_dir: str, *, policy: StoreFingerprint | None = None) -> dict[str, Rate]:
    """Return how the rollouts of a store ended, by ``prefix_id``; an unreadable one was wrong."""
    index = _index_of(rollouts_dir, policy)
    labelled = ~np.isnan(index.correct)
    if not labelled.any():
        raise InputError(f"Rollouts in {rollouts_dir} have no labels. Sample questions with references.")
    right = np.nan_to_num(index.correct)
    return {
        name: Rate(float(right[rows].mean()), rows.stop - rows.start)
        for name, rows in _prefixes_in(index)
        if labelled[rows].any()
    }


def read_agreement(
    rollouts_dir: str, answers: Mapping[str, str | None], *, policy: StoreFingerprint | None = None
) -> dict[str, Rate]:
    """Return how many rollouts of a store end with the answer of their question, by ``prefix_id``; no label is read."""
    index = _index_of(rollouts_dir, policy)
    found: dict[str, Rate] = {}
    for name, rows in _prefixes_in(index):
        wanted = answers.get(name.rpartition(MARK)[0])
        if wanted is not None:
            task = get_task(str(index.task[rows.start]))
            given = index.answer[rows].tolist()
            agreeing = sum(answer is not None and task.verify(answer, wanted) for answer in given)
            found[name] = Rate(agreeing / len(given), len(given))
    return found


def by_text(rollouts_dir: str, rates: Mapping[str, Rate]) -> dict[tuple[str, str], Rate]:
    """Return rates by (question id, text of the prefix without white space around it).

    For readers with another tokenizer than the policy's.
    """
    lines = (line for _, line in read_json_lines(Path(rollouts_dir) / PREFIXES_FILE))
    return {(line["question_id"], line["reasoning_prefix"].strip()): rates[line["id"]]
            for line in lines if line["id"] in rates}  # fmt: skip


SUCCESS_KEYS = ("question", "reasoning_prefix", "success_prob")


def success_records(rollouts_dir: str, outer: Iterable[tuple[str, str, float]] = ()) -> Iterator[dict[str, Any]]:
    """Yield ``{question, reasoning_prefix, success_prob}`` of every prefix whose rate is known."""
    for question, prefix, rate in outer:
        yield {"question": question, "reasoning_prefix": prefix, "success_prob": rate}
    rates = read_rates(rollouts_dir)
    for _, line in read_json_lines(Path(rollouts_dir) / PREFIXES_FILE):
        if (known := rates.get(line["id"])) is not None:
            shown = {name: line[name] for name in ("question", "reasoning_prefix")}
            yield {**shown, "success_prob": known.share}


def _index_of(rollouts_dir: str, policy: StoreFingerprint | None) -> SampleIndex:
    if not (Path(rollouts_dir) / PREFIXES_FILE).is_file():
        raise InputError(f"Expected `rollouts` to be a folder that `selfcal rollout` filled, but got {rollouts_dir!r}.")
    store = SampleStore(rollouts_dir)
    if policy is not None:
        _check_policy(store, policy)
    return store.index()


def _prefixes_in(index: SampleIndex) -> Iterator[tuple[str, slice]]:
    edges = np.flatnonzero(np.diff(index.question_index, prepend=-1, append=-1))
    for start, stop in pairwise(edges.tolist()):
        if MARK in index.question_id[start]:
            yield str(index.question_id[start]), slice(start, stop)


def _check_policy(store: SampleStore, policy: StoreFingerprint) -> None:
    drawn = replace(store.round_manifest().fingerprint, seed=0, plan=None)
    if differences := drawn.differences(replace(policy, seed=0, plan=None)):
        raise InputError(
            f"Rollouts in {store.path} are of another policy than the responses: {'; '.join(differences)}."
        )


RewardTarget = Literal["outcome", "vote_share", "ssc", "consensus", "success_rate", "hard", "success_prob"]
CONSENSUS = "consensus"
LABEL_FREE = frozenset({"vote_share", "ssc", CONSENSUS})
OF_ROLLOUTS = frozenset({"success_rate", "hard", CONSENSUS})
OF_PREFIXES = "success_prob"  # of responses that are prefixes, rolled out elsewhere: known at their ends alone


def check_target(target: str) -> None:
    if target not in get_args(RewardTarget):
        raise unknown_name("target", target, get_args(RewardTarget))


def response_targets(
    target: RewardTarget,
    answers: Sequence[str | None],
    *,
    confidences: Sequence[float | None],
    correct: Sequence[bool | None],
) -> list[float | None]:
    """Return what each response to a question learns as a whole; None where nobody can tell.

    Example:
        >>> response_targets("vote_share", ["7", "7", "8", None], confidences=[None] * 4, correct=[None] * 4)
        [0.6666666666666666, 0.6666666666666666, 0.3333333333333333, 0.0]
        >>> response_targets("outcome", ["7", None], confidences=[None] * 2, correct=[True, None])
        [1.0, 0.0]
    """
    if target == "vote_share":
        return share(answers)
    if target == "ssc":
        return soft_share(answers, confidences)
    if target == CONSENSUS:
        return majority(answers)
    labelled = any(label is not None for label in correct)
    return [
        float(label) if label is not None else 0.0 if labelled and answer is None else None
        for answer, label in zip(answers, correct, strict=True)
    ]
