"""The models behind the fake server: one that always says the same, and a real one."""

import math
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.records import Request, SamplingSettings


@dataclass(frozen=True)
class Completion:
    """What the model said: ids with the one that ends the turn, their log-probabilities, and why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class CannedModel:
    """Says the same to everybody: ``token_ids``, every one with the log-probability -0.5; scores are 1/4."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)

    def sample(self, body: dict[str, Any]) -> Future[Completion]:
        ids = self._token_ids[: body["max_tokens"]]
        return _done(Completion(ids, (-0.5,) * len(ids), "stop" if ids == self._token_ids else "length"))

    def score(self, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> Future[list[float]]:
        return _done([-1.3862943611198906] * len(token_ids))

    def cancel(self, future: Future[Any]) -> None: ...

    def close(self) -> None: ...


class RealModel:
    """The transformers engine, in a thread that works on all requests together; what was asked before is remembered."""

    def __init__(self, path: str, *, adapter: str | None = None) -> None:
        self._engine = TransformersEngine(path, dtype="float32", device="cpu", max_batch=64, adapter=adapter)
        self._network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._ends = self._engine.chat.end_of_turn_ids
        self._end_id = min(self._ends)
        self._said: dict[Request, Completion] = {}
        self._logits = lru_cache(maxsize=1)(self._forward)  # thousands of requests for one token have one prompt
        self._inbox: queue.SimpleQueue[tuple[str, Future[Any], Any] | None] = queue.SimpleQueue()
        self._futures: dict[str, tuple[Future[Completion], Request]] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def sample(self, body: dict[str, Any]) -> Future[Completion]:
        edt = body.get("vllm_xargs", {}).get("edt")
        base, scale, theta = edt or (body["temperature"], None, 1.0)
        sampling = SamplingSettings(base, scale, theta, body["top_p"], body["max_tokens"])
        further = tuple(sorted(set(body["stop_token_ids"]) - self._ends))  # vLLM ends with any of them, and keeps it
        return self._put("sample", Request("", tuple(body["prompt"]), sampling, body["seed"], step_ids=further))

    def score(self, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> Future[list[float]]:
        return self._put("score", (prompt, token_ids))

    def cancel(self, future: Future[Any]) -> None:
        self._inbox.put(("cancel", future, None))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._engine.close()

    def _put(self, what: str, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._inbox.put((what, future, job))
        return future

    def _work(self) -> None:
        while True:
            items = [] if self._futures else [self._inbox.get()]
            while not self._inbox.empty():
                items.append(self._inbox.get())
            if None in items:
                return
            for what, future, job in items:
                if what == "sample":
                    self._begin(future, job)
                elif what == "cancel" and self._futures.pop(name := str(id(future)), None):
                    self._engine.cancel([name])
            self._score_all([(future, *job) for what, future, job in items if what == "score"])
            for response in self._engine.poll():
                future, request = self._futures.pop(response.request_id)
                ids = response.token_ids + ((self._end_id,) if response.finish == "stop" else ())
                reason = "stop" if ids[-1] in self._ends | set(request.step_ids) else "length"
                completion = Completion(ids, self._logprobs(request.prompt_ids, ids), reason)
                self._said[request] = completion
                future.set_result(completion)

    def _begin(self, future: Future[Any], request: Request) -> None:
        if request in self._said:
            future.set_result(self._said[request])
            return
        self._futures[str(id(future))] = (future, request)
        self._engine.submit([replace(request, id=str(id(future)))])

    def _score_all(self, jobs: list[tuple[Future[Any], tuple[int, ...], tuple[int, ...]]]) -> None:
        for ids in dict.fromkeys(ids for _, _, ids in jobs):
            alike = [(future, prompt) for future, prompt, other in jobs if other == ids]
            table = self._engine.next_token_probabilities([prompt for _, prompt in alike], ids)
            for (future, _), row in zip(alike, table, strict=True):
                future.set_result([math.log(p) if p else -9999.0 for p in row])

    def _logprobs(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> tuple[float, ...]:
        logits = self._logits(prompt + ids[:-1])[len(prompt) - 1 :]
        return tuple(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist())

    @torch.no_grad()
    def _forward(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self._network(torch.tensor([ids])).logits[0].double()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
