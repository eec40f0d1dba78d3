"""Python's start-up hook for programs whose scheme is in the environment.

Where GRADTIDE_SCHEME is set, the first DistributedDataParallel that a process makes has
`gradtide.install` called before. A process that makes none loads nothing of gradtide's.

`gradtide run` puts this folder in front of PYTHONPATH, so that Python runs this file
when it starts, here and in all that the program starts; the package that is installed
has a line in `gradtide_startup.pth` that does so, too. A `sitecustomize` of somebody
else's runs after it. Nothing is imported here but what Python has loaded anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # of every process of the program
    from typing import Any

SCHEME = "GRADTIDE_SCHEME"
AWAITED = "torch.nn.parallel.distributed"
CHAINED = "sitecustomize"  # this file's name where Python runs it by PYTHONPATH


class Hook:
    """Finds the module of torch's class, once, and arms the class when it is loaded."""

    gradtide = True  # how another copy of this file knows it

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As a meta path finder's: None leaves the module to the other finders."""
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec: Any = find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            arm(module.DistributedDataParallel)

        spec.loader.exec_module = loaded
        return spec


def arm(torchs: Any) -> None:
    """Have the class install gradtide when the first of it is made."""
    own = torchs.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        scheme = os.environ.get(SCHEME)
        torchs.__init__ = own
        if scheme:
            try:
                _install(scheme)
            except Exception:
                torchs.__init__ = __init__  # the next one is no plain one, either
                raise
        torchs.__init__(self, *args, **kwargs)

    torchs.__init__ = __init__


def _install(scheme: str) -> None:
    try:
        from gradtide.installing import install
    except ImportError as error:
        raise RuntimeError(
            f"{SCHEME}={scheme!r} is set, and gradtide cannot be imported here "
            f"({error}): install it for {sys.executable}, or unset {SCHEME}"
        ) from error
    try:
        install(scheme)
    except ValueError as error:
        raise ValueError(
            f"{SCHEME}={scheme!r}: {error}; set another, or unset it"
        ) from None


def _chain() -> None:
    """Run the `sitecustomize` that this one stands in front of."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.realpath(__file__))
    rest = [path for path in sys.path if os.path.realpath(path) != here]
    spec = PathFinder.find_spec(CHAINED, rest)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[CHAINED] = module
        spec.loader.exec_module(module)


def _wait() -> None:
    """Wait for torch's class, unless another copy of this file does."""
    waiting = any(getattr(finder, "gradtide", False) for finder in sys.meta_path)
    if os.environ.get(SCHEME) and AWAITED not in sys.modules and not waiting:
        sys.meta_path.insert(0, Hook())


_wait()
if __name__ == CHAINED:
    _chain()
