"""Requests that continue a prefix or end with a step: what is refused, and where their random numbers come from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Finish, Request


def check_prefix(request: Request, end_ids: Collection[int]) -> None:
    """Raise InputError where nothing can follow the prefix of a request.

    Args:
        request: The request.
        end_ids: Tokens that end a turn.
    """
    prefix, most = request.prefix_ids, request.sampling.max_new_tokens
    if len(prefix) >= most:
        raise InputError(
            f"Expected `prefix_ids` of request {request.id!r} to leave room in `max_new_tokens`, {most}, which counts "
            f"them too, but got {len(prefix)}. Raise `max_new_tokens`, or take that response as it is."
        )
    ends = set(prefix) & set(end_ids)
    if ends:
        raise InputError(
            f"Expected `prefix_ids` of request {request.id!r} to be tokens inside of a response, but got {min(ends)}, "
            "which ends one. Leave it out, or take that response as it is."
        )


def stream_seed(request: Request) -> int:
    """Return the seed of a stream of random numbers that begins with the first token drawn.

    It depends on how many tokens stand already. With the seed of the request itself a continuation would draw with the
    numbers that its own first tokens were drawn with.

    Example:
        >>> from selfcal_lightning.records import SamplingSettings
        >>> plain = Request("r", (1,), SamplingSettings(), seed=7)
        >>> stream_seed(plain)
        7
        >>> longer = Request("r", (1,), SamplingSettings(), seed=7, prefix_ids=(5, 6))
        >>> stream_seed(longer) != 7
        True
    """
    if not request.prefix_ids:
        return request.seed
    key = f"continuation/{request.seed}/{len(request.prefix_ids)}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 2


def finish_of(drawn: int, *, last: int | None, ended: bool, step_ids: Collection[int], limit: int) -> Finish:
    """Return how a response ended. At the limit nothing can follow, so that a step that ends there is cut by it.

    Args:
        drawn: Tokens drawn, without end-of-turn.
        last: The last of them; None where there is none.
        ended: Whether the model ended its turn.
        step_ids: Tokens that end a step.
        limit: Most tokens that may be drawn.

    Example:
        >>> finish_of(4, last=19, ended=False, step_ids=(19,), limit=9)
        'step'
        >>> finish_of(9, last=19, ended=False, step_ids=(19,), limit=9)
        'length'
    """
    if ended:
        return "stop"
    return "step" if last in step_ids and drawn < limit else "length"
