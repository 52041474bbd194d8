"""JSON that others wrote, damaged or hostile: the file and the line are named, and nothing falls through."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from selfcal_lightning.cli import run
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.store.sample_store import SampleStore

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5_000
GOOD = '{"id": "a", "task": "gsm8k", "split": "train", "question": "?", "reference": "7", "responses": [{"text": "7"}]}'
BROKEN = {
    "deep": (f'{{"id": "b", "question": {DEEP}}}', "nested too deeply"),
    "digits": (f'{{"id": "b", "reference": {DIGITS}}}', "a number that is too long"),
    "cut": ('{"id": "b", "question": "Wh', "column"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_line_of_a_pool_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    line, reason = BROKEN[kind]
    path = tmp_path / "pool.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    for arguments in (
        ["import-pool", "--path", str(path), "--store_dir", str(tmp_path / "store")],
        ["fit-threshold", "--pool", str(path), "--output", str(tmp_path / "t.json"), "--budget", "1"],
        ["evaluate", "--pools", f"{{a: {path}}}", "--output_dir", str(tmp_path / "out")],
    ):
        assert run(arguments) == 1
        shown = capsys.readouterr().err
        shown = shown[shown.index("selfcal ") :]  # reading says how far it is
        assert shown.startswith(f"selfcal {arguments[0]}: error: {path}:2: Expected a JSON object"), shown[:300]
        assert reason in shown
        assert len(shown) < 1_000
        assert "sys.set_int_max_str_digits" not in shown, "no advice that a user cannot follow"
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_of_questions_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    line, reason = BROKEN[kind]
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{{"question": "1?"}}\n{line}\n')
    assert run(["answer", "--model", "bundled", "--questions", str(path)]) == 1
    shown = capsys.readouterr().err
    assert f"{path}:2" in shown
    assert reason in shown


@pytest.mark.parametrize("kind", BROKEN)
def test_a_fitted_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    line, reason = BROKEN[kind]
    path = tmp_path / "threshold.json"
    path.write_text(line)
    assert run(["answer", "--model", "bundled", "--question", "1?", "--threshold_file", str(path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("selfcal answer: error: ")
    assert str(path) in shown
    assert reason in shown


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_is_named(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(BROKEN[kind][0])
    assert run(["answer", "--model", tiny_model, "--question", "1?", "--adapter", str(adapter)]) == 1
    shown = capsys.readouterr().err
    assert f"error: {adapter / 'adapter_config.json'}" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_named(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(BROKEN[kind][0])
    assert run(["answer", "--model", str(tmp_path / "model"), "--question", "1?"]) == 1
    assert f"error: {tmp_path / 'model' / 'config.json'}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_of_a_store_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "pool.jsonl").write_text(f"{GOOD}\n")
    import_pool(tmp_path / "pool.jsonl", tmp_path / "store")
    assert SampleStore(tmp_path / "store").question_ids() == {"a"}
    (tmp_path / "store" / "manifest.json").write_text(BROKEN[kind][0])
    arguments = ["export-pool", "--store_dir", str(tmp_path / "store"), "--path", str(tmp_path / "out.jsonl")]
    assert run(arguments) == 1
    assert str(tmp_path / "store" / "manifest.json") in capsys.readouterr().err


def test_settings_nested_too_deeply_are_refused_before_a_parser_crashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "--pools", DEEP]) == 1
    assert "Expected the value of `--pools` to have at most" in capsys.readouterr().err
    (tmp_path / "deep.yaml").write_text("pools: " + "[" * 2_000 + "]" * 2_000)
    assert run(["evaluate", "--config", str(tmp_path / "deep.yaml")]) == 1
    assert "deep.yaml must have at most 100 levels" in capsys.readouterr().err
