"""Length-prefixed JSON over a socket: the language between the vLLM engine and its child process."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_HEADER = struct.Struct(">I")
_CHUNK = 1 << 18


class Channel:
    """Sends and receives JSON objects over a connected socket; nothing that arrives is ever executed.

    Each message is a 4-byte big-endian length and that many bytes of UTF-8 JSON. Floats survive exactly, infinities
    and NaN included.

    Example:
        >>> left, right = (Channel(end) for end in socket.socketpair())
        >>> left.send({"op": "cancel", "ids": [3]})
        >>> right.receive(timeout=1.0)
        [{'op': 'cancel', 'ids': [3]}]
        >>> left.close(), right.close()
        (None, None)
    """

    def __init__(self, connection: socket.socket, *, send_timeout: float | None = None) -> None:
        connection.settimeout(send_timeout)
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises OSError (a TimeoutError where the reader stopped reading) when it cannot."""
        payload = json.dumps(message, separators=(",", ":")).encode()
        self._socket.sendall(_HEADER.pack(len(payload)) + payload)

    def receive(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for messages and return all that have arrived whole.

        Args:
            timeout: Longest wait in seconds; None waits for ever.

        Returns:
            At least one message, or an empty list after ``timeout``.

        Raises:
            EOFError: The other side is gone.
        """
        while not (messages := self._whole_messages()):
            readable, _, _ = select.select([self._socket], [], [], timeout)
            if not readable:
                return []
            try:
                received = self._socket.recv(_CHUNK)
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not received:
                raise EOFError("the other side closed the channel")
            self._buffer += received
        return messages

    def close(self) -> None:
        """Close the socket; the other side then sees the end."""
        self._socket.close()

    def _whole_messages(self) -> list[dict[str, Any]]:
        messages, start = [], 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages
