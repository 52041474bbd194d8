from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.house import ROOT
from support.processes import run_python

import selfcal_lightning as sc
from selfcal_lightning.core.imports import is_installed, require

DOCTESTED = [
    ".".join(["selfcal_lightning", *path.relative_to(ROOT).with_suffix("").parts])
    for folder in ("datamodules", "callbacks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text()
]


def test_package_list_is_that_of_the_folders() -> None:
    tops = ("selfcal_lightning", "datamodules", "callbacks", "configs")
    folders = [path.relative_to(ROOT).parent.parts for top in tops for path in (ROOT / top).rglob("__init__.py")]
    names = [".".join(parts if parts[0] == "selfcal_lightning" else ("selfcal_lightning", *parts)) for parts in folders]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == sorted(names)


@pytest.mark.parametrize("name", DOCTESTED)
def test_examples_of_mapped_folders_hold(name: str) -> None:
    """`make test` runs those of the package itself."""
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", ["datamodules", "callbacks"])
def test_bare_name_is_refused(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"Import `selfcal_lightning.{name}`" in done.stderr


def test_importing_the_package_needs_no_extra_and_no_torch() -> None:
    """What needs torch, but no extra either, is imported in tests/benchmarks/test_scripts.py."""
    code = (
        "import sys, selfcal_lightning\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'the root imports nothing'\n"
        "import selfcal_lightning.data.tasks.registry\n"
        "assert not {'torch', 'datasets', 'sympy'} & set(sys.modules), 'the tasks load nothing heavy'\n"
        "for name in ('vllm', 'bitsandbytes', 'aiohttp'): sys.modules[name] = None\n"
        "import selfcal_lightning.cli, selfcal_lightning.records, selfcal_lightning.data.store.sample_store\n"
        "import selfcal_lightning.commands.generate, selfcal_lightning.commands.evaluate\n"
        "try: selfcal_lightning.cli.run(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "import selfcal_lightning.commands.export, selfcal_lightning.commands.pools\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    shown = run_python(code)
    assert all(option in shown for option in ("--devices", "--shard", "--num_samples", "--store_dir"))


@pytest.mark.slow
def test_wheel_holds_the_house(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert "selfcal_lightning/datamodules/ssc/datamodule.py" in names
    assert "selfcal_lightning/callbacks/generation.py" in names
    assert "selfcal_lightning/configs/demo.yaml" in names
    assert "selfcal_lightning/assets/tiny_solver/model.safetensors" in names
    assert not any(name.split("/")[0] in {"callbacks", "datamodules", "configs", "tests"} for name in names)


@pytest.mark.parametrize("name", sc.__all__)
def test_every_name_is_there(name: str) -> None:
    if name in {"VLLMEngine", "OpenAIEngine"}:
        pytest.importorskip({"VLLMEngine": "vllm", "OpenAIEngine": "aiohttp"}[name])
    assert getattr(sc, name) is not None


def test_a_missing_extra_is_named_and_a_broken_one_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_installed("no_such_module")
    with pytest.raises(ImportError, match=r"`no_such_module`.*pip install '\.\[qlora\]'"):
        require("no_such_module.inside", extra="qlora")
    with pytest.raises(ImportError, match=r"'\.\[vllm\]'.*make setup-vllm"):
        require("no_such_module", extra="vllm")
    (tmp_path / "selfcal_broken_module.py").write_text("import no_such_inner_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_inner_module"):
        require("selfcal_broken_module", extra="vllm")
    assert "selfcal_broken_module" not in sys.modules
    assert require("json", extra="dev").__name__ == "json"


# ---- data modules and callbacks stand above the library: import-linter cannot see mapped folders

FORBIDDEN = {
    "selfcal_lightning": ("datamodules", "callbacks"),
    "datamodules": ("callbacks", "commands", "cli"),
    "callbacks": ("datamodules", "commands", "cli"),
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports when it runs, at any depth."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    nodes = list(ast.walk(tree))
    named = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return named | {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_what_stands_above_is_not_imported(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    above = tuple(f"selfcal_lightning.{room}." for room in FORBIDDEN[folder])
    assert {str(path): name for path in files for name in imported(path) if f"{name}.".startswith(above)} == {}
