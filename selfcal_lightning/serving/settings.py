"""How a server answers, as the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass

from selfcal_lightning.core.errors import InputError, check_at_least


@dataclass(frozen=True)
class Limits:
    """What a server spends at most; a request may ask for less, never for more.

    Attributes:
        max_samples: Responses to a question.
        max_new_tokens: Tokens in a response.
        max_tokens_in_all: Tokens drawn for a question, losers included, checked some 20 times a second; null is
            ``max_samples * max_new_tokens``.
        deadline_s: Seconds for a question; then the answer is given by what has been drawn.
        max_queue: Questions in work or waiting; a further one is refused with status 429.
        max_body_mb: Size of a body, in megabytes; a larger one is refused with status 413.
        read_s: Seconds in which a request's head and then its body must have come in.
        stop_s: Seconds that running requests get after SIGTERM; then they are answered from the samples so far.
    """

    max_samples: int = 16
    max_new_tokens: int = 1024
    max_tokens_in_all: int | None = None
    deadline_s: float = 300.0
    max_queue: int = 256
    max_body_mb: float = 4.0
    read_s: float = 20.0
    stop_s: float = 20.0

    def __post_init__(self) -> None:
        check_at_least(1, max_samples=self.max_samples, max_new_tokens=self.max_new_tokens, max_queue=self.max_queue)
        check_at_least(1, max_tokens_in_all=self.max_tokens_in_all or 1)
        for name in ("deadline_s", "max_body_mb", "read_s", "stop_s"):
            if not getattr(self, name) > 0.0:
                raise InputError(f"Expected `{name}` to be above 0, but got {getattr(self, name)}.")
