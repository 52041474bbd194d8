"""What a round of a store teaches: rewards, advantages and targets of its responses, computed when they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from selfcal_lightning.confidence.fitting.fusion import Fusion
from selfcal_lightning.datamodules.ssc.mixture import FloatArray
from selfcal_lightning.datamodules.ssc.tuples import question_slices
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.advantages import Scale, group_advantages
from selfcal_lightning.functional.consistency import soft_self_consistency
from selfcal_lightning.functional.rewards import GroupReward, PoolTarget, anchored_soft_share
from selfcal_lightning.records import QuestionSamples, SamplingSettings
from selfcal_lightning.selection.group_rewards import ANNOTATIONS, FUSED_FROM, group_rewards
from selfcal_lightning.selection.picking import fit_votes, without_references
from selfcal_lightning.store.columns import counted_samples
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore


@dataclass(frozen=True)
class GroupAdvantages:
    """What a policy gradient learns from a round.

    Attributes:
        advantage: Of every row, nan where it has no reward or its whole group has one and the same, [R].
        num_groups: Questions.
        num_constant: Of these, those whose rewards are all the same, which teach nothing.
        mean_reward: Mean over the rows that have a reward.
        num_unjudged: Rows without a reward.
    """

    advantage: FloatArray
    num_groups: int
    num_constant: int
    mean_reward: float
    num_unjudged: int

    def __str__(self) -> str:
        return (
            f"rewards: mean {self.mean_reward:.3f}; {self.num_constant:,} of {self.num_groups:,} groups have one "
            f"reward throughout, and teach the policy nothing; {self.num_unjudged:,} responses have none"
        )


def without_labels(index: SampleIndex) -> SampleIndex:
    """Return the columns as if nobody knew which responses are right."""
    return replace(index, correct=np.full(len(index), np.nan))


def check_on_policy(sampling: SamplingSettings | None, *, store: SampleStore, round: int) -> None:
    """Raise InputError where a round was not drawn from the distribution that a policy gradient is of.

    Args:
        sampling: How it was drawn; None where nobody knows.
        store: The store, for the message.
        round: The round.
    """
    found = "no record of how they were" if sampling is None else None
    if sampling is not None:
        drawn = {"temperature": sampling.temperature, "edt_scale": sampling.edt_scale, "top_p": sampling.top_p}
        wanted = {"temperature": 1.0, "edt_scale": None, "top_p": 1.0}
        off = [f"{name} {drawn[name]}" for name in wanted if drawn[name] != wanted[name]]
        found = " and ".join(off) or None
    if found is not None:
        raise InputError(
            f"Expected round {round} of {store.path} to be drawn at temperature 1 from the whole distribution for a "
            f"policy gradient, but got {found}: the responses are not those of the policy. Set `sampling: "
            "{temperature: 1.0, edt_scale: null, top_p: 1.0}` of SSCGeneration and another `store_dir`, or learn from "
            "a selection of them (`reward: none`, `selection`)."
        )


def read_advantages(
    name: GroupReward,
    store: SampleStore,
    index: SampleIndex,
    *,
    round: int,
    fusion: Fusion | None,
    scale: Scale,
    leave_one_out: bool,
) -> GroupAdvantages:
    """Return the advantages of a round's rows.

    Args:
        name: The reward.
        store: The store.
        index: Columns of the round, without labels unless the reward is made of them.
        round: Its number.
        fusion: Of the reward "fused".
        scale: What advantages are divided by; see ``group_advantages``.
        leave_one_out: Whether a response's own reward leaves the mean that it is compared with.

    Raises:
        InputError: A question has one response, or in round 0 all rewards of every question are the same. Later rounds
            may come to that: there the training ends.
    """
    entries = _entries(store, index, round, texts=name == "equations")
    if lone := sum(len(entry.samples) < 2 for entry in entries):
        raise InputError(
            f"Expected at least 2 responses to each question for a policy gradient, but got 1 to {lone:,} of "
            f"{len(entries):,}: a response is compared with the others of its group. Raise `num_samples`."
        )
    rewards = group_rewards(name, entries, fusion=fusion)
    advantages = group_advantages(rewards, scale=scale, leave_one_out=leave_one_out)
    constant = [not any(advantage for advantage in group) for group in advantages]
    if all(constant) and round == 0:
        raise InputError(
            f"Expected rewards that differ within a question, but got one reward throughout for all {len(entries):,} "
            f"questions with the reward {name!r}: nothing would be learnt. Draw more responses, or take harder "
            "questions or another reward."
        )
    flat = [
        np.nan if advantage is None or is_constant else advantage
        for group, is_constant in zip(advantages, constant, strict=True)
        for advantage in group
    ]
    known = [reward for group in rewards for reward in group if reward is not None]
    mean = float(np.mean(known)) if known else math.nan
    return GroupAdvantages(np.array(flat, dtype=np.float64), len(entries), sum(constant), mean, len(flat) - len(known))


def fit_anchor_fusion(store: SampleStore, index: SampleIndex) -> Fusion:
    """Return the fusion of what every sampled response has, fitted to the votes of the round-0 pool."""
    return fit_votes([without_references(entry) for entry in counted_samples(store, index)], FUSED_FROM)


def annotations_of(reward: str) -> tuple[str, ...]:
    """Return the annotations that a reward is read from."""
    return (ANNOTATIONS[reward],) if reward in ANNOTATIONS else ()


def _entries(store: SampleStore, index: SampleIndex, round: int, *, texts: bool) -> list[QuestionSamples]:
    if not texts:
        return list(counted_samples(store, index, round=round))
    found = []
    for rows in question_slices(index):
        stored = store.read_rows(index.locate(np.arange(rows.start, rows.stop)))
        samples = tuple(
            replace(row.sample, answer=answer) for row, answer in zip(stored, index.answer[rows], strict=True)
        )
        found.append(QuestionSamples(stored[0].question, samples, index.split[rows.start], None))
    return found


def read_targets(
    target: PoolTarget, index: SampleIndex, is_anchor: np.ndarray, *, raw: bool
) -> tuple[FloatArray, np.ndarray]:
    """Return what P(True) learns of every row, nan where that is nothing, and the reason why, [R] each.

    Args:
        target: "round", "anchor" or "mix".
        index: Columns of round 0 and of the newest round together, a question's rows side by side, answers that are
            equal in the eyes of their task under one name. In round 0 itself, these once.
        is_anchor: Which rows are of round 0, [R].
        raw: Whether responses are weighted by the mass of Yes alone.
    """
    confidence = index.yes_mass if raw else index.p_true
    values = np.full(len(index), np.nan)
    is_own = np.ones(len(index), dtype=bool) if is_anchor.all() else ~is_anchor
    for rows in question_slices(index):
        answers = index.answer[rows]
        weights = [None if np.isnan(value) else float(value) for value in confidence[rows]]
        own, anchor = np.flatnonzero(is_own[rows]), np.flatnonzero(is_anchor[rows])
        found = _pool_targets(target, answers, weights, own.tolist(), anchor.tolist())
        values[rows.start + own] = [np.nan if value is None else value for value in found]
    unreadable = np.array([not answer for answer in index.answer], dtype=bool)
    reasons = np.where(unreadable, "unreadable", "no confidence in the pool").astype(object)
    return values, np.where(np.isnan(values), reasons, "").astype(object)


def _pool_targets(
    target: PoolTarget,
    answers: Sequence[str | None],
    weights: Sequence[float | None],
    own: Sequence[int],
    anchor: Sequence[int],
) -> list[float | None]:
    mine = [answers[at] or None for at in own]
    anchored = anchored_soft_share(mine, [answers[at] for at in anchor], [weights[at] for at in anchor])
    if target == "anchor":
        return anchored
    current = soft_self_consistency(mine, [weights[at] for at in own])
    if target == "round":
        return current
    pairs = zip(current, anchored, strict=True)
    return [None if one is None or other is None else (one + other) / 2 for one, other in pairs]
