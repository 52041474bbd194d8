"""How rollouts ended, read from the store that holds them, and their records for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.rewards.prefixes import MARK, Rate
from selfcal_lightning.runtime.json_files import read_json_lines
from selfcal_lightning.store.sample_store import SampleStore, StoreFingerprint

PREFIXES_FILE = "prefixes.jsonl"


def read_rates(rollouts_dir: str, *, policy: StoreFingerprint | None = None) -> dict[str, Rate]:
    """Return how the rollouts of a store ended, by ``prefix_id``; an unreadable one was wrong.

    Args:
        rollouts_dir: Folder that ``selfcal rollout`` filled.
        policy: What sampled the responses that the prefixes are of; None leaves that open.

    Raises:
        InputError: The folder holds no rollouts, or those of another policy.
    """
    if not (Path(rollouts_dir) / PREFIXES_FILE).is_file():
        raise InputError(f"Expected `rollouts` to be a folder that `selfcal rollout` filled, but got {rollouts_dir!r}.")
    store = SampleStore(rollouts_dir)
    if policy is not None:
        _check_policy(store, policy)
    index = store.index()
    labelled = ~np.isnan(index.correct)
    if not labelled.any():
        raise InputError(
            f"Expected rollouts whose answers were compared with references, but {rollouts_dir} has no labels. Sample "
            "questions with references."
        )
    edges = np.flatnonzero(np.diff(index.question_index, prepend=-1, append=-1))
    right = np.nan_to_num(index.correct)
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return {
        str(index.question_id[start]): Rate(float(right[start:stop].mean()), stop - start)
        for start, stop in spans
        if MARK in index.question_id[start] and labelled[start:stop].any()
    }


def read_rates_by_text(rollouts_dir: str, *, policy: StoreFingerprint | None = None) -> dict[tuple[str, str], Rate]:
    """Return how rollouts ended by (question id, text of the prefix without white space around it).

    For readers with another tokenizer than the policy's; else see ``read_rates``.
    """
    rates = read_rates(rollouts_dir, policy=policy)
    lines = (line for _, line in read_json_lines(Path(rollouts_dir) / PREFIXES_FILE))
    return {(line["question_id"], line["reasoning_prefix"].strip()): rates[line["id"]]
            for line in lines if line["id"] in rates}  # fmt: skip


def success_records(rollouts_dir: str) -> Iterator[dict[str, Any]]:
    """Yield ``{question, reasoning_prefix, success_prob}`` of every prefix whose rollouts are there."""
    rates = read_rates(rollouts_dir)
    for _, line in read_json_lines(Path(rollouts_dir) / PREFIXES_FILE):
        if (rate := rates.get(line["id"])) is not None:
            shown = {name: line[name] for name in ("question", "reasoning_prefix")}
            yield {**shown, "success_prob": rate.share}


def _check_policy(store: SampleStore, policy: StoreFingerprint) -> None:
    drawn = replace(store.round_manifest().fingerprint, seed=0, plan=None)
    if differences := drawn.differences(replace(policy, seed=0, plan=None)):
        raise InputError(
            f"Expected the rollouts in {store.path} to be of the policy that sampled the responses, but got "
            f"{'; '.join(differences)}. Roll out with that policy and its sampling, or leave `rollouts` out."
        )
