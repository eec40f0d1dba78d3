"""Python's start-up hook for programs whose scheme is in the environment.

Where GRADTIDE_SCHEME is set, the first DistributedDataParallel that a process makes has
`gradtide.install` called before. A process that makes none loads nothing of gradtide's.
Where GRADTIDE_ADVISE is, a process that imports torch is recorded (`advise.recorder`).

`gradtide run` and `gradtide advise` put this folder in front of PYTHONPATH, so that
Python runs this file when it starts, here and in all that the program starts; the
package that is installed has a line in `gradtide_startup.pth` that does so, too. A
`sitecustomize` of somebody else's runs after it. Nothing is imported here but what
Python has loaded anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # of every process of the program
    from collections.abc import Callable
    from typing import Any

SCHEME = "GRADTIDE_SCHEME"
ADVISE = "GRADTIDE_ADVISE"
CHAINED = "sitecustomize"  # this file's name where Python runs it by PYTHONPATH


class Hook:
    """Finds a module that is awaited, once, and calls `then` with it when loaded."""

    def __init__(self, awaited: str, then: Callable[[Any], None]) -> None:
        self.gradtide = awaited  # how another copy of this file knows it
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As a meta path finder's: None leaves the module to the other finders."""
        if name != self.gradtide:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec: Any = find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            self._then(module)

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
        raise _not_here(SCHEME, error) from error
    try:
        install(scheme)
    except ValueError as error:
        raise ValueError(
            f"{SCHEME}={scheme!r}: {error}; set another, or unset it"
        ) from None


def watch(torch: Any) -> None:
    """Have the first call of a module begin the record: by then all is imported."""

    def called(module: Any, inputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return
        handle.remove()
        try:
            from gradtide.advise.recorder import begin
        except ImportError as error:
            raise _not_here(ADVISE, error) from error
        begin(os.environ[ADVISE], module)

    def raised(kind: Any, error: Any, trace: Any) -> None:
        if "RANK" not in os.environ:  # one that torchrun has started has what it needs
            _note("raised", f"{kind.__name__}: {error}")
        others(kind, error, trace)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(called)
    others, sys.excepthook = sys.excepthook, raised
    _note("torch", "")


def _note(stage: str, words: str) -> None:
    """A stage of `advise.notes`; nobody asks for it any more if its folder is gone."""
    try:
        with open(os.path.join(os.environ[ADVISE], stage), "w") as file:
            file.write(words)
    except OSError:
        pass


def _not_here(variable: str, error: ImportError) -> RuntimeError:
    return RuntimeError(
        f"{variable}={os.environ[variable]!r} is set, and gradtide cannot be imported "
        f"here ({error}): install it for {sys.executable}, or unset {variable}"
    )


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


def _wait(variable: str, awaited: str, then: Callable[[Any], None]) -> None:
    """Wait for a module of torch's, unless another copy of this file does."""
    known = [getattr(finder, "gradtide", None) for finder in sys.meta_path]
    if os.environ.get(variable) and awaited not in sys.modules and awaited not in known:
        sys.meta_path.insert(0, Hook(awaited, then))


_wait(
    SCHEME,
    "torch.nn.parallel.distributed",
    lambda module: arm(module.DistributedDataParallel),
)
_wait(ADVISE, "torch", watch)
if __name__ == CHAINED:
    _chain()
