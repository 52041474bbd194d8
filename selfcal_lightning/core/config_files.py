"""The YAML files of a command line, read before slow imports."""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import flatten

OPTIONS = ("--config", "-c")
MOST_LEVELS = 100
MOST_ALIASES = 100


def config_files(arguments: Sequence[str]) -> list[Path]:
    return [Path(value) for value in _config_values(arguments) if not _is_yaml(value)]


def given_options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument as an option, with what stands behind its "=", or else with the next argument."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, given, value = argument.partition("=")
        yield option, value if given else following


def configurations(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what each ``--config`` holds, a file or YAML text."""
    for value in _config_values(arguments):
        if not _is_yaml(value):
            yield read_config(Path(value))
            continue
        with suppress(yaml.YAMLError, ValueError, RecursionError):  # the verb's parser says what is wrong
            if isinstance(content := yaml.safe_load(value), dict):
                yield content


def _config_values(arguments: Sequence[str]) -> list[str]:
    return [value for option, value in given_options(arguments) if option in OPTIONS and value]


def _is_yaml(value: str) -> bool:
    """Return whether a value of ``--config`` is YAML text instead of a path; the parser accepts both."""
    return bool(set(value) & set("{\n"))


def check_nesting(arguments: Sequence[str]) -> None:
    """Refuse values nested so deeply that the YAML parser, written in C, would crash."""
    for place, argument in enumerate(arguments):
        levels = accumulate((character in "[{") - (character in "]}") for character in argument)
        if (deepest := max(levels, default=0)) > MOST_LEVELS:
            option = arguments[place - 1] if place and not argument.startswith("--") else argument[:30]
            raise InputError(f"Expected the value of `{option}` to have at most {MOST_LEVELS} levels, got {deepest:,}.")


def check_files(arguments: Sequence[str]) -> None:
    """Refuse pipes and sockets, which may never end, and YAML whose aliases expand without bound."""
    for argument in arguments:
        value = argument.partition("=")[2] if argument.startswith("--") else argument
        try:
            mode = os.stat(value).st_mode
        except (OSError, ValueError):  # most values are no paths
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise InputError(f"{value} is a pipe or a socket: name a regular file.")
    for path in filter(Path.is_file, config_files(arguments)):
        aliases = level = 0
        for event in _events(path):
            aliases += isinstance(event, yaml.AliasEvent)
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > MOST_ALIASES:
                raise InputError(f"{path} must have at most {MOST_ALIASES} aliases (`*name`), got more.")
            if level > MOST_LEVELS:
                raise InputError(f"{path} must have at most {MOST_LEVELS} levels, got more.")


def _events(path: Path) -> Iterator[yaml.Event]:
    with suppress(yaml.YAMLError, ValueError, RecursionError):  # `read_config` says what is wrong with it
        yield from yaml.parse(path.read_bytes())


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(str(other) for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        listed = f" There are {', '.join(near[:5])}." if near else ""
        raise InputError(f"Expected `--config` to be a YAML file, but there is none at {path}.{listed}")
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise InputError(f"Expected {path} to be YAML, but got at{where[1:]}: {error.problem or error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise InputError(f"Expected {path} to be YAML, but it cannot be read: {reason}.") from error
    if not isinstance(content, dict):
        raise InputError(f"Expected {path} to hold settings (`name: value`), but got {type(content).__name__}.")
    return content


def given_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what files and options of a command line set, by dotted names without ``init_args``.

    Only for a first look: the verb's own parser decides.
    """
    settings: dict[str, Any] = {}
    for content in configurations(arguments):
        settings |= {_short(name): value for name, value in flatten(content)}
    for option, value in given_options(arguments):
        if option.startswith("--") and option not in OPTIONS:
            settings[_short(option[2:])] = value
    return settings


def override(settings: dict[str, Any], options: Mapping[str, Any], *within: str) -> dict[str, Any]:
    """Set options, nested or named with dots, in ``settings`` itself."""
    for name, value in options.items():
        names = [*within, *str(name).split(".")]
        if isinstance(value, Mapping) and value:
            override(settings, value, *names)
        else:
            _put(settings, names, value)
    return settings


def _put(settings: dict[str, Any], names: list[str], value: Any) -> None:
    """Set one value in nested settings, inside ``init_args`` where a class is named."""
    name, *rest = names
    if "class_path" in settings and name not in ("class_path", "init_args"):
        settings = settings.setdefault("init_args", {})
    if not rest:
        settings[name] = value
        return
    if isinstance(settings.get(name), list):
        raise InputError(f"`{name}` is a list, which is replaced as a whole: give all of it, not `{name}.{rest[0]}`.")
    if not isinstance(settings.get(name), dict):
        settings[name] = {}
    _put(settings[name], rest, value)


def _short(name: str) -> str:
    return name.replace(".init_args.", ".")
