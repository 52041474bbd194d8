"""The process around the application: sockets, signals, and the end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfcal_lightning.core.errors import RunError
from selfcal_lightning.serving.app import Service


def serve(service: Service, *, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, or raise RunError when the engine stops; SIGHUP reloads the fitted confidences."""
    limits = service.limits

    class Impatient(H11Protocol):
        """Closes a connection whose request's head does not come in time."""

        late: asyncio.TimerHandle

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.late = self.loop.call_later(limits.read_s, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.late.cancel()
            elif self.late.cancelled():
                self.late = self.loop.call_later(limits.read_s, self.transport.close)

    class Server(uvicorn.Server):
        """Takes no more questions when it is asked to end, and ends when the others are answered."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(service.reload()))
            yield

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.stopping:  # a second signal
                super().handle_exit(sig, frame)
            else:
                service.stopping = True
                self.draining = asyncio.get_running_loop().create_task(self.drain())

        async def drain(self) -> None:
            """Keep the sockets open while questions are in work: `/ready` says so, and new questions get 503."""
            await service.desk.close(limits.stop_s)
            self.should_exit = True

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or service.desk.died is not None

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.stopping = True
            await asyncio.gather(super().shutdown(sockets), service.desk.close(limits.stop_s))

    config = uvicorn.Config(
        service.app(), host=host, port=port, http=Impatient, lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=int(min(2 * limits.stop_s, 1e9)) + 1,
        h11_max_incomplete_event_size=65536,
    )  # fmt: skip
    Server(config).run()
    if service.desk.died is not None:
        raise RunError(f"The engine has stopped: {service.desk.died}") from service.desk.died
