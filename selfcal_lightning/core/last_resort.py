"""How a command reports its failure: a user's mistake in one sentence, a bug of ours with the way to a traceback."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata

from selfcal_lightning.core.errors import UserError
from selfcal_lightning.core.signals import INTERRUPTION, what_is_kept

TRACEBACK_VARIABLE = "SELFCAL_TRACEBACK"
FAILED = 1
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket Timeout|gloo.*[Tt]imed? ?out|"
    r"NCCL.*([Tt]imeout|[Tt]imed out|remote|peer)|collective operation timeout|remote process (exited|has)"
)


def wants_traceback() -> bool:
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def explain(error: BaseException, *, who: str, command: Sequence[str] = ()) -> str:
    if isinstance(error, UserError):
        return f"{who}: error: {error}"
    if type(error).__name__ in _OUT_OF_MEMORY:
        return (
            f"{who}: error: The memory was not enough: {_one_line(error)} Lower what is held at once (`max_batch` of "
            "sampling, `batch_size` or `max_length` of training), or take a smaller dtype."
        )
    if isinstance(error, OSError):
        return f"{who}: error: {_refusal(error)}"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):  # of `Path.resolve`
        return f"{who}: error: {error}: name a file or a folder."
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) and _has_peers():
        return (
            f"{who}: error: Another process of this training was lost: {_one_line(error)[:200]} Its own log says why. "
            "Start all of them again; with `ckpt_path: last` they continue from the last checkpoint."
        )
    urls = (entry.partition(", ") for entry in metadata.metadata("selfcal-lightning").get_all("Project-URL") or ())
    trackers = (url for label, _, url in urls if "issue" in label.lower())
    tracker = next(trackers, "those from whom you have this package")
    way = f"`{TRACEBACK_VARIABLE}=1 {shlex.join(command)}`" if command else f"The same with {TRACEBACK_VARIABLE}=1"
    return (
        f"{who}: a defect of selfcal_lightning, or of a library that it uses: {type(error).__name__}: {error}\n"
        f"{way} shows where it was raised. Please report it with that to {tracker}."
    )


def _has_peers() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return "WORLD_SIZE" in os.environ or (distributed is not None and distributed.is_initialized())


def explain_interruption(error: BaseException, *, who: str, kept: str) -> str:
    return f"\n{who}: stopped by {INTERRUPTION.name}. {what_is_kept(error) or kept}"


def _refusal(error: OSError) -> str:
    if error.strerror is None:
        return _one_line(error) or type(error).__name__
    places = [str(place) for place in (error.filename, error.filename2) if place is not None]
    return f"{error.strerror}: {' -> '.join(places)}" if places else f"{error.strerror} ({type(error).__name__})"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def say_last(text: str) -> None:
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:  # the terminal is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
