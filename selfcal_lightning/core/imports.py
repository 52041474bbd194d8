"""Optional dependencies, and the error that says how to install a missing one."""

import importlib
import importlib.util
import logging
from types import ModuleType

from selfcal_lightning.core.errors import MissingPackageError

_CPU_HINTS = {"vllm": " On a machine without a GPU run `make setup-vllm`."}


def is_installed(module: str) -> bool:
    """Return whether ``module`` can be found, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def require(module: str, *, extra: str) -> ModuleType:
    check_installed(module, extra=extra)
    return importlib.import_module(module)


def check_installed(module: str, *, extra: str) -> None:
    """Refuse with installation advice if an optional dependency is missing; arguments as in ``require``."""
    if not is_installed(module):
        way = f"Run `pip install '.[{extra}]'` in the folder of selfcal_lightning.{_CPU_HINTS.get(extra, '')}"
        raise MissingPackageError(f"Expected `{module.partition('.')[0]}` to be installed, but it is not. {way}")


def keep_bitsandbytes_quiet() -> None:
    """Silence bitsandbytes' advice to install `kernels`. Call it before anything, such as PEFT, imports bitsandbytes.

    On CPUs with AVX512-BF16, `kernels` would download compiled code for packed weights, which this project disables.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:  # one function, which the log keeps once
    return "kernels-community" not in record.getMessage()


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
