"""When a request to a server is tried again, and after how long. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from selfcal_lightning.errors import RunError

TOO_MANY_REQUESTS = 429


class TransientError(Exception):
    """An attempt failed in a way that another attempt may mend.

    Attributes:
        retry_after: Seconds that the server asks to wait; None where it asks for nothing.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServerError(RunError):
    """A request failed for good: refused, given up after retries, out of time, or answered with garbage."""


def is_transient(status: int) -> bool:
    """Return whether an HTTP status is worth another attempt: too many requests, or a fault of the server.

    Example:
        >>> [is_transient(status) for status in (400, 401, 404, 429, 500, 503)]
        [False, False, False, True, True, True]
    """
    return status == TOO_MANY_REQUESTS or 500 <= status <= 599


def backoff_seconds(attempt: int, *, first: float, longest: float, chance: float) -> float:
    """Return how long to wait after a failed attempt: between half and all of ``min(longest, first * 2^attempt)``.

    Args:
        attempt: Number of the attempt that failed, from 0.
        first: The wait after attempt 0, at most, in seconds.
        longest: Longest wait in seconds.
        chance: A uniform random number in [0, 1), so that many clients do not come back together.

    Example:
        >>> [backoff_seconds(n, first=1.0, longest=8.0, chance=0.5) for n in range(5)]
        [0.75, 1.5, 3.0, 6.0, 6.0]
    """
    whole = min(longest, first * 2.0 ** min(attempt, 60))
    return whole * (1.0 + chance) / 2.0


def retry_after_seconds(header: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, None where it says nothing that can be understood.

    Args:
        header: A number of seconds or an HTTP date.
        now: The present time, with a zone; None reads the clock.

    Example:
        >>> retry_after_seconds("1.5"), retry_after_seconds("soon")
        (1.5, None)

    Reference:
        RFC 9110, section 10.2.3.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (aware - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
