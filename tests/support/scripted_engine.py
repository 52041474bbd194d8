"""An engine that replies what a script says, and may be out of order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from support.fakes import FakeEngine

from selfcal_lightning.engines.base import Failure, RequestsFailedError
from selfcal_lightning.records import Request, Response

Script = Callable[[str], str | Failure]


class ScriptedEngine(FakeEngine):
    """Replies to the text of a prompt with what ``script`` says of it, or does not answer.

    Args:
        script: Takes the decoded prompt and gives the reply, or why there is none.
    """

    def __init__(self, script: Script, **options: int) -> None:
        super().__init__(**options)
        self.script = script
        self.prompts: list[str] = []

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self.prompts += [_text(request) for request in requests]
        return super().submit(requests)

    def poll(self) -> list[Response]:
        texts = {name: _text(request) for name, request in self._waiting.items()}
        found = super().poll()
        replies = {response.request_id: self.script(texts[response.request_id]) for response in found}
        failures = {name: reply for name, reply in replies.items() if isinstance(reply, Failure)}
        if failures:
            for response in found:  # those that were answered are delivered by a later poll
                if response.request_id not in failures:
                    self._waiting[response.request_id] = next(r for r in self.requests if r.id == response.request_id)
            raise RequestsFailedError(failures)
        return [replace(response, text=str(replies[response.request_id])) for response in found]


def _text(request: Request) -> str:
    return bytes(token for token in request.prompt_ids if token < 256).decode(errors="replace")
