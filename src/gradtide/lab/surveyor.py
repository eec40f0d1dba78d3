"""What each host runs for `gradtide lab probe` where hosts are far from each other.

Runs as `talker` does, and beside it; a JSON object tells of each pair of hosts the
round trip in seconds, the bits/s that arrive (headers and all) when more is sent, and
the share of packets that does not arrive when little is sent.

[Note: How paths are measured] By datagrams, which neither wait for answers nor are sent
again: what is measured is the network, not what a connection makes of it. In turn each
host sends to the next but so many, all at once: no link has two senders at a time. The
kernel counts what arrives.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtide.lab.talker import Circle

_PORT = 29400
_PINGS = 11
_PATIENCE = 12.0  # seconds in which one host is asked
_PAYLOAD, _HEADERS, _UDP_SEGMENT = 1200, 42, 103  # of a datagram; the kernel cuts them
_MOST = 45  # datagrams that are handed to the kernel at once
_SMALL = 100  # bytes of one that is counted
_COUNTED = 5000.0  # of them a second, at most
_EXCESS = 1.2  # of the rate is sent where the rate is measured
_BUNDLE = 0.001  # seconds of the link are handed to the kernel at once, as TCP does
_TICK = 0.002  # seconds between two bursts
_WAITING = 1000  # datagrams in a socket, at most; while more come there is no end
_CAUGHT_UP = 0.04  # seconds; less than queues hold
_WINDOWS = 9
_HEARD = 1.0  # seconds in which words come through that were lost once or twice
_GAP = 0.2  # seconds that what is under way has to arrive

Matrix = list[list[float]]


def main(seconds: float, rates: Matrix) -> None:
    """Rank 0 prints what was found; `rates` has bits/s down and up by host."""
    sys.path.append(os.path.dirname(__file__))
    circle: Circle = importlib.import_module("talker").Circle()
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # as above all others as may be, all the time
    survey = Survey(circle, seconds, rates)
    found = {
        "round trips": survey.round_trips(),
        "rates": survey.in_turn(survey.flood),
        "losses": survey.in_turn(survey.count),
    }
    if survey.rank == 0:
        print(json.dumps(found))


class Survey:
    """One host's part; all call the same methods. Rows are senders."""

    def __init__(self, circle: Circle, seconds: float, rates: Matrix) -> None:
        self.circle, self.seconds, self.rates = circle, seconds, rates
        self.rank, self.size = circle.rank, circle.size
        self.hosts = [(address, _PORT) for address, _ in circle.addresses]
        self.door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.door.bind(self.hosts[self.rank])
        self.gap = _GAP

    def round_trips(self) -> Matrix:
        """Median seconds; 0 where no answer came."""
        # What else this machine does is not what is measured; only root may say so.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        done = threading.Event()
        answering = threading.Thread(target=self._answer, args=(done,))
        answering.start()
        self.circle.share(None)
        found = self.circle.share([self._round_trip(to) for to in range(self.size)])
        done.set()
        answering.join()
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        self.gap += max(max(row) for row in found)
        return found

    def in_turn(self, measure: Callable[[int], float]) -> Matrix:
        """What `measure` finds on this host when it sends and is sent to, by pair."""
        found = [[0.0] * self.size for _ in range(self.size)]
        for shift in range(1, self.size):
            own = measure((self.rank + shift) % self.size)
            for receiver, value in enumerate(self.circle.share(own)):
                found[receiver - shift][receiver] = value
        return found

    def flood(self, receiver: int) -> float:
        """Bits/s that come, while more than fits is sent to `receiver`."""
        rate = min(self.rates[self.rank][1], self.rates[receiver][0])
        each = 8 * (_PAYLOAD + _HEADERS)
        count = min(max(int(rate * _BUNDLE / each), 1), _MOST)
        seen: list[tuple[float, int]] = []

        def watch() -> None:
            time.sleep(self.gap)
            for _ in range(_WINDOWS + 1):
                count = self._arrived()
                seen.append((time.monotonic(), count))
                time.sleep(self.seconds / _WINDOWS)

        watching = threading.Thread(target=watch)
        self._together()
        watching.start()
        much = bytes(count * _PAYLOAD)
        self._send(
            receiver, much, _EXCESS * rate / each / count, self.seconds + 2 * self.gap
        )
        watching.join()
        time.sleep(self.gap)
        # Of windows, since who sends may be kept from it for a while.
        found = [(b[1] - a[1]) * each / (b[0] - a[0]) for a, b in pairwise(seen)]
        return statistics.median(found)

    def count(self, receiver: int) -> float:
        """The share that is lost of the datagrams that are sent to this host."""
        slowest = min(min(pair) for pair in self.rates)
        each = min(_COUNTED, slowest / 2 / 8 / (_SMALL + _HEADERS))
        before = self._arrived()
        self._together()
        sent = self._send(receiver, bytes(_SMALL), each, 4 * self.seconds)
        numbers = self.circle.share(sent)
        time.sleep(self.gap)
        arrived = self._arrived() - before
        self.circle.share(None)
        sender = (2 * self.rank - receiver) % self.size
        return float(1 - arrived / numbers[sender])

    def _arrived(self) -> int:
        """Datagrams that have reached this host, those too that found no room."""
        with contextlib.suppress(BlockingIOError):
            self.door.setblocking(False)
            for _ in range(_WAITING):  # what nobody has read yet is not counted
                self.door.recv(_PAYLOAD)
        names, values = (
            line.split()
            for line in Path("/proc/net/snmp").read_text().splitlines()
            if line.startswith("Udp:")
        )
        found = dict(zip(names, values, strict=True))
        return int(found["InDatagrams"]) + int(found["RcvbufErrors"])

    def _together(self) -> None:
        """Waits for a moment that all have heard of: the hosts share their clock."""
        begin = max(self.circle.share(time.monotonic())) + _HEARD + self.gap
        time.sleep(max(begin - time.monotonic(), 0.0))

    def _send(self, to: int, what: bytes, per_second: float, seconds: float) -> int:
        """Sends evenly; gives how many."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            if len(what) > _PAYLOAD:
                end.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _PAYLOAD)
            start = last = time.monotonic()
            sent, due = 0, 0.0
            while last < start + seconds:
                time.sleep(_TICK)
                now = time.monotonic()
                # Who was kept from sending makes up for what a queue bridges.
                due += min(now - last, _CAUGHT_UP) * per_second
                last = now
                while sent < due:
                    end.sendto(what, self.hosts[to])
                    sent += 1
        return sent

    def _answer(self, done: threading.Event) -> None:
        self.door.settimeout(0.05)
        while not done.is_set():
            try:
                self.door.sendto(*self.door.recvfrom(100))
            except TimeoutError:
                continue

    def _round_trip(self, to: int) -> float:
        if to == self.rank:
            return 0.0
        took, deadline = [], time.monotonic() + _PATIENCE
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.settimeout(1.0)
            for number in range(_PINGS):
                start, word = time.monotonic(), b"%d" % number
                if start > deadline:
                    break
                end.sendto(word, self.hosts[to])
                try:
                    while end.recv(100) != word:
                        pass  # the answer to one that was given up
                except TimeoutError:
                    continue
                took.append(time.monotonic() - start)
        return statistics.median(took) if took else 0.0


if __name__ == "__main__":
    main(float(sys.argv[1]), json.loads(sys.argv[2]))
