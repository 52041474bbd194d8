"""``selfcal drop-rounds``: take later rounds out of a store, for a training with other settings."""

from __future__ import annotations

import shutil

from selfcal_lightning.runtime.progress import say
from selfcal_lightning.store.sample_store import SampleStore


def run_drop_rounds(store_dir: str, first: int = 1) -> int:
    """Delete the samples and adapters of a round and of all later ones, so that another training can make them anew.

    Args:
        store_dir: Folder of the store; not while a run works on it. Copy it where the rounds are still wanted.
        first: The first round to delete, at least 1.

    Returns:
        Number of files of samples that were deleted.
    """
    from selfcal_lightning.generation.rounds.adapters import adapter_folder  # imports torch

    dropped = SampleStore(store_dir).drop_rounds(first)
    for place in sorted(adapter_folder(store_dir, 0).parent.glob("round-*")):
        if int(place.name.removeprefix("round-")[:3]) < first:
            continue
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    say(f"Rounds from {first} on are deleted: {dropped} files of samples, and their adapters, in {store_dir}.")
    return dropped
