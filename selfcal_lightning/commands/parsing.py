"""The parser of a verb, and what it says of a mistake: one line instead of jsonargparse's tree of attempts."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser, set_parsing_settings

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.core.plugins import HELP, OPTION, plugin_packages

_KEY = re.compile(r'Parser key "([^"]+)"')
_VALUE = re.compile(r"(?:Got|Given) value: ([^\n]*)")
_EXPECTED = re.compile(r"Expected an? (<class '[^']+'>|typing\.Literal\[.*?\])(?:\.|\n|$)")
_UNKNOWN = re.compile(r"[Oo]ption '([^']+)'")
_CLASS = re.compile(r"class_path '([^']+)'")
_FOREIGN = re.compile(r"Importing '([^']+)' is not allowed")
_BROKEN = re.compile(r"Problem with given class_path '([^']+)':\s*([^\n]+)")


def explain_parsing(message: str, known: Sequence[str]) -> str:
    """Return the message of a parser on one line, with the option that was meant.

    Example:
        >>> explain_parsing("unrecognized arguments: --modle bundled", ["model", "seed"])
        'unrecognized option --modle. Did you mean --model?'
    """
    if message.startswith("unrecognized arguments: --"):
        return _unknown_option(message.split()[2].partition("=")[0], known)
    if (foreign := _FOREIGN.search(message)) is not None:
        return foreign_class(foreign[1])
    if (own := own_sentence(message)) is not None:
        return own
    if (option := _UNKNOWN.search(message)) is not None:
        owners = _CLASS.findall(message[: option.start()])
        fields = fields_of(owners[-1]) if owners else known
        owner = f"of {owners[-1].rpartition('.')[2]}" if owners else "of this verb"
        return f"{option[1]!r} is no setting {owner}.{did_you_mean(option[1], fields)}"
    keys, value = _KEY.findall(message), _VALUE.search(message)
    kinds = [] if value is None else _EXPECTED.findall(message[: value.end()])
    if (broken := _BROKEN.search(message)) is not None and set(kinds) <= {"<class 'NoneType'>"}:
        return f"--{'.'.join(keys)} is {broken[1]!r}: {broken[2]}."
    if not keys or value is None or not kinds:
        return " ".join(message.split())
    wanted = " or ".join(dict.fromkeys(map(_plain_type, kinds)))
    hint = did_you_mean(value[1], re.findall(r"'([^']+)'", " ".join(one for one in kinds if "Literal" in one)))
    return f"--{'.'.join(keys)} must be {wanted}, got {value[1]!r:.120}.{hint}"


def own_sentence(message: str) -> str | None:
    """Return the sentence of an InputError of this package that stands in a message of the parser, or None.

    Example:
        >>> own_sentence("- `lr` must be positive, got -1.0")
        '`lr` must be positive, got -1.0'
    """
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    return next((line for line in lines if "`" in line and not line.startswith("Given value")), None)


def _unknown_option(option: str, known: Sequence[str]) -> str:
    name = option.lstrip("-")
    longer = sorted({one for one in known if one.startswith(name) or one.endswith(f".{name}")}, key=len)
    hint = did_you_mean(name, longer[:1] or known) or (f" Did you mean {longer[0]!r}?" if longer else "")
    return f"unrecognized option {option}." + re.sub("'(.*)'", r"--\1", hint)


def _plain_type(kind: str) -> str:
    name = kind.removeprefix("<class '").removesuffix("'>").removeprefix("typing.Literal")
    return {"NoneType": "null", "bool": "true or false"}.get(name, f"one of {name}" if "[" in name else name)


# Packages whose classes a configuration may name. Those of plug-ins come on top.
PACKAGES = ("selfcal_lightning", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")


_allowed: set[str] = set()  # empty: all


def import_named_packages_only() -> None:
    """Let the parsers of this process refuse a class of another package before it is imported."""
    _allowed.update(PACKAGES, plugin_packages())
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=sorted(_allowed))


def may_be_imported(path: str) -> bool:
    """Return whether a configuration may name this class."""
    return not _allowed or path.partition(".")[0] in _allowed


def foreign_class(path: str) -> str:
    """Return the refusal of a class of another package."""
    return f"{path} is not imported: name its package in `--{OPTION} {path.partition('.')[0]}` if you trust it."


NOT_UNDERSTOOD = 2


class ShortErrors:
    """Mixin for parsers of jsonargparse: short errors, and whole option names alone."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        """Take options by their whole names: a part of one may be that of another in a later version."""
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and how the verb is used, and end the process with status 2.

        A parser inside another one, of a part of the settings, leaves that to the outer one.
        """
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        self.refuse(explain_parsing(message, options_of(parser)), parser)

    def refuse(self: Any, sentence: str, parser: ArgumentParser) -> NoReturn:
        """End the process with a sentence and the usage of the parser of the verb."""
        prog = parser.prog.replace(" [options]", "")
        usage = f"usage: {parser.usage or parser.prog}\n`{prog} --help` lists the options."
        sys.stderr.write(f"{prog}: error: {sentence}\n{usage}\n")
        sys.exit(NOT_UNDERSTOOD)


class RaisingErrors(ShortErrors):
    """The same for a program: what is wrong is raised."""

    def refuse(self, sentence: str, parser: ArgumentParser) -> NoReturn:
        """Raise the sentence."""
        raise InputError(sentence)


class VerbParser(ShortErrors, ArgumentParser):
    """Parser of a verb that is a function, with the option that every verb has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exit_on_error:  # a parser inside another one, of a part of the settings, has no verb's options
            add_plugins_option(self)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, where flags may stand alone."""
        let_flags_stand_alone(self)
        return super().parse_args(*args, **kwargs)


def let_flags_stand_alone(parser: ArgumentParser) -> None:
    """Let ``--flag`` mean ``--flag true``."""
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True


def add_plugins_option(parser: ArgumentParser) -> None:
    """Add ``--plugins``, which was heeded before the parser was made: plug-ins name what other options choose from."""
    parser.add_argument(f"--{OPTION}", type=list[str] | str | None, default=None, help=HELP)


def options_of(parser: ArgumentParser) -> list[str]:
    """Return the names of all options, without dashes."""
    names = [name for action in parser._actions for name in action.option_strings]
    known = [name.lstrip("-") for name in names if name.startswith("--") and not name.endswith("+")]
    # A record that may be null is one option for the parser, though it takes those of its fields.
    records = [(a.dest, kind) for a in parser._actions for kind in get_args(getattr(a, "_typehint", None))]
    return known + [f"{name}.{one.name}" for name, kind in records if is_dataclass(kind) for one in fields(kind)]


def fields_of(class_path: str) -> Iterable[str]:
    """Return the names of a class's settings."""
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
