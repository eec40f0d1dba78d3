"""Signals that ask for an orderly end, once."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any


class Signals:
    """Has a first signal call `stop`; the handler from before has any further one.

    In a process that was forked from this one that handler has all of them: a worker
    of a DataLoader is to end when it is told so.
    """

    def __init__(self, numbers: Iterable[int], stop: Callable[[], None]) -> None:
        self._stop, self._process = stop, os.getpid()
        self._before: dict[int, Any] = {}
        wanted = list(numbers)
        if wanted and threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "signals are not watched, as this is not the main thread: call stop() "
                "from a handler of your own, or pass signals=()",
                stacklevel=3,
            )
            return
        for number in wanted:
            # None: of a handler that was not installed from Python
            before = signal.signal(number, self._handle)
            self._before[number] = signal.SIG_DFL if before is None else before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        here = os.getpid() == self._process
        self._restore(number)
        if here:
            self._stop()
        else:
            os.kill(os.getpid(), number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        if before is not None and signal.getsignal(number) == self._handle:
            signal.signal(number, before)

    def restore(self) -> None:
        """Give back the handlers that were there, where nobody has replaced these."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._before):
                self._restore(number)
