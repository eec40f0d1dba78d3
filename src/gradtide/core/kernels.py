"""What numba and Triton compile: loaded before the first step that needs it.

Numba takes from ten seconds to a minute, Triton a second for each kernel. What comes of
it is kept on disk, so one process of a machine compiles, and those that wait for it
load what it has kept. Nothing here is needed for a result: where anything fails there
are slower ways to the same bits, and one warning.
"""

from __future__ import annotations

import builtins
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG = logging.getLogger("gradtide")
LONGEST = 300.0  # seconds to wait for another process that compiles
PRINT = builtins.print  # as it was when this was loaded


class Compiler(NamedTuple):
    """What compiles, and what to do where it does not."""

    name: str
    install: str
    repair: str
    watch: Callable[[str], AbstractContextManager[None]]  # it compile for a purpose


class Kernels:
    """The functions of a module that are compiled.

    Args:
        load: Imports the module, and returns it.
        purpose: What the functions do, for who is told that they are compiled.
        slower: What is done without them, and how long that takes.
        compiler: `NUMBA` or `TRITON`.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        purpose: str,
        slower: str,
        compiler: Compiler | None = None,
    ) -> None:
        self._import, self._purpose, self._slower = load, purpose, slower
        self._compiler = compiler or NUMBA
        self.forget()

    def forget(self) -> None:
        """Look for the module anew when it is next asked for."""
        self._tried = False
        self._module: Any = None
        self._prepared = set[Hashable]()

    @property
    def installed(self) -> bool:
        """Whether its compiler is; nothing is loaded."""
        if self._tried:
            return self._module is not None
        return _there(self._compiler.name.lower())

    def module(self) -> Any:
        """The module, or None where its compiler is missing or does not work."""
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
            with self._compiler.watch(self._purpose):
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
            name, install, repair, _ = self._compiler
            why, remedy = f"{name} does not work here ({error!r})", repair
            if isinstance(error, ModuleNotFoundError):
                why, remedy = f"{name} is not installed", install
            warnings.warn(f"{why}: {self._slower}. {remedy}", stacklevel=4)


@cache
def _there(package: str) -> bool:
    return find_spec(package) is not None


@contextmanager
def _told(purpose: str) -> Iterator[None]:
    """Say so once when numba really compiles, and does not load what it has."""
    from numba.core import event

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


@contextmanager
def _alone_and_told(purpose: str) -> Iterator[None]:
    with _alone(), _told(purpose):
        yield


NUMBA = Compiler(
    "numba",
    'pip install "gradtide[fast]"',
    "start Python once with `import numba` to see why; if it can keep nothing, set "
    "NUMBA_CACHE_DIR to a folder that can be written",
    _alone_and_told,
)
TRITON = Compiler(
    "Triton",
    'pip install "gradtide[gpu]"',
    "it needs a C compiler, which CC may name, and a folder that can be written, "
    "which TRITON_CACHE_DIR may name",
    lambda purpose: nullcontext(),
)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, Triton launches where `x` is: it does so on the current device."""
    if x.device.type == "cpu":  # in Triton's interpreter
        return nullcontext()
    module = torch.get_device_module(x.device)
    found: AbstractContextManager[Any] = module.device(x.device)
    return found
