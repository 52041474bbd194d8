import ast
import re
from pathlib import Path

import pytest
from support.house import ROOT

FOLDERS = ("selfcal_lightning", "datamodules", "callbacks", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "compile", "parse_expr", "sympify", "__import__"}
# Of a class whose file chooses what is built.
LOADS_BY_CONFIGURATION = re.compile(r"(^|\.)Auto\w*\.(from_pretrained|from_config)$")


def _keyword(call: ast.Call, name: str) -> object:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_security_floor(path: Path) -> None:
    for call in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]:
        name = ast.unparse(call.func)
        where = f"{path.relative_to(ROOT)}:{call.lineno} {name}"
        assert name not in FORBIDDEN_CALLS, where
        assert not name.startswith(("sympy.", "pickle.", "cPickle.", "dill.", "marshal.")), where
        assert name.split(".")[-1] != "parse_expr", where
        assert _keyword(call, "trust_remote_code") is not True, f"{where} trusts remote code"
        assert _keyword(call, "shell") is not True, f"{where} runs a shell"
        if name == "torch.load":
            assert _keyword(call, "weights_only") is True, f"{where} without weights_only=True"
        if LOADS_BY_CONFIGURATION.search(name):
            # Unset means that transformers asks on the terminal.
            assert _keyword(call, "trust_remote_code") is False, f"{where} may run code of a model"
            if name.endswith("from_pretrained") and "Model" in name:
                assert _keyword(call, "use_safetensors") is True, f"{where} may read pickles"
    assert "0.0.0.0" not in path.read_text(), f"{path} listens on all interfaces"  # noqa: S104
