"""What imports of files made elsewhere share: the fingerprint of their store, and how long a file is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.identities import ModelIdentity, PromptIdentity
from selfcal_lightning.records import IMPORTED
from selfcal_lightning.store.sample_store import SampleStore, StoreFingerprint

BLOCK_BYTES = 1 << 20


def open_imported(store_dir: str | Path, source: Path, settings: Mapping[str, Any]) -> SampleStore:
    """Open the store that holds what was imported from ``source``, and nothing else.

    Args:
        store_dir: Folder of the store.
        source: The file; its sha256 is part of the fingerprint, its name is not.
        settings: What else must be equal when the import is started again; plain JSON types.
    """
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    prompt = PromptIdentity.from_json({"source_sha256": digest, **settings})
    fingerprint = StoreFingerprint(ModelIdentity(IMPORTED), prompt, sampling=None, seed=0)
    engine = {"engine": "imported", "source": str(source)}
    return SampleStore.create_or_open(store_dir, fingerprint, num_samples=None, engine=engine)


def count_lines(path: Path) -> int:
    """Return how many lines a file has, empty ones too; of a large file faster than reading them."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")
