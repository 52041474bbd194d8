"""Selections as data sets of verl 0.9.1, TRL 1.16.0 and OpenRLHF 0.11.2.

Written for their `RLHFDataset` and `MultiTurnSFTDataset`, `GRPOTrainer` and `SFTTrainer`, and `PromptDataset`. None of
them is imported: two cannot be installed together with this package.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from selfcal_lightning import __version__
from selfcal_lightning.adaptation.key_steps import KeySteps, read_key_steps
from selfcal_lightning.adaptation.picking import Label, SelectedRow
from selfcal_lightning.adaptation.reward_file import reward_source
from selfcal_lightning.adaptation.selection_files import Example, Selection, examples
from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.shards import parquet_bytes
from selfcal_lightning.data.tasks.registry import get_task

ExportLabel = Literal["picked", "none"]
_ABILITIES = {"number": "math", "expression": "math", "option letter": "choice", "short text": "qa"}


@dataclass(frozen=True, slots=True)
class TrainingRow:
    number: int
    example: Example
    label: Label
    key_steps: list[list[str]]

    @property
    def row(self) -> SelectedRow:
        return self.example.row

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in self.example.question.messages]

    @property
    def turn(self) -> dict[str, str]:
        return {"role": "assistant", "content": self.example.sample.text}

    @property
    def reward_fields(self) -> dict[str, Any]:
        """What the reward file reads, and the facts about the label."""
        label = {"answer": self.label.text, "label_kind": self.label.kind, "label_share": self.label.share}
        return {"data_source": f"selfcal/{self.row.task}", **label, "key_steps": self.key_steps}


def training_rows(
    chosen: Iterable[Example], steps: KeySteps | None, *, label: ExportLabel | None = None
) -> list[TrainingRow]:
    known = {} if steps is None else {one.key: one for one in steps.found}
    rows: list[TrainingRow] = []
    for number, one in enumerate(chosen):
        if not one.question.messages:  # a trainer would apply its template to a rendered prompt
            raise InputError(f"Expected a chat for question {one.question.id!r}, but got a rendered prompt.")
        found = known.get((one.row.question_id, one.row.round, one.sample.index))
        forms = [list(step.forms) for step in (found.steps if found else None) or ()]
        own = one.row.label
        if label == "none":
            own = Label("none")
        elif label == "picked":
            own = replace(own, kind="picked") if own.text == one.row.answer else Label("picked", one.row.answer)
        rows.append(TrainingRow(number, one, own, forms))
    return rows


def check_label(selection: Selection, label: str | None) -> None:
    """Raise InputError if the selection lacks the label; only ``selfcal select`` sees all votes."""
    own = selection.manifest["settings"]["label"]
    if label not in (None, "picked", "none", own):
        also = " --references true" if label == "reference" else ""
        raise InputError(f"Selection has `label` {own!r}. For {label!r} run `selfcal select --label {label}{also}`.")


Format = Literal["verl", "trl", "openrlhf", "reference"]
_TEXT, _REAL, _INT = pa.string(), pa.float64(), pa.int64()
_CHAT = pa.list_(pa.struct({"role": _TEXT, "content": _TEXT}))
_STEPS = pa.list_(pa.list_(_TEXT))
_LABEL = {"label_kind": _TEXT, "label_share": _REAL}


def verl_table(rows: Sequence[TrainingRow], *, selection_sha256: str) -> pa.Table:
    names = sorted({name for row in rows for name in row.row.scores})
    info = {
        "index": _INT, "split": _TEXT, "question_id": _TEXT, **_LABEL, "label_confidence": _REAL, "label_margin": _REAL,
        "num_samples": _INT, "num_unreadable": _INT, "response": _TEXT, "key_steps": _STEPS,
        "scores": pa.struct({name: _REAL for name in names or ["none"]}), "round": _INT, "selection_sha256": _TEXT,
    }  # fmt: skip
    reward = pa.struct({"style": _TEXT, "ground_truth": _TEXT})
    columns = {"data_source": _TEXT, "prompt": _CHAT, "ability": _TEXT, "reward_model": reward}
    schema = pa.schema({**columns, "extra_info": pa.struct(info)})
    written = [
        {
            "data_source": row.reward_fields["data_source"],
            "prompt": row.chat,
            "ability": _ABILITIES[get_task(row.row.task).answer_type],
            # Empty and not null without a label: verl reads the field of every row.
            "reward_model": {"style": "rule", "ground_truth": row.label.text or ""},
            "extra_info": {
                **{name: row.reward_fields[name] for name in ("label_kind", "label_share", "key_steps")},
                **{name: getattr(row.row, name) for name in ("split", "question_id", "num_samples", "num_unreadable")},
                "index": row.number,
                "label_confidence": row.label.confidence,
                "label_margin": row.label.margin,
                "response": row.example.sample.text,
                "scores": {name: row.row.scores.get(name) for name in names} or {"none": None},
                "round": row.row.round,
                "selection_sha256": selection_sha256,
            },
        }
        for row in rows
    ]
    return pa.Table.from_pylist(written, schema=schema)


MANIFEST_FILE, KIND, REWARD_FILE = "export.json", "rl_export", "reward.py"


@dataclass(frozen=True)
class RLExport:
    path: Path
    manifest: dict[str, Any]


def export_rl(
    selection: Selection,
    output: str | Path,
    *,
    format: Format,
    label: ExportLabel | None = None,
    reward_file: bool = True,
    store_dir: str | None = None,
) -> RLExport:
    folder, store = Path(output), selection.manifest["store"]["path"]
    files.check_apart(folder, {"selection": selection.path, "store": store}, option="output")
    known = files.json_object_or_none(folder / MANIFEST_FILE) or {}
    if folder.exists() and known.get("kind") != KIND and not (folder.is_dir() and files.holds_only(folder)):
        raise InputError(f"`output` {output} is no earlier export and is left as it is. Choose another name.")
    rows = training_rows(examples(selection, store_dir=store_dir), read_key_steps(selection), label=label)
    contents = _rows_files(rows, format, selection)
    if reward_file and format != "reference":
        names = dict.fromkeys(row.row.task for row in rows)
        contents[REWARD_FILE] = reward_source(get_task(name) for name in names).encode()
    folder.mkdir(parents=True, exist_ok=True)
    earlier = {Path(name).name for name in known.get("files", ())}  # another format has other files
    # Without digests until all is written: after a kill, the folder is still known as an export.
    begun = {"kind": KIND, "files": dict.fromkeys(sorted({*earlier, *contents}))}
    files.write_atomically(folder / MANIFEST_FILE, files.to_json(begun))
    for name in earlier:
        (folder / name).unlink(missing_ok=True)
    for name, data in contents.items():
        files.write_atomically(folder / name, data)
    settings = selection.manifest["settings"]
    manifest = {
        "kind": KIND,
        "version": __version__,
        "format": format,
        "label_kind": settings["label"] if label is None else label,
        "reads_reference": selection.reads_reference,
        "counts": {
            "rows": len(rows),
            "without_label": sum(row.label.text is None for row in rows),
            "without_key_steps": sum(not row.key_steps for row in rows),
        },
        "selection_sha256": selection.sha256,
        "store": dict(selection.manifest["store"]),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(contents.items())},
    }
    files.write_atomically(folder / MANIFEST_FILE, files.to_json(manifest))
    return RLExport(folder, manifest)


def _rows_files(rows: Sequence[TrainingRow], format: Format, selection: Selection) -> dict[str, bytes]:
    if format == "verl":
        chats = [{"messages": [*row.chat, row.turn]} for row in rows]  # for verl's supervised trainer
        supervised = pa.Table.from_pylist(chats, pa.schema({"messages": _CHAT}))
        table = verl_table(rows, selection_sha256=selection.sha256)
        return {"train.parquet": parquet_bytes(table), "sft.parquet": parquet_bytes(supervised)}
    if format == "trl":  # `GRPOTrainer` passes all columns to the reward, `SFTTrainer` reads two
        columns = {"prompt": _CHAT, "completion": _CHAT, "data_source": _TEXT, "answer": _TEXT, **_LABEL}
        schema = pa.schema({**columns, "key_steps": _STEPS, "question_id": _TEXT})
        own = [{"prompt": row.chat, "completion": [row.turn], "question_id": row.row.question_id} for row in rows]
        content = [one | row.reward_fields for one, row in zip(own, rows, strict=True)]
        return {"train.parquet": parquet_bytes(pa.Table.from_pylist(content, schema=schema))}
    written: list[dict[str, Any]] = []
    if format == "openrlhf":  # of `--data.prompt_dataset`; the label is JSON that our reward file reads
        for row in rows:
            label = json.dumps(row.reward_fields, ensure_ascii=False)
            written.append({"input": row.chat, "label": label, "datasource": row.reward_fields["data_source"]})
        return {"train.jsonl": "".join(map(files.as_json_line, written)).encode()}
    for row in rows:  # key steps, as JSON, replace the response
        steps = json.dumps({"key_steps": row.key_steps}, ensure_ascii=False) if row.key_steps else None
        text = steps or row.example.sample.text
        written.append({"question": row.example.question.text, "answer": row.label.text, "gpt_response": text})
    return {"selected.json": f"{json.dumps(written, indent=1, ensure_ascii=False)}\n".encode()}
