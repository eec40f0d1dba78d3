"""A device far behind the host, for tests without one: what is not ordered shows.

Its tensors are the CPU's. A stream is a thread that does what it is given, one after
the other and each a while later. Who does not wait for it reads what was there before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.transport import staged


class Event:
    """A place in a stream; before it is recorded there is nothing to wait for."""

    def __init__(self, device: Any = None) -> None:
        self._passed = threading.Event()
        self._passed.set()

    def record(self, stream: Stream) -> None:
        passed = self._passed = threading.Event()
        stream.put(passed.set)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()


class Stream:
    """Work in order, each piece of it some time after it was put in line."""

    def __init__(self, device: Any = None) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._naps = random.Random(id(self))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._naps.random() * 1e-3)
            work()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event._passed.wait)


class Device:
    """The streams of all threads: one for those that have not set any."""

    def __init__(self) -> None:
        self.default = Stream()
        self.set_by: list[str] = []  # threads
        self._own = threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._own, "stream", self.default)

    def set_stream(self, stream: Stream) -> None:
        self.set_by.append(threading.current_thread().name)
        self._own.stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.current_stream().put(lambda: target.copy_(source))


@contextmanager
def slow_device() -> Iterator[Device]:
    """Have `staged` take CPUs for such a device."""
    there = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", there.current_stream)
        patch.setattr(torch.accelerator, "set_stream", there.set_stream)
        patch.setattr(staged, "copy", there.copy)
        patch.setattr(staged, "pin", lambda n: torch.full((n,), 99, dtype=torch.uint8))
        yield there
