"""Records of prefixes made elsewhere: what is no record is refused, and what is left out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.errors import InputError
from selfcal_lightning.pipelines.rewards.import_prefixes import run_import_prefixes


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "reasoning_prefix": "p"}, "the fields success_prob, but got only"),
        ({"question": "q", "reasoning_prefix": "p", "success_prob": 1.5}, r"`success_prob` to lie in \[0, 1\]"),
        ({"question": " ", "reasoning_prefix": "p", "success_prob": 1}, "`question` to be text"),
        ({"question": "q", "reasoning_prefix": "", "success_prob": 1}, "records with a `reasoning_prefix`"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "`labels` to be a list of 2, one a step"),
        ({"prompt": "q", "completions": ["a"], "labels": [-100]}, r"true, false or shares in \[0, 1\]"),
        ({"prompt": [], "completions": ["a"], "labels": [True]}, "`prompt` to be text"),
        ({"prompt": "q", "completions": "a", "labels": [True]}, "`completions` to be a list of steps"),
    ],
)
def test_bad_records_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")
