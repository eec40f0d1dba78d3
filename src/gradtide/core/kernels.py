"""What numba compiles: loaded before the first step that needs it, once on a machine.

Compiling takes from ten seconds to a minute. What comes of it is kept on disk, so one
process of a machine compiles, and those that wait for it load what it has kept. Nothing
here is needed for a result: where anything fails there are slower ways to the same
bits, and one warning.
"""

from __future__ import annotations

import builtins
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType
from typing import Any

LOG = logging.getLogger("gradtide")
LONGEST = 300.0  # seconds to wait for another process that compiles
PRINT = builtins.print  # as it was when this was loaded


class Kernels:
    """The functions of a module that numba compiles.

    Args:
        load: Imports the module, and returns it.
        purpose: What the functions do, for who is told that they are compiled.
        slower: What is done without them, and how long that takes.
    """

    def __init__(self, load: Callable[[], Any], purpose: str, slower: str) -> None:
        self._import, self._purpose, self._slower = load, purpose, slower
        self.forget()

    def forget(self) -> None:
        """Look for the module anew when it is next asked for."""
        self._tried = False
        self._module: Any = None
        self._prepared = set[Hashable]()

    def module(self) -> Any:
        """The module, or None where numba is missing or does not work."""
        if not self._tried:
            self._tried = True
            self._attempt(self._load)
        return self._module

    def prepare(self, key: Hashable, call: Callable[[Any], None]) -> None:
        """Have what `call` calls of the module compiled; once for each key."""
        module = self.module()
        if module is None or key in self._prepared:
            return
        self._prepared.add(key)

        def compiled() -> None:
            with _alone(), self._told(module):
                call(module)

        self._attempt(compiled)

    def _load(self) -> None:
        self._module = self._import()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Go without the module from now on, and say so, if anything is raised."""
        try:
            with _own_print():
                work()
        except Exception as error:
            self._module = None
            why, remedy = (
                f"numba does not work here ({error!r})",
                (
                    "start Python once with `import numba` to see why; if it can keep "
                    "nothing, set NUMBA_CACHE_DIR to a folder that can be written"
                ),
            )
            if isinstance(error, ModuleNotFoundError):
                why, remedy = "numba is not installed", 'pip install "gradtide[fast]"'
            warnings.warn(f"{why}: {self._slower}. {remedy}", stacklevel=4)

    @contextmanager
    def _told(self, module: Any) -> Iterator[None]:
        """Say so once when numba really compiles, and does not load what it has."""
        from numba.core import event

        purpose = self._purpose

        class Teller(event.Listener):
            told = False

            def on_start(self, _: Any) -> None:
                if not self.told:
                    self.told = True
                    LOG.warning(
                        "numba compiles gradtide's %s: up to a minute, once on this "
                        "machine",
                        purpose,
                    )

            def on_end(self, _: Any) -> None: ...

        teller, start = Teller(), time.monotonic()
        event.register("numba:compile", teller)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            event.unregister("numba:compile", teller)  # type: ignore[no-untyped-call]
        if teller.told:
            seconds = time.monotonic() - start
            LOG.warning("compiled in %.0f s; the next start finds it", seconds)


@contextmanager
def _own_print() -> Iterator[None]:
    """Inside, `print` is Python's own: numba looks up by what is built in.

    Programs replace it, so that rank 0 alone prints.
    """
    replaced = builtins.print
    if isinstance(PRINT, BuiltinFunctionType):
        builtins.print = PRINT
    try:
        yield
    finally:
        builtins.print = replaced


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no other process of this user and machine is, if that can be had."""
    found = None
    with suppress(ImportError, OSError):  # other systems; a folder of somebody else's
        found = _lock()
    try:
        yield
    finally:
        if found is not None:
            os.close(found)  # and so unlocked, as by a process that dies


def _lock() -> int:
    """An open file that this process alone has locked; not for ever, see LONGEST."""
    import fcntl

    path = os.path.join(tempfile.gettempdir(), f"gradtide-compiles-{os.getuid()}")
    opened = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
    return opened
