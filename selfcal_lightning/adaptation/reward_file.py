"""The reward file that goes with exported rows: it stands alone and reads answers as this package's tasks do."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Collection, Iterable, Mapping

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.tasks.answer_types import (
    Answers,
    ExpressionAnswers,
    LetterAnswers,
    NumberAnswers,
    ShortTextAnswers,
)
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.word_problems import WordProblems

_PACKAGE = "selfcal_lightning"
Place = tuple[str, str]  # a module and a name in it


def borrow(wanted: Iterable[Place], *, replaced: Collection[str]) -> str:
    """Return source that defines functions of this package, and whatever of it they use.

    Every name gets its module's in front (:func:`borrowed_name`): two modules may use one name for two things.
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
    "selfcal_lightning.data.tasks.extraction",
    "selfcal_lightning.data.tasks.expressions",
    "selfcal_lightning.data.tasks.answer_types",
    "selfcal_lightning.data.tasks.math_worker",
    "selfcal_lightning.data.tasks.word_problems",
)


def borrowed_name(place: Place) -> str:
    """Return the name that something has in the borrowed source.

    Example:
        >>> borrowed_name(("selfcal_lightning.data.tasks.expressions", "_DECIMAL"))
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


_ANSWERS = "selfcal_lightning.data.tasks"
_FAMILY = "selfcal_lightning.data.tasks.word_problems"
_READERS = {
    NumberAnswers: ("read_number", "numbers_equal"),
    LetterAnswers: ("read_letter", "letters_equal"),
    ShortTextAnswers: ("read_short_text", "short_texts_equal"),
    ExpressionAnswers: ("read_expression", "expressions_equal"),
}
_HOMES = {
    "read_number": "extraction", "read_letter": "extraction", "read_short_text": "extraction",
    "read_expression": "expressions", "numbers_equal": "answer_types", "letters_equal": "answer_types",
    "short_texts_equal": "answer_types", "expressions_equal": "answer_types",
}  # fmt: skip
_HEAD = '''"""Rewards of exported questions: 1 where a response gives the label, else 0. Written by `selfcal export-rl`.

It needs the standard library alone; for expressions math-verify, where it is installed, else only what is equal
without algebra is equal. Use it as

- verl:     reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score
- TRL:      GRPOTrainer(reward_funcs=[correct_reward], ...) with `from reward import correct_reward`
- OpenRLHF: --reward.remote_url reward.py
"""

from __future__ import annotations

'''
_ALGEBRA = """logging.getLogger("math_verify").setLevel(logging.ERROR)
SECONDS = 5.0  # of CPU time for one comparison, in the main thread; elsewhere only the limits on expressions hold


class _InProcess:
    def equal(self, pairs):
        return [_compared(*pair) for pair in pairs]


def _late(number, frame):
    raise TimeoutError("the comparison takes too long")


def _compared(answer, reference):
    is_main = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGPROF, _late) if is_main else None
    try:
        import math_verify  # which takes longer than a comparison, once

        if is_main:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        return math_worker_are_equal(answer, reference)
    except (ImportError, OSError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, earlier)


def default_pool():
    return _InProcess()
"""
_TAIL = '''

def judge(data_source, response, label):
    """Return 1.0 where a response gives the label, 0.0 where it does not, and None without a label."""
    if not label:
        return None
    if data_source not in READERS:
        raise ValueError(
            f"Expected `data_source` to be one of {', '.join(READERS)}, but got {data_source!r}. Use the reward.py "
            "that was exported beside these rows."
        )
    extract, verify = READERS[data_source]
    return float(verify(extract(response), label))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the score of one response, for verl; 0 without a label."""
    return {"score": judge(data_source, solution_str, ground_truth) or 0.0, "has_label": float(bool(ground_truth))}


def correct_reward(prompts, completions, answer, data_source, **columns):
    """Return the reward of each completion, for TRL; None without a label."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [judge(*each) for each in zip(data_source, texts, answer, strict=True)]


def reward_func(queries, prompts, labels, **kwargs):
    """Return the rewards of a batch, for OpenRLHF; 0 without a label."""
    import torch

    known = [json.loads(label) for label in labels]
    texts = [query[len(prompt) :] if query.startswith(prompt) else query for query, prompt in zip(queries, prompts)]
    found = [judge(one["data_source"], text, one["answer"]) or 0.0 for one, text in zip(known, texts, strict=True)]
    rewards = torch.tensor(found)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"correct": rewards}}
'''


def reward_source(tasks: Iterable[Task]) -> str:
    """Return the source of a reward file for the questions of some tasks."""
    kinds = {task.name: _kind(task) for task in tasks}
    wanted = {name for kind in kinds.values() if kind is not None for name in _READERS[type(kind)]}
    places = [(f"{_ANSWERS}.{_HOMES[name]}", name) for name in sorted(wanted)]
    parts = [_HEAD, "import json\n"]
    if "expressions_equal" in wanted:
        parts.append("import logging\nimport signal\nimport threading\n")
        places.append((f"{_ANSWERS}.math_worker", "are_equal"))
    family = None in kinds.values()
    if family:
        places += [(_FAMILY, name) for name in ("_ANSWER", "_NUMBER", "_canonical_number")]
    parts.append(borrow(places, replaced={"default_pool"}))
    if "expressions_equal" in wanted:
        parts.append(f"\n\n{_ALGEBRA}")
    if family:
        parts.append(f"\n\n{_family_functions()}\n")
    lines = [f"    {f'selfcal/{name}'!r}: {_reader(kind)}," for name, kind in sorted(kinds.items())]
    parts.append("\n\nREADERS = {\n" + "\n".join(lines) + "\n}\n")
    return "".join([*parts, _TAIL])


def _kind(task: Task) -> Answers | None:
    """Return how a task reads answers; None stands for the bundled word problems, which read their own way."""
    if isinstance(task, WordProblems):
        return None
    answers = task.dataset.answers if isinstance(task, DatasetTask) else None
    if answers is None or type(answers) not in _READERS:
        raise InputError(
            f"Expected tasks whose answers are numbers, letters, expressions or short texts, but {task.name!r} reads "
            "them in its own way. Set `reward_file` to false and write the trainer's reward yourself."
        )
    return answers


def _reader(kind: Answers | None) -> str:
    """Return the pair of functions that read and compare, as source."""
    if kind is None:
        return "(_word_problem_extract, _word_problem_verify)"
    read, equal = (borrowed_name((f"{_ANSWERS}.{_HOMES[name]}", name)) for name in _READERS[type(kind)])
    if isinstance(kind, LetterAnswers):
        return f"(lambda text: {read}(text, {kind.letters!r}, digits={kind.digits!r}), {equal})"
    return f"({read}, {equal})"


def _family_functions() -> str:
    """Return the reader of the bundled word problems as two functions."""
    renamed = {name: borrowed_name((_FAMILY, name)) for name in ("_ANSWER", "_NUMBER", "_canonical_number")}
    found = []
    for method, name in (
        (WordProblems.extract, "_word_problem_extract"),
        (WordProblems.verify, "_word_problem_verify"),
    ):
        node = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
        if not isinstance(node, ast.FunctionDef):
            raise TypeError(f"Expected a function, but got {node}.")
        node.name, node.args.args, node.body, node.returns = name, node.args.args[1:], node.body[1:], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in renamed:
                each.id = renamed[each.id]
        found.append(ast.unparse(node))
    return "\n\n\n".join(found)
