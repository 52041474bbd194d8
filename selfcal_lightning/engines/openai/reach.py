"""Whether anybody listens at the address of a server: known in a moment, before retries take more than a minute."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from selfcal_lightning.errors import RunError

TRIES, WAIT_SECONDS, CONNECT_SECONDS = 3, 1.0, 5.0
PORTS = {"http": 80, "https": 443}


def check_reachable(base_url: str) -> None:
    """Raise RunError where no connection to the server can be made, in three attempts a second apart.

    A server that is there and busy, or still loading its model, is left to the engine's own retries.
    """
    address = urlsplit(base_url)
    place = (address.hostname or "", address.port or PORTS.get(address.scheme, 80))
    problem: OSError | None = None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_SECONDS)
        try:
            with socket.create_connection(place, timeout=CONNECT_SECONDS):
                return
        except OSError as error:
            problem = error
    raise RunError(
        f"Expected a server at {base_url}, but got no connection: {problem.strerror or problem}. Start it (`vllm serve "
        "MODEL`) and wait until it listens, or give its address by `base_url`."
    ) from problem
