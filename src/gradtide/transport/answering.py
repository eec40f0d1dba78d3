"""The job's store, asked with a deadline.

Torch waits for the store's answer for ever, and where the process that hosts it has
been stopped, or its host stands still, there is none. Nor is there of a file that a
stopped process has locked. Whoever asks here asks in a thread of its own, and goes on
without an answer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore


class SilentError(RuntimeError):
    """The store does not answer."""

    def __init__(self) -> None:
        super().__init__("the job's store does not answer")


class Answering:
    """A part of the store; what is not answered within so many seconds is an error.

    Any thread may ask. While a question is open that had no answer in time, all others
    are errors at once.
    """

    def __init__(self, store: PrefixStore, seconds: float) -> None:
        self.plain, self._seconds = store, seconds
        self._questions = SimpleQueue[Any]()
        self._thread: threading.Thread | None = None
        self._open: SimpleQueue[Any] | None = None  # where an answer is missing
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._ask(self.plain.set, key, value)

    def get(self, key: str) -> bytes:
        """What is at a key that is there.

        Torch's own timeout is that of a busy store, which looks up the name of somebody
        who connects, say: it is asked again.
        """
        end = time.monotonic() + self._seconds
        while True:
            try:
                found: bytes = self._ask(self.plain.get, key)
            except dist.DistStoreError:
                if time.monotonic() >= end:
                    raise SilentError from None
            else:
                return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(self.plain.check, list(keys)))

    def end(self) -> None:
        """Let the thread end; whoever asks again has another one."""
        with self._lock:
            if self._thread is not None:
                self._questions.put(None)
                self._thread.join(0.0 if self._is_stuck() else self._seconds)
                self._thread = None

    def _is_stuck(self) -> bool:
        """Whether a question is open that had no answer in time."""
        return self._open is not None and self._open.empty()

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        answer = SimpleQueue[Any]()
        with self._lock:
            if self._is_stuck():
                raise SilentError
            if self._thread is None:
                self._questions, self._thread = _begin(self)
            self._questions.put((call, args, answer))
        try:
            value, error = answer.get(timeout=self._seconds)
        except Empty:
            self._open = answer
            raise SilentError from None
        if error is not None:
            raise error
        return value


def is_hosted(store: Any) -> bool:
    """Whether a process has the store, at a port."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return hasattr(store, "port")


def _begin(owner: Answering) -> tuple[SimpleQueue[Any], threading.Thread]:
    """A thread that asks, as long as its owner is there."""
    questions = SimpleQueue[Any]()
    thread = threading.Thread(
        target=_serve, args=(questions,), name="gradtide asks", daemon=True
    )
    thread.start()
    weakref.finalize(owner, questions.put, None).atexit = False
    return questions, thread


def _serve(questions: SimpleQueue[Any]) -> None:
    while (question := questions.get()) is not None:
        call, args, answer = question
        try:
            answer.put((call(*args), None))
        except BaseException as error:
            answer.put((None, error.with_traceback(None)))
        del question, call, args, answer
