"""What names the code by which a task reads and judges answers."""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from pathlib import Path

from selfcal_lightning import __version__
from selfcal_lightning.tasks.base import Task

ROOM = Path(__file__).parent


def reader_version(task: Task) -> str:
    """Return the version of this package and a hash over the sources of its tasks, and of a task that lies elsewhere.

    Example:
        >>> from selfcal_lightning.tasks.registry import get_task
        >>> reader_version(get_task("gsm8k")) == reader_version(get_task("svamp"))
        True
    """
    source = inspect.getsourcefile(type(task))
    own = () if source is None or ROOM in Path(source).parents else (source,)
    return f"selfcal_lightning {__version__}, {_hash(own)}"


@lru_cache
def _hash(own: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in (*sorted(ROOM.rglob("*.py")), *map(Path, own)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
