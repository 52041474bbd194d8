"""What jsonargparse says of a command line or a YAML, put into one sentence of this house's grammar."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from selfcal_lightning.core.errors import did_you_mean
from selfcal_lightning.core.plugins import HELP, OPTION

LONGEST_VALUE = 120
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":(?P<rest>(?:(?!Parser key ").)*)', re.DOTALL)
_VALUE = re.compile(r"(?:Got value|Given value): (?P<value>[^\n]*)")
_TYPE = re.compile(r"Expected an? (<class '[^']+'>|typing\.Literal\[.*\])")
_PATH = re.compile(r"- Expected a path but .* either not accessible or invalid\n")
_OWN = re.compile(r"Expected `[^`]+`.*? but got [^\n]*")
_NOT_ACCEPTED = re.compile(
    r"(?:Problem with given class_path '(?P<owner>[^']+)'.*?)?(?:Option|does not accept option) '(?P<option>[^']+)'",
    re.DOTALL,
)
_BARE = re.compile(r"argument (?P<option>--[\w.]+)\S*: expected .* argument")
_LITERAL = "typing.Literal"
_REQUIRED = "the following arguments are required: "
_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null",
    "list": "a list", "dict": "a mapping",
}  # fmt: skip


def explain_parsing(message: str, known: Iterable[str], fields_of: Callable[[str], Iterable[str]]) -> str:
    """Return the message of a parser as a sentence that says what was expected, what was found, and what was meant.

    Example:
        >>> explain_parsing("unrecognized arguments: --modle bundled", ["model", "seed"], lambda path: [])
        'Expected options of this verb, but got `--modle`. Did you mean `--model`?'
    """
    if message.startswith("unrecognized arguments: "):
        return _unknown_options(message.partition(": ")[2], known)
    if (own := own_sentence(message)) is not None:
        return own
    if (option := _NOT_ACCEPTED.search(message)) is not None:
        return _unknown_setting(option["option"], option["owner"], known, fields_of)
    if message.startswith(_REQUIRED):
        names = " and ".join(f"`--{name}`" for name in message.removeprefix(_REQUIRED).split(", "))
        return f"Expected {names} to be given, but got none."
    if (bare := _BARE.match(message)) is not None:
        return f"Expected a value after `{bare['option']}`, but got none."
    return _wrong_value(message) or f"Expected options of this verb, but got something else: {_one_line(message)}"


def _wrong_value(message: str) -> str | None:
    """Return the sentence for a value of another type, where the message is of one."""
    keys = list(_KEY.finditer(message))
    if not keys:
        return None
    key, rest = keys[-1]["key"], _PATH.sub("", keys[-1]["rest"])
    name = f"`--{key}`" if len(keys) == 1 else f"`{key}` in `--{keys[0]['key']}`"
    value = _VALUE.search(rest)
    kinds = [] if value is None else _TYPE.findall(rest[: value.end()])
    if not kinds or value is None:
        return f"Expected a usable {name}, but got: {_one_line(rest)}"
    given = _shorten(value["value"].strip())
    choices = list(dict.fromkeys(str(choice) for kind in kinds for choice in _choices(kind)))
    words = [f"one of {', '.join(choices)}"] if choices else []
    words += [_words_of(kind) for kind in kinds if not _choices(kind)]
    return (
        f"Expected {name} to be {' or '.join(dict.fromkeys(words))}, but got {given!r}.{did_you_mean(given, choices)}"
    )


def own_sentence(message: str) -> str | None:
    """Return the sentence of this house that stands in a message of the parser, or None.

    Example:
        >>> own_sentence("Errors: - Expected `lr` to be positive, but got -1.0")
        'Expected `lr` to be positive, but got -1.0'
    """
    found = _OWN.search(message)
    return None if found is None else found[0].strip()


def _unknown_options(given: str, known: Iterable[str]) -> str:
    known = list(known)
    names = [word.partition("=")[0] for word in given.split() if word.startswith("-")]
    if not names:
        return f"Expected options such as `--name value`, but got {_shorten(given)!r} that belongs to none."
    begun = names[0].lstrip("-")
    longer = sorted({name for name in known if name.startswith(begun) and "." not in name}, key=len)
    hint = did_you_mean(begun, longer[:1] or known) or (f" Did you mean {longer[0]!r}?" if longer else "")
    hint = hint.replace("'", "`").replace("`", "`--", 1)
    return f"Expected options of this verb, but got `{names[0]}`.{hint}"


def _unknown_setting(
    option: str, owner: str | None, known: Iterable[str], fields_of: Callable[[str], Iterable[str]]
) -> str:
    if owner is None:
        return f"Expected a setting of this verb, but got `{option}`.{did_you_mean(option, known)}"
    fields = list(fields_of(owner))
    hint = did_you_mean(option, fields) or f" It has {', '.join(fields)}."
    return f"Expected a setting of {owner.rpartition('.')[2]}, but got `{option}`.{hint}"


def _words_of(kind: str) -> str:
    """Return a Python type in the words of a command line.

    Example:
        >>> _words_of("<class 'int'>")
        'a whole number'
    """
    name = kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
    return _WORDS.get(name, f"a {name}")


def _choices(kind: str) -> list[object]:
    """Return the values of a ``Literal`` type; none of another type."""
    return list(ast.literal_eval(kind.removeprefix(_LITERAL))) if kind.startswith(_LITERAL) else []


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
