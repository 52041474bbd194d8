"""Rows of data sets: from the Hugging Face hub, or from a local JSON-lines or Parquet file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.runtime.json_files import parse_json

Row = Mapping[str, Any]

JSON_ENDINGS, PARQUET_ENDING = (".jsonl", ".ndjson", ".json"), ".parquet"
PARQUET_CONVERSION = "refs/convert/parquet"


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a data set lives on the Hugging Face hub.

    Attributes:
        hub_id: Namespaced id.
        splits: Names of the splits here -> names on the hub. Splits without labels are left out.
        config: Configuration (subset), or None for the only one.
        data_dir: Folder inside the repository. The Parquet conversion of a script data set keeps one folder for each
            configuration and knows no configuration names, so it is read by folder.
        revision: Branch or commit; None is the main branch.
    """

    hub_id: str
    splits: Mapping[str, str]
    config: str | None = None
    data_dir: str | None = None
    revision: str | None = None

    def describe(self, split: str) -> str:
        """Return where a split lies, for messages."""
        return f"{self.hub_id} ({self.splits[split]})"


@dataclass(frozen=True, slots=True)
class OtherRows:
    """Rows of the hub that are left out of a split, since another one has them.

    Attributes:
        source: Where they are.
        split: Their split, by its name in ``source``.
        column: What tells rows apart, there and here.
    """

    source: HubSource
    split: str
    column: str


@dataclass(frozen=True, slots=True)
class HubRows:
    """Rows of one place on the hub: a piece of a split that is put together.

    Attributes:
        source: The place.
        split: Its split, by its name in ``source``.
        renamed: Columns here -> what they are called there, where that differs.
        number_column: Column that the number of each row, from 0, is put in; None for none.
        mark: Stands before the ids of the rows, which are unique within their own place only.
        without: Rows that are left out; None leaves out none.
    """

    source: HubSource
    split: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    number_column: str | None = None
    mark: str = ""
    without: OtherRows | None = None


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A data set whose splits are put together: of several places on the hub, or of one less the rows of another.

    A local file stands for a split as it is: nothing is left out of it.

    Attributes:
        pieces: Names of the splits -> the pieces whose rows follow one another.
    """

    pieces: Mapping[str, tuple[HubRows, ...]]

    @property
    def splits(self) -> Mapping[str, str]:
        """Names of the splits -> where each is."""
        return {
            name: " + ".join(piece.source.describe(piece.split) for piece in pieces)
            for name, pieces in self.pieces.items()
        }

    def describe(self, split: str) -> str:
        """Return where a split lies, for messages."""
        return self.splits[split]


@dataclass(frozen=True, slots=True)
class FileSource:
    """Where the files of a data set lie that travels with the code of its task, such as a plug-in.

    Attributes:
        files: Names of the splits -> paths of JSON-lines or Parquet files.
    """

    files: Mapping[str, str]

    @property
    def splits(self) -> Mapping[str, str]:
        """Names of the splits -> where each is."""
        return self.files


def load_file_rows(path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines or Parquet file (by its ending), each with all of ``columns``.

    Raises:
        FileNotFoundError: If there is no such file.
        InputError: If the ending is another, the file is broken (naming the line), or columns are missing.
    """
    file = check_file(path)
    return _load_parquet(file, columns) if file.suffix == PARQUET_ENDING else _load_json_lines(file, columns)


def check_file(path: str) -> Path:
    """Return the path of a JSON-lines or Parquet file.

    Raises:
        FileNotFoundError: If there is no such file.
        InputError: If the ending is another.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"Expected `path` to be a file, but there is none at {path}.")
    if file.suffix not in (PARQUET_ENDING, *JSON_ENDINGS):
        raise InputError(f"Expected `path` to end in .jsonl, .ndjson, .json or .parquet, but got {path}.")
    return file


def load_hub_rows(source: HubSource, split: str, columns: Sequence[str]) -> Iterable[Row]:
    """Return the rows of a split from the hub (or the local cache of it), through the `datasets` library.

    Raises:
        RunError: If the hub cannot be reached, or does not give the data set away.
        InputError: If columns are missing.
    """
    import datasets

    try:
        rows = datasets.load_dataset(
            source.hub_id,
            name=source.config,
            data_dir=source.data_dir,
            revision=source.revision,
            split=source.splits[split],
        )
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        raise RunError(
            f"Could not load {source.hub_id} from the Hugging Face hub: {error} Without a connection or permission, "
            "give the same rows as a local JSON-lines or Parquet file by `path`."
        ) from error
    _check_columns(source.hub_id, rows.column_names, columns)
    return rows


def load_joined_rows(
    source: JoinedSource, split: str, columns: Sequence[str], *, id_column: str | None
) -> Iterator[Row]:
    """Yield the rows of a split that is put together, each piece under the names of the columns here.

    Args:
        source: The pieces.
        split: The split.
        columns: Columns that a row must have, by their names here.
        id_column: Column of the ids, that a piece may mark; None where there is none.

    Raises:
        RunError: The hub cannot be reached, or does not give a data set away.
        InputError: Columns are missing.
    """
    for piece in source.pieces[split]:
        needed = [piece.renamed.get(column, column) for column in columns if column != piece.number_column]
        others: set[object] = set()
        if (without := piece.without) is not None:
            others = {row[without.column] for row in load_hub_rows(without.source, without.split, [without.column])}
        for number, found in enumerate(load_hub_rows(piece.source, piece.split, needed)):
            row = {**found, **{here: found[there] for here, there in piece.renamed.items()}}
            if piece.number_column is not None:
                row[piece.number_column] = number
            if without is not None and row[without.column] in others:
                continue
            if id_column is not None and piece.mark and id_column in row:
                row[id_column] = f"{piece.mark}{row[id_column]}"
            yield row


def _load_parquet(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"Expected {file} to be a Parquet file, but it cannot be read: {error}") from error
    _check_columns(str(file), table.column_names, columns)
    return table.to_pylist()


def _load_json_lines(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = parse_json(line, origin=f"{file}, line {number},")
            if not isinstance(row, dict):
                raise InputError(f"Expected {file}, line {number}, to be a JSON object, but got {type(row).__name__}.")
            _check_columns(f"{file}, line {number}", row, columns)
            rows.append(row)
    return rows


def _check_columns(origin: str, present: Iterable[str], columns: Sequence[str]) -> None:
    present = list(present)
    if missing := [column for column in columns if column not in present]:
        raise InputError(
            f"Expected {origin} to have the columns {', '.join(columns)}, but {', '.join(missing)} is missing. "
            f"Present: {', '.join(present) or 'none'}."
        )
