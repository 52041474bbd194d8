"""Functions of this package as source that stands alone: picked with all that they use, under names of their own."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Collection, Iterable, Mapping

_PACKAGE = "selfcal_lightning"
Place = tuple[str, str]  # a module and a name in it


def borrow(wanted: Iterable[Place], *, replaced: Collection[str]) -> str:
    """Return source that defines functions of this package, and whatever of it they use.

    Every name gets its module's in front (:func:`borrowed_name`): two modules may use one name for two things.

    Args:
        wanted: The functions, each as (module, name).
        replaced: Names that whoever takes the source defines; they keep their names and are not followed.
    """
    found: dict[Place, str] = {}
    imports: dict[str, None] = {}
    waiting = list(wanted)
    order: list[Place] = []
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        node, names, others = _definition(place, replaced)
        found[place] = _renamed(node, names)
        order.append(place)
        imports |= dict.fromkeys(others)
        waiting += names.values()
    # Constants are computed when the file is read, from one another in the order of their modules.
    modules = [module for module in _MODULES if any(place[0] == module for place in order)]
    parts = [found[place] for module in modules for place in sorted(_of(module, order), key=_line)]
    return "\n".join(sorted(imports)) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


_MODULES = (
    "selfcal_lightning.tasks.answers.extraction",
    "selfcal_lightning.tasks.answers.expressions",
    "selfcal_lightning.tasks.answers.verification",
    "selfcal_lightning.tasks.answers.math_worker",
    "selfcal_lightning.tasks.families.word_problems",
)


def borrowed_name(place: Place) -> str:
    """Return the name that something has in the borrowed source.

    Example:
        >>> borrowed_name(("selfcal_lightning.tasks.answers.expressions", "_DECIMAL"))
        'expressions_DECIMAL'
    """
    module, name = place
    return f"{module.rpartition('.')[2]}_{name.lstrip('_')}"


def _of(module: str, places: Iterable[Place]) -> list[Place]:
    return [place for place in places if place[0] == module]


def _line(place: Place) -> int:
    return _top_level(place[0])[0][place[1]].lineno


def _definition(place: Place, replaced: Collection[str]) -> tuple[ast.stmt, dict[str, Place], list[str]]:
    """Return where a name is defined, what of this package its definition uses, and the other imports that it needs."""
    module, name = place
    defined, own, others = _top_level(module)
    node = defined[name]
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names = {one: (module, one) for one in used if one in defined and one != name}
    names |= {one: (own[one], one) for one in used if one in own and one not in replaced}
    names[name] = place
    return node, names, [others[one] for one in used if one in others]


def _top_level(module: str) -> tuple[dict[str, ast.stmt], dict[str, str], dict[str, str]]:
    """Return what a module defines, the names that it takes from this package, and its other imports by name."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    defined: dict[str, ast.stmt] = {}
    own: dict[str, str] = {}
    others: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(_PACKAGE):
            own |= {alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            others |= {alias.name: f"from {node.module} import {alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            others |= {alias.name: f"import {alias.name}" for alias in node.names}
    return defined, own, others


def _renamed(node: ast.stmt, names: Mapping[str, Place]) -> str:
    """Return the source of a definition, without its docstrings, with its names as they are borrowed."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, one: ast.Name) -> ast.Name:
            return ast.Name(borrowed_name(names[one.id]), one.ctx) if one.id in names else one

        def visit_FunctionDef(self, one: ast.FunctionDef) -> ast.AST:
            self.generic_visit(one)
            if one.name in names:
                one.name = borrowed_name(names[one.name])
            if ast.get_docstring(one) is not None and len(one.body) > 1:
                one.body = one.body[1:]
            one.returns = None
            for argument in (*one.args.args, *one.args.kwonlyargs):
                argument.annotation = None
            return one

    return ast.unparse(ast.fix_missing_locations(Rename().visit(node)))
