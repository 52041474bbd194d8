"""The parser of a verb. It says what is wrong in one line: jsonargparse's own words without its tree of attempts."""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser, set_parsing_settings

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.core.plugins import HELP, OPTION, plugin_packages

_KEY = re.compile(r'Parser key "([^"]+)":')
_VALUE = re.compile(r"(?:Got|Given) value: ([^\n]*)")
_QUOTED = re.compile(r"'([^']+)'")
_CLASS = re.compile(r"class_path '([^']+)'")
# Lines that say how jsonargparse tried, not what is wrong.
_ATTEMPTS = (
    "Does not validate", "Subtypes:", "Errors:", "Given value", "Problem with given class_path",
    "Expected a <class 'NoneType'>", "Expected a path but",
)  # fmt: skip
NOT_UNDERSTOOD = 2
# Packages whose classes a configuration may name. Those of plug-ins come on top.
PACKAGES = ("selfcal_lightning", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
_allowed: set[str] = set()  # empty: all


def explain_parsing(message: str, known: Sequence[str]) -> str:
    """Return a parser's message on one line, with the option that was probably meant.

    Example:
        >>> explain_parsing("unrecognized arguments: --modle bundled", ["model", "seed"])
        'unrecognized option --modle. Did you mean --model?'
    """
    if message.startswith("unrecognized arguments: --"):
        option = message.split()[2].partition("=")[0]
        name = option.lstrip("-")
        longer = sorted({one for one in known if one.startswith(name) or one.endswith(f".{name}")}, key=len)
        meant = did_you_mean(name, longer[:1] or known) or (f" Did you mean {longer[0]!r}?" if longer else "")
        return f"unrecognized option {option}." + re.sub("'(.*)'", r"--\1", meant)
    if (foreign := re.search(r"Importing '([^']+)' is not allowed", message)) is not None:
        package = foreign[1].partition(".")[0]
        return f"{foreign[1]} is not imported: name its package in `--{OPTION} {package}` if you trust it."
    if (own := own_sentence(message)) is not None:
        return own
    key, owners, value = ".".join(_KEY.findall(message)), _CLASS.findall(message), _VALUE.search(message)
    lines = (line.strip().removeprefix("- ") for line in _KEY.sub("", message).splitlines())
    words = " ".join(line for line in lines if line and not line.startswith(_ATTEMPTS))
    words = re.sub(r"<class '([^']+)'>|typing\.(?=Literal)", r"\1", words)
    if owners and (wrong := re.search(r"Option '([^']+)' is not accepted", words)) is not None:
        module, _, name = owners[-1].rpartition(".")
        settings = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        words = f"{wrong[0]} by {name}.{did_you_mean(wrong[1], settings)}"
    elif value is not None:
        hint = did_you_mean(value[1], _QUOTED.findall(words)) if "Literal[" in words else ""
        words = f"{words.partition(' Got value: ')[0].rstrip('.')}. Got value: {value[1]:.120}.{hint}"
    return f"--{key}: {words}" if key else words


def own_sentence(message: str) -> str | None:
    """Return the sentence of an InputError of this package inside a parser's message, or None.

    Example:
        >>> own_sentence("- `lr` must be positive, got -1.0")
        '`lr` must be positive, got -1.0'
    """
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    return next((line for line in lines if "`" in line and not line.startswith("Given value")), None)


def import_named_packages_only() -> None:
    """Make the parsers of this process refuse a class of another package before it is imported."""
    _allowed.update(PACKAGES, plugin_packages())
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=sorted(_allowed))


def may_be_imported(path: str) -> bool:
    return not _allowed or path.partition(".")[0] in _allowed


class ShortErrors(ArgumentParser):
    """Takes options by their whole names only: a part of one may be another option in a later version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and how the verb is used; a nested parser leaves that to the outer one."""
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        names = [name for action in parser._actions for name in action.option_strings]
        known = [name.lstrip("-") for name in names if name.startswith("--") and not name.endswith("+")]
        # The parser sees a record that may be null as one option, though it takes those of its fields.
        records = [(a.dest, kind) for a in parser._actions for kind in get_args(getattr(a, "_typehint", None))]
        known += [f"{name}.{one.name}" for name, kind in records if is_dataclass(kind) for one in fields(kind)]
        self.refuse(explain_parsing(message, known), parser)

    def refuse(self, sentence: str, parser: ArgumentParser) -> NoReturn:
        prog = parser.prog.replace(" [options]", "")
        usage = f"usage: {parser.usage or parser.prog}\n`{prog} --help` lists the options."
        sys.stderr.write(f"{prog}: error: {sentence}\n{usage}\n")
        sys.exit(NOT_UNDERSTOOD)


class RaisingErrors(ShortErrors):
    """The same for a program: mistakes are raised."""

    def refuse(self, sentence: str, parser: ArgumentParser) -> NoReturn:
        raise InputError(sentence)


class VerbParser(ShortErrors):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exit_on_error:  # not for a nested parser, of a part of the settings
            add_plugins_option(self)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        let_flags_stand_alone(self)
        return super().parse_args(*args, **kwargs)


def let_flags_stand_alone(parser: ArgumentParser) -> None:
    """Let ``--flag`` mean ``--flag true``."""
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True


def add_plugins_option(parser: ArgumentParser) -> None:
    """Add ``--plugins``. They are loaded before the parser exists, since they add choices of other options."""
    parser.add_argument(f"--{OPTION}", type=list[str] | str | None, default=None, help=HELP)
