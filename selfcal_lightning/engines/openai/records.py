"""What the engine over a server keeps: its statistics, and a request on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfcal_lightning.engines.openai.wire import SampleReader
from selfcal_lightning.records import Request


@dataclass(slots=True)
class OpenAIStatistics:
    """What the engine has done so far.

    Attributes:
        attempts: HTTP requests made.
        retries: Those among them that repeated one that failed.
        failed: Requests and scores that failed for good.
        cancelled: Requests dropped on demand.
        tokens_received: Response tokens that came in, also those of attempts that broke and of cancelled requests.
    """

    attempts: int = 0
    retries: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens_received: int = 0


@dataclass(slots=True)
class Flight:
    """A request on its way, and what has come in of it.

    Attributes:
        request: The request.
        reader: The response of the present attempt; None before the first.
        wasted: Tokens of earlier attempts, which broke.
    """

    request: Request
    reader: SampleReader | None = None
    wasted: int = 0

    @property
    def num_tokens(self) -> int:
        """Response tokens of the present attempt."""
        return 0 if self.reader is None else self.reader.num_tokens

    @property
    def received(self) -> int:
        """Response tokens of all attempts."""
        return self.wasted + self.num_tokens

    def begin(self, stop_token_ids: Sequence[int], *, max_tokens: int, vocabulary: int) -> SampleReader:
        """Begin another attempt and return its reader."""
        self.wasted += self.num_tokens
        step_ids = self.request.step_ids
        self.reader = SampleReader(stop_token_ids, max_tokens=max_tokens, vocabulary=vocabulary, step_ids=step_ids)
        return self.reader
