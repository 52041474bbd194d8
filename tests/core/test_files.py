import errno
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.command_lines import Refused
from support.kill_worker import die_at
from support.other_models import plain_copy, snapshot
from support.store_samples import write_pool
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.cli import run
from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_path_name, check_replaceable, check_results_folder, file_name
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.store.sample_store import SampleStore


def killed_at(call: int, path: Path) -> None:
    """Let a child write ``path`` and die right before its call number ``call`` of fsync or replace."""
    child = os.fork()
    if not child:
        die_at(call)
        files.write_atomically(path, b"new")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(("call", "left"), [(1, b"old"), (2, b"old"), (3, b"new")])
def test_a_kill_leaves_the_old_content_or_the_new(tmp_path: Path, call: int, left: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    killed_at(call, path)
    assert path.read_bytes() == left
    assert files.remove_abandoned(tmp_path) == (1 if call < 3 else 0)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_somebody_writes_is_not_cleaned_up(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    path.parent.mkdir()
    with files.open_atomically(path) as file:
        file.write(b"half")
        assert files.remove_abandoned(tmp_path) == 0
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    killed_at(2, path)
    killed_at(2, path.with_name("other"))
    assert files.remove_abandoned(path.parent, of="other") == 1
    assert files.remove_abandoned(tmp_path) == 1


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(2, tmp_path / "file")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert files.remove_abandoned(tmp_path) == 0
    assert files.write_atomically(tmp_path / "file", b"whole")
    assert len(list(tmp_path.iterdir())) == 2


def test_lines_that_break_off_leave_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    files.write_json_lines(path, [{"a": "é"}, {"a": None}])
    assert path.read_text() == '{"a": "é"}\n{"a": null}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json_lines(path, [{"a": 1}, {"a": float("nan")}])
    assert path.read_text() == '{"a": "é"}\n{"a": null}\n'
    assert list(tmp_path.iterdir()) == [path]


# ---- damaged or hostile JSON and YAML: every verb names the file and the line, before it reads without bound

DEEP = "[" * 100_000 + "]" * 100_000
GOOD = '{"id": "a", "task": "gsm8k", "split": "train", "question": "?", "reference": "7", "responses": [{"text": "7"}]}'
BROKEN = {
    "deep": (f'{{"id": "b", "question": {DEEP}}}', "nested too deeply"),
    "digits": (f'{{"id": "b", "reference": {"1" * 5_000}}}', "a number that is too long"),
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


@pytest.mark.parametrize("verb", ["evaluate", "generate", "fit"])
def test_yaml_that_grows_without_bound_is_refused(verb: str, here: Path, refused: Refused) -> None:
    assert "Expected the value of `--pools` to have at most" in refused(["evaluate", "--pools", DEEP])
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


# ---- what a verb writes never takes the place of anything but its own earlier files

NUM_QUESTIONS = 12


@pytest.fixture
def pool(here: Path) -> str:
    """A pool as a user's own script wrote it, in the current folder."""
    return write_pool(here / "pool.jsonl", questions=NUM_QUESTIONS)


@pytest.fixture
def store(pool: str, tmp_path: Path) -> str:
    import_pool(pool, tmp_path / "store")
    return str(tmp_path / "store")


def arguments(verb: str, output: str) -> list[str]:
    """A command line that does little and writes to ``output``."""
    return [verb, *{
        "fit-threshold": ["--pool", "pool.jsonl", "--output", output, "--max_samples", "4", "--budget", "2"],
        "fit-confidence": ["--pool", "pool.jsonl", "--output", output, "--kind", "platt"],
        "export-pool": ["--store_dir", "store", "--path", output],
        "score": ["--pool", "pool.jsonl", "--output", output, "--estimator", "response_consistency"],
    }[verb]]  # fmt: skip


VERBS = ["fit-threshold", "fit-confidence", "export-pool", "score"]


def victims(folder: Path) -> list[str]:
    """Files of others that a slip of the keyboard could name."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "notes.txt").write_text("mine\n")
    (folder / "other.jsonl").write_text('{"question": "?", "answer": "7"}\n')
    (folder / "weights.safetensors").write_bytes(bytes(1000))
    return [str(folder / name) for name in ("config.json", "notes.txt", "other.jsonl", "weights.safetensors")]


@pytest.mark.parametrize("verb", VERBS)
def test_files_of_others_stay_as_they_are(pool: str, store: str, tmp_path: Path, refused: Refused, verb: str) -> None:
    places = {path: "which is something else and is left as it is" for path in victims(tmp_path)}
    places |= {"store": "which is a folder"} | ({} if verb == "score" else {pool: "is something else"})
    before = snapshot(tmp_path)
    for path, reason in places.items():
        assert f"but got {path}, " in (shown := refused(arguments(verb, path)))
        assert reason in shown
    assert snapshot(tmp_path) == before
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a socket" in refused(arguments(verb, "pipe"))


@pytest.mark.parametrize("verb", VERBS)
def test_own_files_and_empty_ones_are_replaced(pool: str, store: str, tmp_path: Path, verb: str) -> None:
    output = tmp_path / "output"
    output.write_text("")
    for _ in range(2):
        assert run(arguments(verb, str(output))) == 0
        assert output.stat().st_size > 0


def test_thresholds_confidences_and_figures_replace_their_own_kind(pool: str, tmp_path: Path, refused: Refused) -> None:
    from matplotlib.figure import Figure

    assert run(arguments("fit-threshold", "threshold.json")) == 0
    assert run(arguments("fit-confidence", "confidence.json")) == 0
    before = snapshot(tmp_path)
    assert "a new file or an earlier fitted threshold" in refused(arguments("fit-threshold", "confidence.json"))
    assert "a new file or an earlier fitted confidence" in refused(arguments("fit-confidence", "threshold.json"))
    assert snapshot(tmp_path) == before
    assert "such as fit.json" in refused(arguments("fit-confidence", "fit.png"))
    assert not Path("fit.png").exists()
    assert run([*arguments("fit-confidence", "fit.png"), "--figure", "false"]) == 0
    assert json.loads(Path("fit.png").read_text())["kind"] == "platt"
    Figure().savefig("other.png")
    before = snapshot(tmp_path)
    assert "other.png, which is something else" in refused(arguments("fit-confidence", "other.json"))
    assert snapshot(tmp_path) == before


def test_a_pool_may_be_scored_in_its_own_place(pool: str, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(pool)
    for output in (pool, "link.jsonl"):
        assert run(arguments("score", output)) == 0
    assert "response_consistency" in json.loads(Path(pool).read_text().splitlines()[0])["responses"][0]["confidence"]


def evaluate(pool: str, folder: Path) -> list[str]:
    few = ["--num_reshuffles", "2", "--num_resamples", "2", "--tables", "short", "--strategies", "[self_consistency]"]
    return ["evaluate", "--pools", json.dumps({"base": pool}), "--output_dir", str(folder), *few]


@pytest.mark.parametrize(
    "name", ["results.json", "results.csv", "strategies.md", "accuracy_samples_test.png", "fitted"]
)
def test_an_evaluation_replaces_only_an_evaluation(pool: str, tmp_path: Path, refused: Refused, name: str) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / name).write_text('{"settings": {}}')
    before = snapshot(folder)
    assert f"where {name} would be replaced and is something else" in refused(evaluate(pool, folder))
    assert snapshot(folder) == before


def test_an_evaluation_goes_into_its_own_folder_again_also_after_a_stop(pool: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run(evaluate(pool, folder)) == 0
    assert json.loads((folder / "evaluation.json").read_text())["arguments"]["pools"] == {"base": pool}
    (folder / "results.json").unlink()  # as if it had been stopped before the last file
    assert run(evaluate(pool, folder)) == 0
    assert (folder / "notes.txt").read_text() == "mine"


def test_no_store_is_laid_into_a_folder_of_something_else(
    pool: str, tiny_model: str, tmp_path: Path, refused: Refused
) -> None:
    model = Path(plain_copy(tiny_model, tmp_path / "my_model"))
    before = snapshot(model)
    generate = ["generate", "--model", "bundled", "--task", "word_problems", "--limit", "1", "--num_samples", "1"]
    for command in (generate, ["import-pool", "--path", pool]):
        told = refused([*command, "--store_dir", str(model)])
        assert f"but got {model}, which holds README.md, chat_template.jinja, config.json" in told
    assert "which is a file" in refused([*generate, "--store_dir", pool])
    module = module_of(tiny_model)
    with pytest.raises(ValueError, match="`store_dir` to be a sample store or a new or empty folder"):
        trainer_with(generation()).fit(module, datamodule=data_module(tiny_model, model))
    assert module.model is None
    assert snapshot(model) == before


def test_a_store_that_was_stopped_before_its_first_sample_is_one(pool: str, tmp_path: Path) -> None:
    for folder in ("runs", "meetings/token"):
        (tmp_path / "store" / folder).mkdir(parents=True)
    (tmp_path / "store" / ".lock").write_text("")
    import_pool(pool, tmp_path / "store")
    (tmp_path / "store" / "notes.txt").write_text("mine")
    import_pool(pool, tmp_path / "store")
    assert len(SampleStore(tmp_path / "store").question_ids()) == NUM_QUESTIONS


def test_an_output_is_none_of_its_inputs(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text("{}\n")
    for written in (path, tmp_path / "folder" / ".." / "scores.jsonl"):
        with pytest.raises(InputError, match="is read by the same command"):
            check_replaceable(written, lambda _: True, option="output", kind="mine", inputs=[path])


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model.safetensors", "rounds"])
def test_results_are_not_written_into_models_and_stores(name: str, tmp_path: Path) -> None:
    check_results_folder(tmp_path)
    (tmp_path / name).mkdir() if name == "rounds" else (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=f"`output_dir` .* holds {name}"):
        check_results_folder(tmp_path)


def test_exports_of_rollouts_replace_no_file_of_others(store: str, tmp_path: Path, refused: Refused) -> None:
    victims(tmp_path)
    before = snapshot(tmp_path)
    wanted = ["--samples_dir", store, "--store_dir", "rollouts", "--split", "calibration", "--model", "bundled"]
    for options, message in (
        (["--export", "config.json"], "`export` to be a new file or earlier"),
        (["--export_trl", "config.json"], "`export_trl` to be a new file or"),
        (["--export", "both.jsonl", "--export_trl", "both.jsonl"], "`export` and `export_trl` must be different files"),
    ):
        assert message in refused(["rollout", *wanted, "--steps", "sentence", *options])
    assert snapshot(tmp_path) == before


# ---- names that become parts of paths: refused before the work where they lead elsewhere

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


def test_names_that_are_names_stay_and_others_stay_apart() -> None:
    for name in ("id", "gsm8k-hard", "test 2", "p_true@v2", "größe", "a.b", "x" * 100):
        assert check_path_name("tests.name", name) == file_name(name) == name
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


@pytest.mark.slow
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
