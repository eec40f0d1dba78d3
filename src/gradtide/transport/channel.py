"""A connection of two ranks for what is no part of training's exchanges.

Threads use it that training does not wait for, so nothing that travels on it has a
place in the order of exchanges. Where a connection breaks, half a message has arrived:
it is over then, and who uses it later is told why it broke.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

PIECE = 1 << 18  # bytes that are sent or read at once
LENGTH = struct.Struct("!I")
MOST = 1 << 16  # bytes that words may have
IDLE = 30  # seconds of silence, see `_keep_alive`


class Channel:
    """Words, and bytes in pieces, between this rank and another one.

    On each side one thread uses it at a time, but for `close`. What fails raises
    ConnectionError with the reason.

    Attributes:
        seconds: How long the other rank may keep this one waiting.
        moved: When something has last arrived, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self.seconds = connection, seconds
        self._lost, self.moved = "", time.monotonic()
        connection.settimeout(seconds)
        if connection.family != socket.AF_UNIX:
            _keep_alive(connection)

    def tell(self, words: Mapping[str, Any]) -> None:
        """Send words: what JSON holds."""
        line = json.dumps(dict(words)).encode()
        self.send(LENGTH.pack(len(line)) + line)

    def send(self, piece: bytes | memoryview) -> None:
        """Send bytes, `PIECE` at the most."""
        with self._whole():
            self._connection.sendall(piece)

    def hear(self, ever: bool = False) -> dict[str, Any]:
        """Wait for words; for `ever`, where the other rank has no reason to say any."""
        with self._whole():
            if ever:
                self._connection.settimeout(None)
                self._connection.recv(1, socket.MSG_PEEK)
                self._connection.settimeout(self.seconds)
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            words = json.loads(self._read(min(length, MOST)))
            if not isinstance(words, dict):
                raise ValueError("what has arrived are no words")
            return words

    def pieces(self, size: int) -> Iterator[memoryview]:
        """So many bytes, as they arrive; a piece is valid until the next one."""
        memory = memoryview(bytearray(min(size, PIECE)))
        while size:
            with self._whole():
                count = self._connection.recv_into(memory[: min(size, PIECE)])
                if not count:
                    raise ConnectionError("the other rank has ended")
                self.moved = time.monotonic()
            yield memory[:count]
            size -= count

    def close(self, why: str = "it is closed") -> None:
        """End it, on both sides. Any thread may."""
        self._lost = self._lost or why
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, size: int) -> bytes:
        return b"".join(map(bytes, self.pieces(size)))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Use the connection; it is lost if that fails, for good."""
        if not self._lost:
            try:
                yield
                return
            except TimeoutError:
                self.close(f"the other rank was silent for {self.seconds:g} s")
            except (OSError, ValueError) as error:
                self.close(str(error))
        raise ConnectionError(self._lost)


def _keep_alive(connection: socket.socket) -> None:
    """Have the system ask now and then whether the other host is there.

    Between two messages there may be many minutes. Routers forget connections that are
    silent, and hosts that lose power say nothing.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": IDLE, "TCP_KEEPCNT": 4}
    for name, value in times.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
