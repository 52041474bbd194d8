"""A server's address and key, and what may be shown of what it says."""

from __future__ import annotations

import ipaddress
import os
import re

from selfcal_lightning.errors import InputError

_BASE_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?(?:/[\w./~-]*)?")
_HIDDEN = "[key]"
_LONGEST = 800


def check_base_url(base_url: str, *, allow_http: bool = False) -> str:
    """Return ``base_url`` without a trailing slash.

    Args:
        base_url: ``https://HOST[:PORT][/PATH]``, or ``http://`` for this machine.
        allow_http: Whether ``http://`` may name another machine.

    Raises:
        ValueError: The address is not of this form, holds a user name, a password or a query, or would send prompts
            and key over the network in the clear.

    Example:
        >>> check_base_url("http://127.0.0.1:8000/v1/")
        'http://127.0.0.1:8000/v1'
    """
    match = _BASE_URL.fullmatch(base_url)
    if match is None:  # it may hold a password, so it is not repeated
        raise InputError(
            "Expected `base_url` to be like https://host:port/v1, without a user name, a password or a query, but got "
            "something else. The key belongs into the environment variable that `api_key_env` names."
        )
    if match["scheme"] == "http" and not allow_http and not _is_this_machine(match["host"]):
        raise InputError(
            f"Expected `base_url` to begin with https:// unless it names this machine, but got {base_url!r}: prompts "
            "and key would travel in the clear. Use https, an ssh tunnel to 127.0.0.1, or set `allow_http`."
        )
    return base_url.rstrip("/")


def read_key(name: str) -> str | None:
    """Return the key in the environment variable ``name``, None where it is unset or empty.

    Raises:
        ValueError: When it holds what cannot stand in a header, such as a line break. It is not shown.
    """
    key = os.environ.get(name, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(f"Expected the key in ${name} to be printable ASCII, but it is not. Set it anew.")
    return key or None


def presentable(text: str, *, key: str | None) -> str:
    r"""Return what may be shown of ``text`` that a server or a library wrote: short, printable, and without the key.

    Example:
        >>> presentable("wrong key sk-1\n", key="sk-1")
        'wrong key [key]'
    """
    hidden = text if key is None else text.replace(key, _HIDDEN)  # before it is cut, or half a key would stay
    line = " ".join("".join(c if c.isprintable() else " " for c in hidden).split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False
