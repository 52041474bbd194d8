"""Which tests fork: found in their files, so that nobody has to remember the mark."""

import ast
from pathlib import Path

FORKS = {"ddp_fork", "run_processes"}  # Lightning's strategy of that name, and the function of `support.processes`


def may_fork(text: str) -> bool:
    """Return whether the text of a file names anything that forks."""
    return any(name in text for name in FORKS)


def forking_tests(path: Path) -> set[str]:
    """Return the functions of a test file that fork, by themselves or by the functions and fixtures that they use."""
    text = path.read_text()
    if not may_fork(text):
        return set()
    uses = {name: _named_in(node) for name, node in _definitions(ast.parse(text))}
    forking = {name for name, used in uses.items() if used & FORKS}
    while more := {name for name, used in uses.items() if used & forking} - forking:
        forking |= more
    return forking


def _definitions(module: ast.Module) -> list[tuple[str, ast.AST]]:
    """Return the functions, methods and values of a module by their names."""
    found: list[tuple[str, ast.AST]] = []
    found += [(node.name, node) for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    for node in module.body:
        if isinstance(node, ast.Assign):
            found += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    return found


def _named_in(node: ast.AST) -> set[str]:
    """Return the names, the parameters (of tests: fixtures) and the short texts that stand in a definition."""
    named: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            named.add(part.id)
        elif isinstance(part, ast.arg):
            named.add(part.arg)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            named.add(part.value)
    return named
