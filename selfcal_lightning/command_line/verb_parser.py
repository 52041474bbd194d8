"""The parser of a verb: a short usage, and of a mistake one sentence instead of all options."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from selfcal_lightning.command_line.parsing_errors import explain_parsing
from selfcal_lightning.plugins import HELP, OPTION

NOT_UNDERSTOOD = 2


class ShortErrors:
    """Mixin for parsers of jsonargparse."""

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
        self.refuse(explain_parsing(message, options_of(parser), fields_of), parser)

    def refuse(self: Any, sentence: str, parser: ArgumentParser) -> NoReturn:
        """End the process with a sentence and the usage of the parser of the verb."""
        prog = parser.prog.replace(" [options]", "")
        lines = [
            f"{prog}: error: {sentence}",
            f"usage: {parser.usage or parser.prog}",
            f"`{prog} --help` lists the options.",
        ]
        sys.stderr.write("\n".join([*lines, ""]))
        sys.exit(NOT_UNDERSTOOD)


class VerbParser(ShortErrors, ArgumentParser):
    """Parser of a verb that is a function, with the option that every verb has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exit_on_error:  # a parser inside another one, of a part of the settings, has no verb's options
            add_plugins_option(self)


def add_plugins_option(parser: ArgumentParser) -> None:
    """Add ``--plugins``, which was heeded before the parser was made: plug-ins name what other options choose from."""
    parser.add_argument(f"--{OPTION}", type=list[str] | str | None, default=None, help=HELP)


def options_of(parser: ArgumentParser) -> list[str]:
    """Return the names of all options, without dashes."""
    names = [name for action in parser._actions for name in action.option_strings]
    return [name.lstrip("-") for name in names if name.startswith("--") and not name.endswith("+")]


def fields_of(class_path: str) -> Iterable[str]:
    """Return the names of a class's settings."""
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
