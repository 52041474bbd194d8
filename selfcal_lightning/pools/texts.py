"""Whether two pools hold the same texts, told from their files a part at a time: counted pools keep no texts."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

from selfcal_lightning.runtime.json_files import read_json_lines
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import read_shard

BITS = 128


def texts_digest(path: str | Path, *, split: str | None = None, task: str | None = None) -> int:
    """Return a number that two pools share if, and but for a chance of 2^-128 only if, their texts are the same.

    Args:
        path: A JSON-lines pool, or the folder of a store (its round 0).
        split: The split; None takes all.
        task: Of a store, the task; None takes all.
    """
    path = Path(path)
    return _digest_of_store(path, split, task) if path.is_dir() else _digest_of_file(path, split)


def _digest_of_store(path: Path, split: str | None, task: str | None) -> int:
    store = SampleStore(path)
    index = store.index(split=split)
    index = index if task is None else index.select(index.task == task)
    total = 0
    for shard in np.unique(index.shard).tolist():
        table = read_shard(store.path / index.files[shard], columns=("question_id", "index", "text"))
        rows = table.take(index.row[index.shard == shard]).to_pydict()
        for name, place, text in zip(rows["question_id"], rows["index"], rows["text"], strict=True):
            total += _digest(name, place, text)
    return total % (1 << BITS)


def _digest_of_file(path: Path, split: str | None) -> int:
    total = 0
    for _, line in read_json_lines(path):
        if split not in (None, line.get("split", split)):
            continue
        # A line may hold texts alone in the place of records.
        for place, response in enumerate(line.get("responses") or ()):
            total += _digest(str(line.get("id")), place, response["text"] if isinstance(response, dict) else response)
    return total % (1 << BITS)


def _digest(name: str, place: int, text: str) -> int:
    # Sums do not depend on the order in which stores hold their questions.
    content = f"{name}\0{place}\0{text}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=BITS // 8).digest(), "big")
