"""The columns that verl, TRL and OpenRLHF read, as their released versions have them.

verl 0.9.1 (`RLHFDataset`, `MultiTurnSFTDataset`), TRL 1.16.0 (`GRPOTrainer`, `SFTTrainer`) and OpenRLHF 0.11.2
(`PromptDataset`). None of them is imported: two cannot be installed beside this package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from selfcal_lightning.selection.rl.rows import TrainingRow

Format = Literal["verl", "trl", "openrlhf", "reference"]
_CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_STEPS = pa.list_(pa.list_(pa.string()))


def verl_table(rows: Sequence[TrainingRow], *, selection_sha256: str) -> pa.Table:
    """Return the table of ``data.train_files``: a row a question."""
    names = _score_names(rows)
    scores = pa.struct([(name, pa.float64()) for name in names] or [("none", pa.float64())])
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", _CHAT),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            (
                "extra_info",
                pa.struct(
                    [
                        ("index", pa.int64()),
                        ("split", pa.string()),
                        ("question_id", pa.string()),
                        ("label_kind", pa.string()),
                        ("label_share", pa.float64()),
                        ("label_confidence", pa.float64()),
                        ("label_margin", pa.float64()),
                        ("num_samples", pa.int64()),
                        ("num_unreadable", pa.int64()),
                        ("response", pa.string()),
                        ("key_steps", _STEPS),
                        ("scores", scores),
                        ("round", pa.int64()),
                        ("selection_sha256", pa.string()),
                    ]
                ),
            ),
        ]
    )
    return pa.Table.from_pylist([_verl_row(row, names, selection_sha256) for row in rows], schema=schema)


def verl_sft_table(rows: Sequence[TrainingRow]) -> pa.Table:
    """Return the table of verl's supervised trainer: the chat with the chosen response."""
    schema = pa.schema([("messages", _CHAT)])
    return pa.Table.from_pylist([{"messages": [*_chat(row), _turn(row)]} for row in rows], schema=schema)


def trl_table(rows: Sequence[TrainingRow]) -> pa.Table:
    """Return the table of TRL: ``GRPOTrainer`` hands all columns to the reward; ``SFTTrainer`` reads two."""
    schema = pa.schema(
        [
            ("prompt", _CHAT),
            ("completion", _CHAT),
            ("data_source", pa.string()),
            ("answer", pa.string()),
            ("label_kind", pa.string()),
            ("label_share", pa.float64()),
            ("key_steps", _STEPS),
            ("question_id", pa.string()),
        ]
    )
    return pa.Table.from_pylist(
        [
            {
                "prompt": _chat(row),
                "completion": [_turn(row)],
                "data_source": row.source,
                "answer": row.label.text,
                "label_kind": row.label.kind,
                "label_share": row.label.share,
                "key_steps": [list(forms) for forms in row.key_steps],
                "question_id": row.row.question_id,
            }
            for row in rows
        ],
        schema=schema,
    )


def openrlhf_rows(rows: Sequence[TrainingRow]) -> list[dict[str, Any]]:
    """Return the lines of ``--data.prompt_dataset``; the label is JSON that our reward file reads."""
    return [
        {
            "input": _chat(row),
            "label": json.dumps(
                {
                    "data_source": row.source,
                    "answer": row.label.text,
                    "label_kind": row.label.kind,
                    "label_share": row.label.share,
                    "key_steps": [list(forms) for forms in row.key_steps],
                },
                ensure_ascii=False,
            ),
            "datasource": row.source,
        }
        for row in rows
    ]


def reference_rows(rows: Sequence[TrainingRow]) -> list[dict[str, Any]]:
    """Return the rows of the reference system; with key steps these stand for the response, as JSON."""
    return [
        {
            "question": row.question,
            "answer": row.label.text,
            "gpt_response": json.dumps({"key_steps": row.key_steps}, ensure_ascii=False)
            if row.key_steps
            else row.response,
        }
        for row in rows
    ]


def _verl_row(row: TrainingRow, names: Sequence[str], selection_sha256: str) -> dict[str, Any]:
    return {
        "data_source": row.source,
        "prompt": _chat(row),
        "ability": row.ability,
        # Without a label it is empty and never null: verl reads the field of every row.
        "reward_model": {"style": "rule", "ground_truth": row.label.text or ""},
        "extra_info": {
            "index": row.number,
            "split": row.row.split,
            "question_id": row.row.question_id,
            "label_kind": row.label.kind,
            "label_share": row.label.share,
            "label_confidence": row.label.confidence,
            "label_margin": row.label.margin,
            "num_samples": row.row.num_samples,
            "num_unreadable": row.row.num_unreadable,
            "response": row.response,
            "key_steps": [list(forms) for forms in row.key_steps],
            "scores": {name: row.row.scores.get(name) for name in names} or {"none": None},
            "round": row.row.round,
            "selection_sha256": selection_sha256,
        },
    }


def _score_names(rows: Sequence[TrainingRow]) -> list[str]:
    return sorted({name for row in rows for name in row.row.scores})


def _chat(row: TrainingRow) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in row.messages]


def _turn(row: TrainingRow) -> dict[str, str]:
    return {"role": "assistant", "content": row.response}
