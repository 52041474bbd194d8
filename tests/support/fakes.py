"""The one set of fakes: an engine, a chat format and a task without a model, deterministic and no more permissive."""

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.engines.base import Failure, RequestsFailedError
from selfcal_lightning.records import ConfidenceQuery, Message, Question, Request, Response


class FakeChat:
    """Token ids are the UTF-8 bytes of the text; 256 opens the assistant's turn, 257 ends a turn."""

    pad_id = 258
    end_of_turn_ids = frozenset({257})

    def __init__(self, query: str = "Right? (Yes/No)") -> None:
        self.query = ConfidenceQuery((257, *query.encode(), 256), yes_ids=(89,), no_ids=(78,))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (*"\n".join(f"{message.role}: {message.content}" for message in messages).encode(), 256)

    def response_ids(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        return {"suffix_ids": list(self.query.suffix_ids), "yes_ids": [89], "no_ids": [78], "template_sha256": "fake"}


class FakeEngine:
    """Answers with a number that follows from the request's seed; a fifth of the responses says nothing readable.

    A request is begun by the first poll that finds it among the first ``slots`` in flight.

    Args:
        slots: Requests worked on at once; ``poll`` returns at most so many, in a scrambled order.
        seconds_per_poll: Time that ``poll`` takes.
        max_context: Longest prompt + response + query, in tokens.

    Attributes:
        requests: Every request ever submitted.
        largest_queue: Most requests in flight at once.
        drained: How often the queue fell below ``slots`` right before a submit (a slot stood idle).
    """

    def __init__(self, *, slots: int = 4, seconds_per_poll: float = 0.0, max_context: int = 4096) -> None:
        self.slots, self.seconds_per_poll, self.max_context = slots, seconds_per_poll, max_context
        self.requests: list[Request] = []
        self.largest_queue = self.drained = 0
        self._waiting: dict[str, Request] = {}
        self._begun: set[str] = set()
        self._random = random.Random(0)
        self._closed = False

    @property
    def batch_size(self) -> int:
        return self.slots

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self._ensure_open()
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or self._waiting.keys() & set(ids):
            raise ValueError(f"Expected request ids to be unique, but got {ids}.")
        for request in requests:
            suffix = 0 if request.query is None else len(request.query.suffix_ids)
            needed = len(request.prompt_ids) + request.sampling.max_new_tokens + suffix
            if len(request.prefix_ids) >= request.sampling.max_new_tokens or 257 in request.prefix_ids:
                raise ValueError(f"Expected `prefix_ids` of {request.id} to leave room and to end no turn.")
            if not request.prompt_ids or needed > self.max_context:
                raise ValueError(
                    f"Expected requests of at most {self.max_context} tokens, but {request.id} needs {needed}."
                )
        self.drained += bool(self.requests) and len(self._waiting) < self.slots
        self.requests += requests
        self._waiting |= {request.id: request for request in requests}
        self.largest_queue = max(self.largest_queue, len(self._waiting))
        return ids

    def poll(self) -> list[Response]:
        self._ensure_open()
        time.sleep(self.seconds_per_poll)
        active = list(self._waiting)[: self.slots]
        finished = self._random.sample(active, k=self._random.randint(1, len(active))) if active else []
        self._begun = {name for name in active if name not in finished}
        return [self._respond(self._waiting.pop(name)) for name in finished]

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        dropped = {name: self._waiting.pop(name) for name in dict.fromkeys(ids) if name in self._waiting}
        return {name: self.tokens_drawn(request) for name, request in dropped.items() if name in self._begun}

    def tokens_drawn(self, request: Request) -> int:
        """Return how far the response to a request is between two polls: half-way."""
        return len(self._respond(request).token_ids) // 2

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float]]:
        self._ensure_open()
        return [[random.Random(f"{list(prompt)}/{token}").random() / 512 for token in token_ids] for prompt in prompts]

    def describe(self) -> dict[str, Any]:
        facts = {"engine": "fake", "dtype": "float32", "model": "fake", "revision": None}
        return {**facts, "weights_sha256": "0" * 64, "adapter_sha256": None}

    def close(self) -> None:
        self._closed = True

    def _ensure_open(self) -> None:
        if self._closed:
            raise RuntimeError("Expected the engine to be open, but it was closed.")

    def _respond(self, request: Request) -> Response:
        stream = random.Random(request.seed)
        number = stream.choice([3, 3, 5, 7, None])
        text = "I do not know." if number is None else f"Step {stream.random():.6f}. The answer is {number}."
        ids = tuple(text.encode())[len(request.prefix_ids) :]
        cut = ids[: request.sampling.max_new_tokens - 1 - len(request.prefix_ids)]
        finish = "stop" if cut == ids else "length"
        if (end := next((i for i, token in enumerate(cut) if token in request.step_ids), None)) is not None:
            cut, finish = cut[: end + 1], "step"
        yes = stream.random()
        masses = (None, None) if request.query is None else (yes, (1.0 - yes) * 0.5)
        text = bytes(cut).decode(errors="replace")
        return Response(request.id, text, cut, finish, -stream.random() * len(cut), *masses)


class ReplyingEngine(FakeEngine):
    """Says what ``reply`` makes of the text of the prompt, control tokens left out; each text is kept in ``asked``.

    Where ``reply`` gives a failure, `poll` raises it, and delivers what was answered beside it later.
    """

    def __init__(self, reply: Callable[[str], str | Failure], **options: Any) -> None:
        super().__init__(**options)
        self.reply = reply
        self.asked: list[str] = []
        self._failures: dict[str, Failure] = {}

    def poll(self) -> list[Response]:
        waiting = dict(self._waiting)
        found = super().poll()
        failures, self._failures = self._failures, {}
        if failures:
            answered = [response.request_id for response in found if response.request_id not in failures]
            self._waiting |= {name: waiting[name] for name in answered}
            raise RequestsFailedError(failures)
        return found

    def _respond(self, request: Request) -> Response:
        prompt = FakeChat().decode(request.prompt_ids)
        self.asked.append(prompt)
        reply = self.reply(prompt)
        if isinstance(reply, Failure):
            self._failures[request.id] = reply
            reply = ""
        ids = tuple(reply.encode())[: request.sampling.max_new_tokens]
        return Response(request.id, bytes(ids).decode(errors="replace"), ids, "stop", -1.0)


class FakeTask:
    """Reads "The answer is N."; "03" and "3" are one answer."""

    answer_type: AnswerType = "number"

    def __init__(self, name: str = "fake") -> None:
        self.name, self.verified = name, 0

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        return fake_questions(20 if limit is None else limit, task=self.name, prefix=split)

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        found = re.search(r"The answer is (\d+)\.", text)
        return found.group(1) if found else None

    def verify(self, answer: str | None, reference: str) -> bool:
        self.verified += 1
        return answer is not None and int(answer) == int(reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        first: dict[int, str] = {}
        return [None if answer is None else first.setdefault(int(answer), answer) for answer in answers]


def fake_questions(count: int, *, task: str = "fake", prefix: str = "q", reference: str | None = "3") -> list[Question]:
    """Return ``count`` questions whose ids hash to no particular order."""
    names = [f"{prefix}-{hashlib.sha256(str(i).encode()).hexdigest()[:8]}" for i in range(count)]
    return [Question(one, task, (Message("user", f"What is {one}?"),), reference, f"What is {one}?") for one in names]
