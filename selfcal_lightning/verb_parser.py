"""The parser of a verb: a short usage, and of a mistake one sentence instead of all options."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from selfcal_lightning.parsing_errors import explain_parsing

NOT_UNDERSTOOD = 2


class ShortErrors:
    """Mixin for parsers of jsonargparse."""

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and how the verb is used, and end the process with status 2.

        A parser inside another one, of a part of the settings, leaves that to the outer one.
        """
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        sentence = explain_parsing(message, options_of(parser), fields_of)
        lines = [f"{prog}: error: {sentence}", f"usage: {short_usage(parser)}", f"`{prog} --help` lists the options."]
        sys.stderr.write("\n".join([*lines, ""]))
        sys.exit(NOT_UNDERSTOOD)

    def format_help(self: Any) -> str:
        """Return the help, whose usage names what must be given."""
        self.usage = self.usage or short_usage(self)
        return super().format_help()


class VerbParser(ShortErrors, ArgumentParser):
    """Parser of a verb that is a function."""


def short_usage(parser: ArgumentParser) -> str:
    """Return the options that must be given, and that there are others."""
    if parser.usage:
        return parser.usage
    required = [action for action in parser._actions if action.required]
    words = [f"{action.option_strings[0]} {action.dest.upper()}" for action in required if action.option_strings]
    return " ".join([parser.prog.replace(" [options]", ""), *words, "[options]"])


def options_of(parser: ArgumentParser) -> list[str]:
    """Return the names of all options, without dashes."""
    names = [name for action in parser._actions for name in action.option_strings]
    return [name.lstrip("-") for name in names if name.startswith("--") and not name.endswith("+")]


def fields_of(class_path: str) -> Iterable[str]:
    """Return the names of a class's settings."""
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
