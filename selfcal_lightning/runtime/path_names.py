"""Names that become parts of paths: checked before the work whose results would be written under them."""

from __future__ import annotations

import re
from urllib.parse import quote

from selfcal_lightning.errors import InputError

PATH_NAME = re.compile(r"[\w@=+-][\w.@=+ -]{0,99}")


def check_path_name(option: str, name: str) -> str:
    """Return ``name`` where it can be the name of a file: no folder in it, nothing that leads elsewhere.

    Raises:
        InputError: It is something else.

    Example:
        >>> check_path_name("tests.name", "gsm8k-hard")
        'gsm8k-hard'
    """
    if PATH_NAME.fullmatch(name) is None:
        raise InputError(
            f"Expected `{option}` to be a name that a file can have (at most 100 letters, digits, spaces and any of "
            f"_ . - + = @, not beginning with a dot), but got {name!r}."
        )
    return name


def file_name(name: str) -> str:
    """Return a name for the file of something whose own name may be any text, such as a confidence of a pool.

    Example:
        >>> file_name("p_true_platt"), file_name("../P(True)")
        ('p_true_platt', '%2E%2E%2FP%28True%29')
    """
    return name if PATH_NAME.fullmatch(name) else quote(name, safe=" ").replace(".", "%2E")
