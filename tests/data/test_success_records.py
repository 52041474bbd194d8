"""Records of prefixes made elsewhere: what is no record is refused, and what is left out is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.commands.rewards import run_import_prefixes
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.pools.published import write_success_pool


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
        ({"question": "q", "reasoning_prefix": "9.<|im_end|>", "success_prob": 1}, r"r\.jsonl:1: .*'<\|im_end\|>'"),
        ({"prompt": "q", "completions": ["a", "b</s>"], "labels": [1, 1]}, "`completions` without control tokens"),
    ],
)
def test_bad_records_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": "1+1?", "reasoning_prefix": "", "success_prob": 0.5},
        {"question": "1+1?", "reasoning_prefix": "If |x|<1 and <|x|>, it is 2.", "success_prob": 1},
        {"question": "2+2?", "reasoning_prefix": " \n", "success_prob": 0.5},
        {"prompt": "3+3?", "completions": [], "labels": []},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")
    assert (report.questions, report.responses, report.dropped) == (1, 1, 3)
    told = capsys.readouterr().err
    assert "2 records with an empty `reasoning_prefix`, 1 rows without steps" in told


def test_different_rates_of_a_prefix_are_averaged_and_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1?", "reasoning_prefix": "It is", "success_prob": 1},
        {"question": "1+1?", "reasoning_prefix": "It is", "success_prob": 0.25},
        {"question": "2+2?", "reasoning_prefix": "It is", "success_prob": 0},
        {"prompt": "1+1?", "completions": ["So", "2"], "labels": [True, True]},
        {"prompt": "1+1?", "completions": ["So", "3"], "labels": [True, False]},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counts = write_success_pool(tmp_path / "r.jsonl", tmp_path / "pool.jsonl", task="local_number", split="train")
    found = [
        [(response["text"], response["confidence"]["success_prob"]) for response in line["responses"]]
        for _, line in read_json_lines(tmp_path / "pool.jsonl")
    ]
    first = [("It is", 0.625), ("It is", 0.625), ("So", 1.0), ("So\n2", 1.0), ("So", 1.0), ("So\n3", 0.0)]
    assert found == [first, [("It is", 0.0)]]
    assert counts.contradicting == 1
