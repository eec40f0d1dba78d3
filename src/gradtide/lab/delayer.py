"""Holds packets back for as long as they would be on their way, by the kernel's queues.

Runs as an isolated script (`python -I -S delayer.py SELF QUEUES`), as the process that
keeps an emulated cluster: it says "ready SELF" when all is in place and ends with its
input, and the cluster with it. Imports nothing but the standard library. QUEUES is
JSON: by the number of an NFQUEUE the seconds that its packets are held, and by how much
that varies. It sees no packet, only each one's number (see nfnetlink_queue.h).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

_NETLINK_NETFILTER, _SO_RCVBUFFORCE, _SOL_NETLINK, _NO_ENOBUFS = 12, 33, 270, 5
_QUEUE = 3 << 8  # the subsystem of netlink's messages
_PACKET, _CONFIG, _BATCH = _QUEUE | 0, _QUEUE | 2, _QUEUE | 3
_ACCEPT = 1
_MOST = 400_000  # packets that a queue holds; kernels drop what comes on top
_FLAGS = 4  # large packets stay whole
_REQUEST = struct.Struct("=IHHIIBBH")  # length, kind, flags, ..., family, 0, queue
_VERDICT = struct.Struct("=HH")
_ROOM = 1 << 16
_BUFFER = 64 << 20
# What passes before it hears of a packet, and until one goes on that it has let go: on
# a quick machine. A way takes longer than asked on a slow one, and nowhere less.
_HEARING = 2e-5
# Seconds after which it looks by itself whether a packet has come: under load a packet
# in several hundred was only seen when the next one came.
_LOOK = 0.005
# Who is due within this time goes with those that are: fewer calls, and no later than
# a timer would be.
_SLACK = 2e-5


class Held:
    """The packets of one queue: when each may go on, in the order of their coming."""

    def __init__(self, delay: float, jitter: float) -> None:
        self.delay, self.jitter = delay, jitter
        self.waiting: deque[tuple[float, int]] = deque()

    def take(self, number: int, now: float) -> None:
        """A packet has come; it does not overtake the one before it."""
        due = now + self.delay
        if self.jitter:
            due += random.uniform(-self.jitter, self.jitter)
            if self.waiting:
                due = max(due, self.waiting[-1][0])
        self.waiting.append((due, number))

    def release(self, now: float) -> int | None:
        """The last of those that may go on now; None where there is none."""
        last, waiting = None, self.waiting
        while waiting and waiting[0][0] <= now:
            last = waiting.popleft()[1]
        return last


def main(self: str, text: str) -> None:
    """Delays until its input ends."""
    queues = {int(number): Held(*how) for number, how in json.loads(text).items()}
    channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)  # what one may
    with contextlib.suppress(PermissionError):
        channel.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    channel.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)  # what has no room is lost
    channel.bind((0, 0))
    for number in queues:
        _configure(channel, number)
    channel.setblocking(False)
    for held in queues.values():
        held.delay = max(held.delay - _HEARING, 0.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the cluster end here
    with contextlib.suppress(OSError):  # only root may come before all others
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print("ready", self, flush=True)
    _delay(channel, queues)


def _configure(channel: socket.socket, number: int) -> None:
    """Binds a queue; raises OSError where the kernel refuses."""
    bind = _attribute(1, struct.pack(">BBH", 1, 0, socket.AF_INET))
    numbers_only = _attribute(2, struct.pack(">IB", 0, 1))
    room = _attribute(3, struct.pack(">I", _MOST))
    flags = _attribute(4, struct.pack(">I", _FLAGS))
    flags += _attribute(5, struct.pack(">I", _FLAGS))
    for body in (bind, numbers_only + room, flags):
        channel.send(_message(_CONFIG, number, body, 1 | 4))  # with an answer
        answer = channel.recv(_ROOM)
        (code,) = struct.unpack_from("=i", answer, 16)
        if code:
            raise OSError(-code, f"NFQUEUE {number}: {os.strerror(-code)}")


def _attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", len(body) + 4, kind) + body + bytes(-len(body) % 4)


def _message(kind: int, queue: int, body: bytes, flags: int = 1) -> bytes:
    size = _REQUEST.size + len(body)
    return _REQUEST.pack(size, kind, flags, 0, 0, 0, 0, socket.htons(queue)) + body


def _delay(channel: socket.socket, queues: dict[int, Held]) -> None:
    into = bytearray(_ROOM)
    packet = struct.Struct(">H4xI")  # queue, an attribute's head, the packet's number
    kind = struct.Struct("=H")
    clock, receive = time.monotonic, channel.recv_into
    busy: dict[int, Held] = {}  # the queues that hold packets
    while True:
        left = _LOOK
        if busy:
            first = min(held.waiting[0][0] for held in busy.values())
            left = min(max(first - clock(), 0.0), _LOOK)
        ready, _, _ = select.select([channel, sys.stdin], [], [], left)
        if sys.stdin in ready:
            return
        with contextlib.suppress(BlockingIOError):
            # What is due has to go, too, however many come.
            for _ in range(64):
                receive(into)
                if kind.unpack_from(into, 4)[0] == _PACKET:
                    queue, number = packet.unpack_from(into, 18)
                    held = queues[queue]
                    held.take(number, clock())
                    busy[queue] = held
        now = clock() + _SLACK
        for queue, held in list(busy.items()):
            if (last := held.release(now)) is not None:
                body = _attribute(2, struct.pack(">II", _ACCEPT, last))
                channel.send(_message(_BATCH, queue, body))
                if not held.waiting:
                    del busy[queue]


if __name__ == "__main__":
    main(*sys.argv[1:])
