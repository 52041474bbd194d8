"""The security floor, held by reading the source: no code from data, no pickles, no remote code, loopback only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("selfcal_lightning", "datamodules", "callbacks", "benchmarks")
FORBIDDEN_CALLS = {"eval", "exec", "compile", "parse_expr", "sympify", "__import__"}


def _files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Return each call of a file with the bare or attribute name that is called."""
    found: list[tuple[str, ast.Call]] = []
    for node in _all_calls(path):
        if isinstance(node.func, ast.Name):
            found.append((node.func.id, node))
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            found.append((f"{node.func.value.id}.{node.func.attr}", node))
    return found


def _all_calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def _loads_by_configuration(call: ast.Call) -> bool:
    """Return whether a call is ``from_pretrained`` or ``from_config`` of a class whose file chooses what is built."""
    method = call.func
    if not isinstance(method, ast.Attribute) or method.attr not in {"from_pretrained", "from_config"}:
        return False
    name = method.value.attr if isinstance(method.value, ast.Attribute) else getattr(method.value, "id", "")
    return name.startswith("Auto")


def _keyword(call: ast.Call, name: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_security_floor(path: Path) -> None:
    for name, call in _calls(path):
        where = f"{path.relative_to(ROOT)}:{call.lineno}"
        assert name not in FORBIDDEN_CALLS, f"{where} {name}"
        assert not name.startswith("sympy."), f"{where} {name}"
        assert name.split(".")[-1] != "parse_expr", f"{where} {name}"
        assert not name.startswith(("pickle.", "cPickle.", "dill.", "marshal.")), f"{where} {name}"
        assert _keyword(call, "trust_remote_code") is not True, f"{where} trusts remote code"
        assert _keyword(call, "shell") is not True, f"{where} runs a shell"
        if name == "torch.load":
            assert _keyword(call, "weights_only") is True, f"{where} torch.load without weights_only=True"
    for call in filter(_loads_by_configuration, _all_calls(path)):
        where = f"{path.relative_to(ROOT)}:{call.lineno}"
        # Unset means that transformers asks on the terminal.
        assert _keyword(call, "trust_remote_code") is False, f"{where} may run code of a model"
        if call.func.attr == "from_pretrained" and "Model" in ast.unparse(call.func):
            assert _keyword(call, "use_safetensors") is True, f"{where} may read pickles"
    assert "0.0.0.0" not in path.read_text(), f"{path} listens on all interfaces"  # noqa: S104
