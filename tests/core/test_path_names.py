"""Names that become parts of paths: refused before the work where they lead elsewhere, or written otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_lines import Refused
from support.store_samples import write_pool

from selfcal_lightning.cli import run
from selfcal_lightning.core.files import check_path_name, file_name
from selfcal_lightning.data.pools.importing import import_pool

ELSEWHERE = [
    "a/b", "../x", "../../..", "..", ".", ".hidden", "/etc/x", "a\\b", "a\nb", "a\0b", "", "x" * 101, "-/x",
]  # fmt: skip
REFUSED = "to be a name that a file can have"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"`tests.name` {REFUSED}"):
        check_path_name("tests.name", name)
    safe = file_name(name)
    assert "/" not in safe
    assert not safe.startswith(".")


@pytest.mark.parametrize("name", ["id", "gsm8k-hard", "test 2", "p_true@v2", "größe", "a.b", "x" * 100])
def test_names_that_are_names(name: str) -> None:
    assert check_path_name("tests.name", name) == file_name(name) == name


def test_names_that_are_written_otherwise_stay_apart() -> None:
    names = ["a/b", "a_b", "a%2Fb", "../p", "..p"]
    assert len({file_name(name) for name in names}) == len(names)


TESTS = "[{{name: '{}', task: word_problems, split: test_id, limit: 2}}]"
OUT = ["--output_dir", "deep/out", "--num_reshuffles", "1", "--num_resamples", "2"]


def pools(**source: str) -> list[str]:
    return ["evaluate", "--pools", json.dumps([{**source, "path": "pool.jsonl"}]), *OUT]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *((["evaluate", "--model", "bundled", "--tests", TESTS.format(name), *OUT], f"`tests.name` {REFUSED}")
          for name in ("a/b", "../../escaped", "..")),
        (pools(name="../../escaped"), f"`pools.name` {REFUSED}"),
        (pools(name="base", test="../../escaped"), f"`pools.test` {REFUSED}"),
        *((["score", "--store_dir", "store", "--estimator", "response_consistency", "--name", name], "`name`")
          for name in ("../x", "a/b", ".hidden")),
    ],
)  # fmt: skip
def test_a_verb_refuses_a_name_before_it_samples_or_reads(
    command: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("selfcal_lightning.engines.sampling.running.open_engine", lambda *_, **__: pytest.fail("began"))
    import_pool(write_pool(Path("pool.jsonl")), "store")
    assert message in refused(command)
    assert {path.name for path in here.iterdir()} == {"pool.jsonl", "store"}


def test_a_confidence_of_any_name_leaves_its_files_in_the_folder(tmp_path: Path) -> None:
    """A pool's confidences are named by whoever wrote it, and files are named after them."""
    pool = Path(write_pool(tmp_path / "pool.jsonl", questions=24, confidence="../../../P(True)/x"))
    output = tmp_path / "deep" / "out"
    arguments = ["--calibration_share", "0.5", "--num_reshuffles", "1", "--num_resamples", "2"]
    assert run(["evaluate", "--pools", f"{{a: {pool}}}", "--output_dir", str(output), *arguments]) == 0
    results = json.loads((output / "results.json").read_text())
    named = [name for name in results["fitted_files"] if "P%28True%29" in name]
    assert named
    assert all(Path(name).parts[:3] == ("fitted", "a", "thresholds") for name in named)
    assert all((output / name).is_file() for name in results["fitted_files"])
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path == pool or output in path.parents for path in written)
