"""Damaged or hostile JSON and YAML: every verb names the file and the line, before it reads without bound."""

import os
import shutil
from pathlib import Path

import pytest
from support.command_lines import Refused

from selfcal_lightning.core.config_files import given_settings
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.pools.importing import import_pool

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5_000
GOOD = '{"id": "a", "task": "gsm8k", "split": "train", "question": "?", "reference": "7", "responses": [{"text": "7"}]}'
BROKEN = {
    "deep": (f'{{"id": "b", "question": {DEEP}}}', "nested too deeply"),
    "digits": (f'{{"id": "b", "reference": {DIGITS}}}', "a number that is too long"),
    "surrogate": ('{"id": "b", "question": "\\ud800"}', "half of a character"),
    "cut": ('{"id": "b", "question": "Wh', "column"),
}
ANSWER = ["answer", "--question", "1?"]
# The damaged file, what stands before the damage, and the command that reads it.
READERS = [
    ("pool.jsonl:2", GOOD, ["import-pool", "--path", "pool.jsonl", "--store_dir", "new"]),
    ("pool.jsonl:2", GOOD, ["fit-threshold", "--pool", "pool.jsonl", "--output", "t.json", "--budget", "1"]),
    ("pool.jsonl:2", GOOD, ["evaluate", "--pools", "{a: pool.jsonl}", "--output_dir", "out"]),
    ("q.jsonl:2", '{"question": "1?"}', ["answer", "--model", "bundled", "--questions", "q.jsonl"]),
    ("threshold.json", None, [*ANSWER, "--model", "bundled", "--threshold_file", "threshold.json"]),
    ("adapter/adapter_config.json", None, [*ANSWER, "--model", "model", "--adapter", "adapter"]),
    ("model/config.json", None, [*ANSWER, "--model", "model"]),
    ("store/manifest.json", None, ["export-pool", "--store_dir", "store", "--path", "out.jsonl"]),
]


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(("place", "before", "command"), READERS, ids=[f"{one[2][0]} {one[0]}" for one in READERS])
def test_the_damaged_file_is_named(
    place: str, before: str | None, command: list[str], kind: str, tiny_model: str, here: Path, refused: Refused
) -> None:
    shutil.copytree(tiny_model, "model")
    Path("adapter").mkdir()
    Path("good.jsonl").write_text(f"{GOOD}\n")
    import_pool("good.jsonl", "store")
    line, reason = BROKEN[kind]
    Path(place.partition(":")[0]).write_text(line if before is None else f"{before}\n{line}\n")
    shown = refused(command)
    shown = shown[shown.index(f"selfcal {command[0]}: error: ") :]  # reading says how far it is
    assert place in shown
    assert len(shown) < 1_000
    if not place.startswith("store"):  # the manifest's reader repeats Python's words
        assert reason in shown
        assert "sys.set_int_max_str_digits" not in shown, "no advice that a user cannot follow"
    assert not {"t.json", "out.jsonl"} & {path.name for path in here.iterdir()}


def test_the_place_in_a_line_that_is_cut_is_in_that_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 1,\n')
    with pytest.raises(InputError, match=r"x\.jsonl:2: .* at column 9\.$"):
        list(read_json_lines(path))


def test_settings_are_known_by_their_names_without_init_args() -> None:
    given = given_settings(["--trainer.accelerator", "cpu", "--model.init_args.lr=0.1"])
    assert given == {"trainer.accelerator": "cpu", "model.lr": "0.1"}


def test_settings_nested_too_deeply_are_refused_before_a_parser_crashes(refused: Refused) -> None:
    assert "Expected the value of `--pools` to have at most" in refused(["evaluate", "--pools", DEEP])


@pytest.mark.parametrize("verb", ["evaluate", "generate", "fit"])
def test_yaml_that_grows_without_bound_is_refused(verb: str, here: Path, refused: Refused) -> None:
    levels = [f"a{i}: &a{i} [{', '.join(['x' if i == 0 else f'*a{i - 1}'] * 20)}]" for i in range(12)]
    Path("bomb.yaml").write_text("\n".join(levels))
    Path("deep.yaml").write_text("[" * 100_000)
    for name, limit in (("bomb", "100 aliases"), ("deep", "100 levels")):
        assert f"{name}.yaml must have at most {limit}" in refused([verb, "--config", f"{name}.yaml"])


@pytest.mark.parametrize("option", ["--path pipe", "--path=pipe"])
def test_a_pipe_is_refused(option: str, here: Path, refused: Refused) -> None:
    os.mkfifo("pipe")
    told = refused(["import-pool", *option.split(), "--store_dir", "store", "--task", "local_number"])
    assert "pipe is a pipe or a socket" in told
