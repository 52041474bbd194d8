import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.command_lines import ON_CPU, Refused, given_to, instantiated
from support.house import ROOT
from support.processes import run_command, run_python
from support.store_samples import write_lines, write_pool

from selfcal_lightning.cli import run
from selfcal_lightning.confidence.registry import ESTIMATORS, pool_dependent
from selfcal_lightning.core import plugins
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.inference.registry import STRATEGIES

TASK = """
    from selfcal_lightning.data.tasks.answer_types import NumberAnswers
    from selfcal_lightning.data.tasks.dataset import DatasetTask, LocalQuestions, bare_question
    from selfcal_lightning.data.tasks.registry import register_task

    register_task(DatasetTask(LocalQuestions("my_numbers", NumberAnswers()), prompt=bare_question))
"""
STRATEGY = """
    from dataclasses import dataclass
    from typing import ClassVar

    from selfcal_lightning.inference.base import Ask, make_verdict
    from selfcal_lightning.inference.registry import register_strategy

    @register_strategy
    @dataclass(frozen=True)
    class LastWord:
        name: ClassVar[str] = "last_word"
        grid_parameter: ClassVar[str] = "max_samples"
        max_samples: int = 4
        confidence: str | None = None

        def solve(self, question):
            seen = yield Ask(self.max_samples)
            answer = seen[-1].answer if seen else None
            return make_verdict(question, seen, answer, confidence=None, stopped_early=False)
"""
ESTIMATOR = """
    from selfcal_lightning.confidence.registry import register_estimator

    @register_estimator
    class Brevity:
        name = "brevity"
        is_probability = True
        needs_pool = True
        reads = "pool"

        def score(self, pool):
            return [[1.0 / (1 + len(sample.text)) for sample in entry.samples] for entry in pool]
"""


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what a plug-in registers, and what it leaves in this process."""
    registries = [(registry, dict(registry)) for registry in (TASKS, STRATEGIES, ESTIMATORS)]
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_loaded_points", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    os.environ.pop(plugins.VARIABLE, None)
    for name in set(sys.modules) - modules:
        # A library registers its operators with torch once a process: only what the tests wrote is imported anew.
        if "site-packages" not in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    for registry, before in registries:
        registry.clear()
        registry.update(before)


def write(path: Path, code: str) -> str:
    path.write_text(textwrap.dedent(code))
    return str(path)


def questions(path: Path) -> str:
    return str(write_lines(path, *({"question": f"{n} + 1?", "answer": n + 1} for n in range(4))))


def test_named_by_options_and_by_files_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"plugins": ["one", "two.py"]}))
    arguments = ["--config", str(file), "--plugins=[three, 'four']", "--plugins", "one,five"]
    assert plugins.named_plugins(arguments) == ["one", "two.py", "three", "four", "five"]
    assert plugins.named_plugins(["--config", "{plugins: [six.py]}"]) == ["six.py"]  # YAML text, as the parser takes it
    assert plugins.named_plugins(["--config", "{plugins: 3}"]) == ["3"]  # which no module is called
    assert plugins.named_plugins(["--model", "m"]) == []


def test_a_file_is_imported_once_and_named_to_other_processes(here: Path) -> None:
    write(here / "my_task.py", TASK)
    plugins.load_plugins(["my_task.py"])
    plugins.load_plugins(["./my_task.py"])
    assert get_task("my_numbers").load("test", path=questions(here / "q.jsonl"))[0].messages[0].content == "0 + 1?"
    assert plugins.loaded_plugins() == ["my_task.py"]
    assert json.loads(os.environ[plugins.VARIABLE]) == [str(here / "my_task.py")]


@pytest.mark.parametrize("name", ["json.py", "time.py", "tasks.v2.py", "numbers_of_mine"])  # `time` is written in C
def test_a_file_with_any_name_or_a_module_of_the_current_folder(name: str, here: Path) -> None:
    before = sys.modules.get(name.removesuffix(".py"))
    write(here / f"{name.removesuffix('.py')}.py", TASK)
    plugins.load_plugins([name])
    assert "my_numbers" in TASKS
    assert not name.endswith(".py") or sys.modules.get(name.removesuffix(".py")) is before


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("gone.py", None, "there is no file"),
        ("no_such_module_of_mine", None, "there is none called 'no_such_module_of_mine'"),
        ("p.py", "import no_such_library", "needs the module 'no_such_library', which is not installed"),
        ("p.py", "x = 1\nraise KeyError('k')", "p.py, line 2, raised KeyError: 'k'"),
        ("p.py", "raise SystemExit(0)", "p.py, line 1, raised SystemExit: 0"),
        ("p.py", "def (:", "p.py, line 1, cannot be read"),
        ("p.py", TASK.replace("my_numbers", "gsm8k"), "'gsm8k' is registered already"),
        ("p.py", STRATEGY.replace("frozen=True", "frozen=False"), "to be a frozen dataclass"),
        ("p.py", ESTIMATOR.replace('"brevity"', '"p_true"'), "'p_true' is registered already"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, code: str | None, words: str, here: Path, refused: Refused) -> None:
    if code is not None:
        write(here / name, code)
    said = refused(["answer", "--model", "bundled", "--plugins", name])
    assert said.startswith("selfcal answer: error: ")
    assert len(said.strip().splitlines()) == 1
    assert words in said


def installed(folder: Path, value: str) -> None:
    """Write what an installed package leaves that offers a plug-in."""
    info = folder / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\ntheirs = {value}\n")
    sys.path.insert(0, str(folder))


@pytest.mark.parametrize("value", ["their_module", "their_module:register"])
def test_an_installed_package_offers_a_plugin(value: str, tmp_path: Path) -> None:
    code = textwrap.dedent(TASK)
    if ":" in value:
        *imports, call = code.strip().splitlines()
        code = "\n".join([*imports, "def register():", f"    {call}"])
    write(tmp_path / "their_module.py", code)
    installed(tmp_path, value)
    plugins.load_installed_plugins()
    plugins.load_installed_plugins()
    assert "my_numbers" in TASKS


def test_an_installed_plugin_that_fails_names_its_package(tmp_path: Path) -> None:
    write(tmp_path / "their_module.py", "1 / 0")
    installed(tmp_path, "their_module")
    with pytest.raises(InputError, match=r"'theirs' of their-package .* ZeroDivisionError.*Mend or uninstall"):
        plugins.load_installed_plugins()


def test_every_kind_of_verb_takes_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "my_task.py", TASK)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"plugins": [file], "model": "bundled"}))
    given = given_to("answer", ["--config", str(tmp_path / "c.yaml")])
    assert given["model"] == "bundled"
    assert "plugins" not in given
    evaluated = given_to("evaluate", ["--config", str(ROOT / "configs/evaluate/demo.yaml")])
    assert [test.name for test in evaluated["tests"]] == ["id", "ood"]  # a part of the settings has no plug-ins
    demo = str(ROOT / "configs/demo.yaml")
    cli = instantiated(["fit", "--config", demo, "--plugins", "a,b.py", *ON_CPU], monkeypatch)
    assert cli.config["fit"].plugins == "a,b.py"  # what ConfigKeeper writes


def test_a_run_keeps_the_names_of_its_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--pools.mine", write_pool(tmp_path / "pool.jsonl"), "--output_dir", str(tmp_path / "out")]
    file = write(tmp_path / "mine.py", STRATEGY)
    more = ["--plugins", file, "--strategies", "[last_word]", "--num_resamples", "20", "--num_reshuffles", "3"]
    assert run([*arguments, *more]) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"]["plugins"] == [file]
    assert "last_word" in (tmp_path / "out" / "strategies.md").read_text()


def test_an_estimator_scores_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored = tmp_path / "scored.jsonl"
    arguments = ["--pool", write_pool(tmp_path / "pool.jsonl"), "--output", str(scored), "--estimator", "brevity"]
    assert run(["score", *arguments, "--plugins", write(tmp_path / "mine.py", ESTIMATOR)]) == 0, capsys.readouterr()
    responses = json.loads(scored.read_text().splitlines()[0])["responses"]
    assert responses[0]["confidence"]["brevity"] == pytest.approx(1 / 17)
    assert pool_dependent(["brevity"]) == ["brevity"]


@pytest.mark.slow
def test_worker_processes_know_the_plugins(tmp_path: Path, tiny_model: str) -> None:
    write(tmp_path / "my_task.py", TASK)
    command = [sys.executable, "-m", "selfcal_lightning", "generate", "--plugins", "my_task.py", "--model", tiny_model]
    command += ["--task", "my_numbers", "--path", questions(tmp_path / "q.jsonl"), "--store_dir", "samples"]
    command += ["--num_samples", "2", "--sampling.max_new_tokens", "4", "--devices", "2"]
    run_command(command, cwd=tmp_path)
    (kept,) = (tmp_path / "samples" / "runs").glob("generate-*.json")
    assert json.loads(kept.read_text())["plugins"] == ["my_task.py"]


def test_the_child_of_vllm_finds_the_plugins(tmp_path: Path) -> None:
    plugins.load_plugins([write(tmp_path / "my_task.py", TASK)])
    code = (
        "from selfcal_lightning.core.plugins import load_plugins_of_parent; load_plugins_of_parent()\n"
        "from selfcal_lightning.data.tasks.registry import get_task; print(get_task('my_numbers').name)"
    )
    assert run_python(code, env=worker_environment(os.environ, on_cpu=True)) == "my_numbers\n"


def test_a_verb_that_another_one_starts_finds_the_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, json.dumps([write(tmp_path / "my_task.py", TASK)]))
    arguments = ["--task", "my_numbers", "--model", "bundled", "--store_dir", str(tmp_path / "s"), "--check"]
    assert run(["generate", *arguments, "--path", questions(tmp_path / "q.jsonl")]) == 0, capsys.readouterr().err
