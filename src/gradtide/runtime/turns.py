"""Whose turn it is to change what a replica knows: the trainer's, or a reader's.

[Note: readers] Evaluations, savers and actors read a model from threads of their own
while it is trained. What step() owes is carried out by whoever reads first, under one
lock, and sends nothing: its messages have left at step(). All that might be sent at
another moment than the other ranks send it is the trainer's alone: buffers before a
forward, the end of a run whose gradients are not finite, and what a first step records.
The trainer is the thread that has made the last step; before the first one, the thread
that has called replicate().
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident

from gradtide.core.torch_internals.autograd import apart, is_watched
from gradtide.core.torch_internals.compilation import uncompiled
from gradtide.core.transport import Progress

PATIENCE = 3.0  # seconds for an optimizer's step; who waits goes on then: it has raised


class Turns:
    """A lock, as a context manager, that can be entered again; see [Note: readers].

    Inside the optimizer's step, of which an update is noted, only the trainer has it.
    """

    def __init__(self, progress: Progress) -> None:
        self.stepping = False  # inside such a step
        self._progress = progress
        self._lock = threading.Condition()
        self._deputy, self._owner = 0, 0  # a thread that works for another one

    @property
    def trains(self) -> bool:
        """Whether this thread is the trainer's, or works for it."""
        thread = self._owner if self._deputized else get_ident()
        return thread == self._progress.trainer

    @property
    def _deputized(self) -> bool:
        return get_ident() == self._deputy

    def __enter__(self) -> None:
        if self._deputized:  # the lock is held for it
            return
        self._lock.acquire()
        if self.stepping and not self.trains:
            self._lock.wait_for(lambda: not self.stepping, PATIENCE)

    def __exit__(self, *_: object) -> None:
        if not self._deputized:
            self._lock.release()

    def begin_step(self, alone: bool) -> None:
        """The thread that steps is the trainer; `alone`, with the lock till the end."""
        self._progress.trainer = get_ident()
        self.stepping = alone

    def end_step(self) -> None:
        """Let in those who wait; the lock is held."""
        if self.stepping:
            self.stepping = False
            self._lock.notify_all()

    def unwatched(self, call: Callable[[], None]) -> None:
        """Call it, out of sight of what traces or records this thread's program.

        The lock is held. What step() owes is no part of the code that reads it.
        """
        if not is_watched():
            call()
            return
        before = self._deputy, self._owner

        def run() -> None:
            self._deputy = get_ident()
            call()

        self._owner = self._owner if self._deputized else get_ident()
        try:
            with uncompiled():
                apart(run)
        finally:
            self._deputy, self._owner = before
