"""`selfcal serve` as a process, and a client of it without a library."""

import http.client
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import free_port, start_forked, wait_for

QUESTION = "Anna travels 27 miles an hour for 9 hours. She walks 43 miles more. How many miles is that?"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def selfcal(self) -> dict[str, Any]:
        return self.json["selfcal"]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@dataclass
class Server:
    """A server on a free port, ready when it is made."""

    options: tuple[str, ...] = ()
    log: Path = field(kw_only=True)
    key: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    patience: float = 120.0  # seconds until it is ready

    def __post_init__(self) -> None:
        self.port = free_port()
        environment = self.environment | ({} if self.key is None else {"SELFCAL_API_KEY": self.key})
        own = () if "--model" in self.options else ("--model", "bundled")
        words = ["-m", "selfcal_lightning", "serve", *own, "--port", str(self.port), *self.options]
        self.process = start_forked(words, self.log, environment=environment)
        until = time.monotonic() + self.patience
        while True:
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < until
            try:
                if self.get("/ready").status == 200:
                    return
            except OSError:
                time.sleep(0.05)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, content, headers)

    def chat(self, question: str, *, model: str = "bundled", **fields: Any) -> Reply:
        body = {"model": model, "messages": [{"role": "user", "content": question}], **fields}
        return self.post("/v1/chat/completions", body)

    def send(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120.0)
        try:
            key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            connection.request(method, path, content, key | headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def until(self, name: str, value: float) -> None:
        end = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} stays {self.metric(name)}"
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return wait_for([self.process], limit=60)
