"""Adapters that are trained beside the first one: other targets, other queries, over one reading of the responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from selfcal_lightning.errors import InputError
from selfcal_lightning.models.lora import FIRST
from selfcal_lightning.prompts.chat_format import ChatFormat

PREFIX = "beside_"  # of an adapter's name in PEFT, so that it is no part of the name of a layer
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TAKEN = frozenset({FIRST, "best"})  # the second is the end of the name of AdapterExport's best folder


@dataclass(frozen=True)
class BesideSettings:
    """What an adapter beside the first one has of its own; what is None is as in the first one.

    Attributes:
        target: What it learns, one of the data module's targets.
        teacher: File of a fused confidence that the target is mixed with. That of the first one is not taken over.
        teacher_share: Share of the teacher in the target.
        query: The question that wakes it, at most as long as that of the first one, in tokens.
        loss: "smooth_l1" or "squared".
        ranking: Weight of the order of the responses to one question.
    """

    target: str | None = None
    teacher: str | None = None
    teacher_share: float = 0.0
    query: str | None = None
    loss: Literal["smooth_l1", "squared"] | None = None
    ranking: float | None = None


def read_beside(
    beside: Mapping[str, BesideSettings | Mapping[str, Any]] | None, *, activated: bool
) -> dict[str, BesideSettings]:
    """Return the settings of the adapters beside the first one, by name; those of a checkpoint are plain.

    Raises:
        InputError: A name that cannot be that of an adapter, or there is nothing that they could share.
    """
    settings = {
        name: BesideSettings(**one) if isinstance(one, Mapping) else one for name, one in (beside or {}).items()
    }
    if settings and not activated:
        raise InputError(
            f"Expected `beside` with an activated adapter alone, but got {', '.join(settings)} with joint training, in "
            "which every adapter reads the responses in its own way. Set `lora.activated: true`, or leave it out."
        )
    for name in settings:
        if not NAME.fullmatch(name) or name in TAKEN:
            raise InputError(
                f"Expected the names in `beside` to be letters, digits and underscores, none of {sorted(TAKEN)}, but "
                f"got {name!r}."
            )
    return settings


def adapter_name(name: str | None) -> str:
    """Return what an adapter beside the first one is called in PEFT; None is the first one.

    Example:
        >>> adapter_name("votes"), adapter_name(None)
        ('beside_votes', 'default')
    """
    return FIRST if name is None else f"{PREFIX}{name}"


def plain_beside(beside: Mapping[str, BesideSettings]) -> dict[str, dict[str, Any]]:
    """Return the settings as plain types."""
    return {name: asdict(one) for name, one in beside.items()}


def read_queries(beside: Mapping[str, BesideSettings], chat: ChatFormat) -> dict[str, ChatFormat]:
    """Return the chat format of each adapter, with its own query.

    Args:
        beside: The adapters.
        chat: The chat format of the first one.

    Raises:
        InputError: A query is longer than that of the first one, for which the rows leave room.
    """
    chats = {
        name: chat if one.query is None else ChatFormat(chat.tokenizer, query=one.query) for name, one in beside.items()
    }
    room = len(chat.query.suffix_ids)
    for name, own in chats.items():
        if len(own.query.suffix_ids) > room:
            raise InputError(
                f"Expected the query of {name!r} in `beside` to be at most as long as `query`, {room} tokens, but got "
                f"{len(own.query.suffix_ids)}. Make the longest one the model's `query`."
            )
    return chats
