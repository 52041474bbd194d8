"""Registries of tasks, estimators, strategies and reward formats, and plug-ins: users' modules that add to them.

The user names them (``--plugins``, or ``plugins`` in a YAML file) or installs them (an entry point); nothing is ever
loaded from a model folder or from data. Child processes get the same plug-ins through the environment.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from selfcal_lightning.core.config_files import configurations, given_options
from selfcal_lightning.core.errors import InputError, UserError, unknown_name

OPTION = "plugins"
GROUP = "selfcal_lightning.core.plugins"
VARIABLE = "SELFCAL_PLUGINS"
HELP = (
    "Modules, or .py files, that register tasks, estimators, strategies and reward formats of your own when they are "
    "imported; several with commas between them."
)
_FILE_ENDING = ".py"
# What this process has imported: names by place, and the entry points.
_loaded: dict[str, str] = {}
_loaded_points: set[str] = set()
T = TypeVar("T", bound=Any)  # whatever has a `name`


class Registry(dict[str, T]):
    """The members of a family by name; an unknown name raises InputError, with the most similar one.

    Args:
        option: The option that takes such a name, for messages.
    """

    def __init__(self, option: str, members: Iterable[T] = ()) -> None:
        super().__init__({member.name: member for member in members})
        self.option = option

    def __missing__(self, name: str) -> T:
        raise unknown_name(self.option, name, self)

    def register(self, member: T, *, reserved: Collection[str] = ()) -> T:
        """Add a member under its own name, which must be neither taken nor ``reserved``."""
        name = str(member.name)
        if name in self or name in reserved:
            raise InputError(f"Expected a new name for `{self.option}`, but {name!r} is registered already.")
        self[name] = member
        return member


def named_plugins(arguments: Sequence[str]) -> list[str]:
    found = [name for content in configurations(arguments) for name in _names(content.get(OPTION))]
    for option, value in given_options(arguments):
        if option in (f"--{OPTION}", f"--{OPTION}+"):
            found += _names(value)
    return list(dict.fromkeys(found))


def load_plugins(names: Iterable[str]) -> None:
    """Import each plug-in once, and pass their names on to child processes.

    A module is looked for in the current folder too, after all that is installed; a file can import its neighbours.
    """
    for name in names:
        place = str(Path(name).resolve()) if name.endswith(_FILE_ENDING) else name
        if place not in _loaded:
            _import(name, place)
            _loaded[place] = name
    if _loaded:
        os.environ[VARIABLE] = json.dumps(list(_loaded))


def load_installed_plugins() -> None:
    """Import the plug-ins of installed packages (entry-point group ``selfcal_lightning.core.plugins``).

    An entry point names a module, or a function in one, which is called without arguments.
    """
    for point in entry_points(group=GROUP):
        if point.value in _loaded_points:
            continue
        owner = "a package" if point.dist is None else point.dist.name
        try:
            found = point.load()
            if not isinstance(found, ModuleType):
                found()
        except UserError as error:
            raise InputError(f"The plug-in {point.name!r} of {owner} was refused. {error}") from error
        except (Exception, SystemExit) as error:  # whatever that package's code may raise
            wanted = f"the plug-in {point.name!r} of {owner} ({point.value}) to be importable"
            raise InputError(f"Expected {wanted}, but {_failure(error)}. Mend or uninstall {owner}.") from error
        _loaded_points.add(point.value)


def load_plugins_of_parent() -> None:
    load_installed_plugins()
    load_plugins(json.loads(os.environ.get(VARIABLE) or "[]"))


def loaded_plugins() -> list[str]:
    return list(_loaded.values())


def plugin_packages() -> list[str]:
    named = [_module_name(Path(name)) if name.endswith(_FILE_ENDING) else name for name in _loaded.values()]
    return sorted({name.partition(":")[0].partition(".")[0] for name in (*named, *_loaded_points)})


def _names(value: Any) -> list[str]:
    """Return the names in a list, or in a text with commas, in brackets or not."""
    if isinstance(value, str | int | float):
        value = str(value).strip().removeprefix("[").removesuffix("]").split(",")
    return [str(name).strip(" '\"") for name in value or [] if str(name).strip(" '\"")]


def _import(name: str, place: str) -> ModuleType:
    is_file = name.endswith(_FILE_ENDING)
    if is_file and not Path(place).is_file():
        raise InputError(f"Expected `--{OPTION}` to name modules or Python files, but there is no file {name}.")
    folder = str(Path(place).parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: it hides nothing that is installed
    if not is_file:
        _check_is_there(name)
    try:
        return _import_file(Path(place)) if is_file else importlib.import_module(name)
    except UserError as error:
        raise InputError(f"The plug-in {name} was refused. {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code may raise
        raise InputError(f"Expected the plug-in {name} to be importable, but {_failure(error)}.") from error


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module of the same name, unless that name is taken."""
    own = _module_name(file)
    taken = own in sys.modules or importlib.util.find_spec(own) is not None
    if taken and _origin(own) == str(file):
        return importlib.import_module(own)
    name = f"selfcal_plugin_{own}" if taken else own
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"Expected {file} to be a Python file, but it cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(file: Path) -> str:
    return file.stem.replace(".", "_")  # what stands before a dot would be a package


def _origin(name: str) -> str | None:
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)  # modules written in C have none
    else:
        spec = importlib.util.find_spec(name)
        file = None if spec is None else spec.origin
    return None if file is None else str(Path(file).resolve())


def _check_is_there(name: str) -> None:
    """Refuse a plug-in that does not exist, as opposed to one whose own imports fail."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InputError(f"`--{OPTION}` must name modules, or files that end in {_FILE_ENDING}, but got {name!r}.")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent of it
        spec = None
    if spec is None:
        lacks = f"there is none called {name!r}, neither installed nor in {os.getcwd()}"
        raise InputError(f"Expected `--{OPTION}` to name modules, but {lacks}. Name a file of your own by its path.")


def _failure(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the module {error.name!r}, which is not installed"
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}, cannot be read: {error.msg}"
    where = "".join(f"{at.filename}, line {at.lineno}, " for at in traceback.extract_tb(error.__traceback__)[-1:])
    text = " ".join(str(error).split())
    return f"{where}raised {type(error).__name__}{f': {text}' if text else ''}"
