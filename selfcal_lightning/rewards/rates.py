"""Success rates of rollouts, read from their store, and the targets of reward models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.steps import MARK, Rate
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.metrics.group_rewards import majority, share, soft_share

PREFIXES_FILE = "prefixes.jsonl"


def read_rates(rollouts_dir: str, *, policy: StoreFingerprint | None = None) -> dict[str, Rate]:
    """Return the success rate of every labelled prefix of a store, by ``prefix_id``; unreadable rollouts are wrong."""
    rates = read_rollouts(rollouts_dir, policy=policy)[1]
    if not rates:
        raise InputError(f"Rollouts in {rollouts_dir} have no labels. Sample questions with references.")
    return rates


def read_rollouts(
    rollouts_dir: str, *, policy: StoreFingerprint | None = None
) -> tuple[dict[str, int], dict[str, Rate]]:
    """Return the number of rollouts of every prefix of a store, and the success rates of the labelled ones."""
    index = _index_of(rollouts_dir, policy)
    labelled, right = ~np.isnan(index.correct), np.nan_to_num(index.correct)
    counts, rates = {}, {}
    for name, rows in _prefixes_in(index):
        counts[name] = rows.stop - rows.start
        if labelled[rows].any():
            rates[name] = Rate(float(right[rows].mean()), counts[name])
    return counts, rates


def read_agreement(
    rollouts_dir: str, answers: Mapping[str, str | None], *, policy: StoreFingerprint | None = None
) -> dict[str, Rate]:
    """Return the share of rollouts that end with a given answer to their question, by ``prefix_id``, without labels."""
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
    """Return rates by (question id, stripped text of the prefix), for readers with another tokenizer.

    Prefixes that differ in tokens or spaces alone are one text; it has the rollouts of all.
    """
    found: dict[tuple[str, str], Rate] = {}
    for _, line in read_json_lines(Path(rollouts_dir) / PREFIXES_FILE):
        if (rate := rates.get(line["id"])) is not None:
            place = line["question_id"], line["reasoning_prefix"].strip()
            if (other := found.get(place)) is not None:
                total = rate.rollouts + other.rollouts
                rate = Rate((rate.share * rate.rollouts + other.share * other.rollouts) / total, total)
            found[place] = rate
    return found


def _index_of(rollouts_dir: str, policy: StoreFingerprint | None) -> SampleIndex:
    if not (Path(rollouts_dir) / PREFIXES_FILE).is_file():
        raise InputError(f"Expected `rollouts` to be a folder that `selfcal rollout` filled, but got {rollouts_dir!r}.")
    store = SampleStore(rollouts_dir)
    if policy is not None:
        drawn = replace(store.round_manifest().fingerprint, seed=0, plan=None)
        if differences := drawn.differences(replace(policy, seed=0, plan=None)):
            found = "; ".join(differences)
            raise InputError(f"Rollouts in {store.path} are of another policy than the responses: {found}.")
    return store.index()


def _prefixes_in(index: SampleIndex) -> Iterator[tuple[str, slice]]:
    for start, stop in pairwise(index.edges):
        if MARK in index.question_id[start]:
            yield str(index.question_id[start]), slice(start, stop)


RewardTarget = Literal["outcome", "vote_share", "ssc", "consensus", "success_rate", "hard", "success_prob"]
CONSENSUS = "consensus"
LABEL_FREE = frozenset({"vote_share", "ssc", CONSENSUS})
OF_ROLLOUTS = frozenset({"success_rate", "hard", CONSENSUS})
OF_PREFIXES = "success_prob"  # of imported prefixes; known at their ends alone


def response_targets(
    target: RewardTarget,
    answers: Sequence[str | None],
    *,
    confidences: Sequence[float | None],
    correct: Sequence[bool | None],
) -> list[float | None]:
    """Return the target of each response to a question as a whole; None where it is unknown."""
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
