"""What each host runs for `gradtide lab probe`: plain sockets, findings as JSON.

Runs as an isolated script (`python -I talker.py SECONDS`) so that it starts at once:
imports nothing but the standard library. Expects torchrun's environment.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import sys
import threading
import time
from typing import Any

_PATIENCE = 30.0  # seconds that any one wait may take
_PINGS = 100
_CHUNK = bytes(1 << 18)


def main(seconds: float) -> None:
    """Rank 0 prints what was found, one JSON object; the others print nothing."""
    circle = Circle()
    patterns = {
        "one way": [(1, 0)],
        "both ways": [(0, 1), (1, 0)],
        "all to one": [(sender, 0) for sender in range(1, circle.size)],
        "each to the next": [(n, (n + 1) % circle.size) for n in range(circle.size)],
    }
    found = {"idle": circle.round_trip([], seconds)}
    found["full"] = circle.round_trip([(0, 1)], seconds)
    for name, flows in patterns.items():
        rates = circle.share(circle.transfer(flows, seconds))
        # The slowest of those that received: whoever waits for all waits for it.
        found[name] = min(rates[receiver] for _, receiver in flows)
    if circle.rank == 0:
        print(json.dumps(found))


class Circle:
    """The hosts of the lab, each of which can reach each; all call the same methods."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self.rank == 0:
            with socket.create_server(master, backlog=self.size) as door:
                door.settimeout(_PATIENCE)
                control = [door.accept()[0] for _ in range(self.size - 1)]
        else:
            control = [_knock(master)]
        self.peers = [peer.makefile("rw") for peer in control]
        here = control[0].getsockname()[0]
        self.door = socket.create_server((here, 0), backlog=2 * self.size)
        self.door.settimeout(_PATIENCE)
        self.addresses = self.share([here, self.door.getsockname()[1]])

    def share(self, value: object) -> list[Any]:
        """Everybody's value, by rank; nobody gets it before all have given theirs."""
        own = json.dumps([self.rank, value])
        if self.rank != 0:
            print(own, file=self.peers[0], flush=True)
            return list(json.loads(self.peers[0].readline()))
        lines = [own, *(peer.readline() for peer in self.peers)]
        given = dict(json.loads(line) for line in lines)
        everybodys = [given[rank] for rank in range(self.size)]
        for peer in self.peers:
            print(json.dumps(everybodys), file=peer, flush=True)
        return everybodys

    def connect(
        self, flows: list[tuple[int, int]]
    ) -> tuple[list[socket.socket], list[socket.socket]]:
        """This rank's ends of the flows: where it sends, where it receives."""
        doors = [tuple(self.addresses[to]) for who, to in flows if who == self.rank]
        out = [socket.create_connection(door, _PATIENCE) for door in doors]
        into = [self.door.accept()[0] for _, to in flows if to == self.rank]
        for end in out + into:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.share(None)
        return out, into

    def transfer(self, flows: list[tuple[int, int]], seconds: float) -> float:
        """Bits/s that this rank received while every flow sent for so many seconds."""
        out, into = self.connect(flows)
        threads = [threading.Thread(target=_send, args=(end, seconds)) for end in out]
        for thread in threads:
            thread.start()
        rate = _receive(into, seconds / 5) if into else 0.0
        for thread in threads:
            thread.join()
        return rate

    def round_trip(self, load: list[tuple[int, int]], seconds: float) -> float:
        """Median seconds from rank 1 to rank 0 and back, while `load` sends."""
        out, into = self.connect([(1, 0)])
        busy = threading.Thread(target=self.transfer, args=(load, seconds))
        busy.start()
        time.sleep(seconds / 4)  # the queues fill
        found = 0.0
        if out:
            found = _ping(out[0], seconds / 2)
        elif into:
            _echo(into[0])
        busy.join()
        return float(self.share(found)[1])


def _knock(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection(address, _PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _send(end: socket.socket, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with end:
        while time.monotonic() < deadline:
            end.sendall(_CHUNK)


def _receive(ends: list[socket.socket], warmup: float) -> float:
    """Bits/s over all ends from when they are warm until the last one closes."""
    into = memoryview(bytearray(1 << 18))
    total = cold = 0
    with selectors.DefaultSelector() as ready:
        for end in ends:
            ready.register(end, selectors.EVENT_READ)
        now = start = warm = time.monotonic()
        while ready.get_map():
            for key, _ in ready.select(_PATIENCE):
                assert isinstance(key.fileobj, socket.socket)
                num_bytes = key.fileobj.recv_into(into)
                total += num_bytes
                if not num_bytes:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
            now = time.monotonic()
            if now - start < warmup:
                cold, warm = total, now
    return (total - cold) * 8 / (now - warm)


def _ping(end: socket.socket, seconds: float) -> float:
    deadline = time.monotonic() + seconds
    took: list[float] = []
    with end:
        while len(took) < _PINGS and (not took or time.monotonic() < deadline):
            start = time.monotonic()
            end.sendall(b"!")
            assert end.recv(1)
            took.append(time.monotonic() - start)
    return statistics.median(took)


def _echo(end: socket.socket) -> None:
    with end:
        for _ in range(_PINGS):
            if not end.recv(1):
                return
            end.sendall(b"!")


if __name__ == "__main__":
    main(float(sys.argv[1]))
