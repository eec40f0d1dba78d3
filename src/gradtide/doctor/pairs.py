"""Plain connections between ranks, at the addresses that Gloo would use.

[Note: Who is asked] The ranks of a host share its way out. So the first rank of each
host asks the first of every other host, in both directions, for a firewall may look at
one alone; all others ask the first of their own host. Whoever answers says who it is:
two hosts with the same address (every machine's docker0 has 172.17.0.1) otherwise talk
to themselves. Connections begin with a word that only this job's ranks know.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from statistics import median

from gradtide.transport.stream import govern

PATIENCE = 5.0  # seconds for a connection, or an answer
PINGS = 30
AT_ONCE = 32  # connections that are tried
CHUNK = bytes(1 << 17)
BUFFER = 1 << 18  # bytes that wait at a sender to near ranks: slow links end in time
COLD = 0.5  # of a transfer: what fills buffers, and in which a connection gets faster
CLOCK = struct.Struct("!d")


@dataclass
class Heard:
    """What a rank found when it asked another one; seconds."""

    error: str = ""
    round_trip: float = 0.0
    clock: float = 0.0  # by so much the other one's is ahead


@dataclass
class Listener:
    """Answers the others at one address, until it is closed."""

    rank: int
    word: str
    address: str
    rates: dict[int, float] = field(default_factory=dict)  # bits/s, by who sent

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._door = socket.create_server((self.address, 0), family=family, backlog=256)
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._door.accept()
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with suppress(OSError, ValueError, KeyError, RecursionError), end:
            end.settimeout(PATIENCE)
            asked = json.loads(_line(end))
            if not isinstance(asked, dict) or asked["word"] != self.word:
                return
            end.sendall(json.dumps({"rank": self.rank}).encode() + b"\n")
            if asked["seconds"]:
                self.rates[asked["rank"]] = _received(end, asked["seconds"])
                end.sendall(b"!")
            while end.recv(1):
                end.sendall(CLOCK.pack(time.time()))


def reach(
    listener: Listener, doors: Mapping[int, tuple[str, int]], others: Sequence[int]
) -> dict[int, Heard]:
    """Ask the others, at their doors; all at once, and each in bounded time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        heard = pool.map(lambda other: _ask(listener, doors[other], other), others)
        return dict(zip(others, heard, strict=True))


def _ask(listener: Listener, door: tuple[str, int], other: int) -> Heard:
    try:
        with _connected(listener, door, other) as end, end.makefile("rb") as answers:
            pings = [_ping(end, answers) for _ in range(PINGS)]
    except OSError as error:
        return Heard(_words(error))
    return Heard("", median(trip for trip, _ in pings), min(pings)[1])


def _connected(
    listener: Listener, door: tuple[str, int], other: int, seconds: float = 0.0
) -> socket.socket:
    """A connection to another rank that says that it is that; OSError otherwise."""
    end = socket.create_connection(door, PATIENCE, (listener.address, 0))
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"word": listener.word, "rank": listener.rank, "seconds": seconds}
        end.sendall(json.dumps(hello).encode() + b"\n")
        answer = _line(end)
        if not answer:
            raise OSError("somebody else listens there")
        found = json.loads(answer)["rank"]
        if found != other:
            raise OSError(f"rank {found} answers there: two hosts with one address")
    except BaseException:
        end.close()
        raise
    return end


def _line(end: socket.socket) -> bytes:
    """Up to the first newline, a byte at a time; what follows stays there."""
    with end.makefile("rb", buffering=0) as unread:
        return unread.readline(4096).strip()


def _ping(end: socket.socket, answers: BufferedReader) -> tuple[float, float]:
    """Seconds of a round trip, and by how many the other's clock is ahead."""
    begin, told = time.perf_counter(), time.time()
    end.sendall(b"?")
    answer = answers.read(CLOCK.size)
    if len(answer) < CLOCK.size:
        raise OSError("the connection was closed")
    trip = time.perf_counter() - begin
    return trip, CLOCK.unpack(answer)[0] - (told + trip / 2)


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {PATIENCE:g} seconds"
    return (error.strerror or str(error)).lower()


# - How fast ---------------------------------------------------------------------------


def send(
    listener: Listener, door: tuple[str, int], other: int, seconds: float, far: bool
) -> None:
    """Send to another rank for so long; ends soon after, whatever happens.

    To a `far` one as training sends: governed by BBR where that is allowed. How fast it
    was is in the other one's `Listener.rates`; nowhere, if it failed.
    """

    def work() -> None:
        with suppress(OSError), _connected(listener, door, other, seconds) as end:
            if far:
                govern(end)
            else:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                end.sendall(CHUNK)
            end.shutdown(socket.SHUT_WR)
            end.recv(1)  # all has arrived

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds + 3 * PATIENCE)


def _received(end: socket.socket, seconds: float) -> float:
    """Bits/s from when buffers are full until the end, or for `seconds`."""
    into = memoryview(bytearray(1 << 18))
    total = cold = 0
    begin = warm = now = time.monotonic()
    while (count := end.recv_into(into)) and now - begin < seconds:
        total, now = total + count, time.monotonic()
        if now - begin < COLD * seconds:
            cold, warm = total, now
    while count:  # whoever sends learns when all has arrived
        count = end.recv_into(into)
    return (total - cold) * 8 / max(now - warm, 1e-9)
