"""JSON files of fitted objects: an envelope with format, version, kind and hash, checked on reading."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.manifest import origin_differences

FORMAT = "selfcal_lightning.fitted"
VERSION = 3
THRESHOLD = "threshold"  # all other kinds are confidences
T = TypeVar("T")


def check_fitted_target(path: str | Path, kind: str) -> None:
    """Refuse a path that is neither free nor an earlier fitted file: of a threshold, or of any confidence."""
    is_threshold = kind == THRESHOLD

    def is_own(file: Path) -> bool:
        record = files.json_object_or_none(file) or {}
        return record.get("format") == FORMAT and (record.get("kind") == THRESHOLD) == is_threshold

    named = "an earlier fitted threshold" if is_threshold else "an earlier fitted confidence"
    files.check_replaceable(path, is_own, option="output", kind=named)


def save_fitted(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    path = Path(path)
    check_fitted_target(path, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": VERSION, "kind": kind, **content}
    files.write_atomically(path, files.sealed(record))


def check_states_origin(fitted: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if differences := origin_differences(fitted, now):
        found = "; ".join(differences).replace("in the store", "in the probe")
        raise InputError(
            f"The probe was fitted on another model, adapter, template or query: {found}. Fit another one."
        )


def load_fitted(path: str | Path, kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a file that :func:`save_fitted` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a fitted confidence or threshold in {path}, but got no such file.")
    record = files.parse_json(path.read_bytes(), origin=str(path))
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise InputError(f"Expected {path} to have the format {FORMAT!r}, but got {found!r}.")
    kind, version = record.get("kind"), record.get("version")
    if version != VERSION:
        raise InputError(f"Expected {path} to have version {VERSION}, but got {version!r}. Fit it again.")
    files.check_seal(record, path, way_out="Fit it again.")
    if kind not in kinds:
        raise InputError(f"Expected {path} to hold one of {', '.join(kinds)}, but got {kind!r}.")
    return str(kind), record


def load_whole(path: str | Path, kinds: Sequence[str], make: Callable[[str, dict[str, Any]], T]) -> T:
    """Return what ``make`` reads of kind and content of a fitted file."""
    kind, content = load_fitted(path, kinds)
    try:
        return make(kind, content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"Expected {path} to hold a whole {kind}, but got {reason}. Fit it again.") from error
