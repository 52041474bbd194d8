"""What a model replied, read as data: ``{"key_steps": [[form, form, ...], ...]}`` or a reason why it is not that."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.runtime.json_files import UnreadableJSONError, parse_json
from selfcal_lightning.selection.key_steps.base import EMPTY, LONGEST_FORM, MOST_FORMS, MOST_STEPS, NO_JSON, NO_SCHEMA
from selfcal_lightning.tasks.answers.extraction import final_part

_FENCE = re.compile(r"```[A-Za-z]*\n(.*?)```", re.DOTALL)
_LONGEST_REPLY = 100_000


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: the steps that it states, or why it states none."""

    steps: tuple[tuple[str, ...], ...] | None
    reason: str | None


def read_reply(text: str) -> Reply:
    r"""Read a reply. One fence is taken off, and of what is left the outermost object is read; nothing else is mended.

    Example:
        >>> read_reply('Sure:\n```json\n{"key_steps": [["3*5", "15"]]}\n```')
        Reply(steps=(('3*5', '15'),), reason=None)
        >>> [read_reply(text).reason for text in ("", "I cannot.", '{"key_steps": "3*5"}')]
        ['empty', 'no_json', 'schema']
    """
    reply = (final_part(text) or "").strip()
    if not reply:
        return Reply(None, EMPTY)
    if len(reply) > _LONGEST_REPLY:
        return Reply(None, NO_SCHEMA)
    fenced = _FENCE.search(reply)
    inside = fenced[1] if fenced else reply
    start, end = inside.find("{"), inside.rfind("}")
    if start < 0 or end < start:
        return Reply(None, NO_JSON)
    try:
        content = parse_json(inside[start : end + 1], origin="the reply")
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate can be stored nowhere
    except (UnreadableJSONError, UnicodeError):
        return Reply(None, NO_JSON)
    steps = _steps(content)
    return Reply(steps, NO_SCHEMA if steps is None else None)


def _steps(content: Any) -> tuple[tuple[str, ...], ...] | None:
    """Return the steps of an object that keeps to the schema, else None."""
    found = content.get("key_steps") if isinstance(content, dict) and set(content) == {"key_steps"} else None
    if not isinstance(found, list) or len(found) > MOST_STEPS:
        return None
    for forms in found:
        if not isinstance(forms, list) or not 0 < len(forms) <= MOST_FORMS:
            return None
        if not all(isinstance(form, str) and 0 < len(form) <= LONGEST_FORM for form in forms):
            return None
    return tuple(map(tuple, found))
