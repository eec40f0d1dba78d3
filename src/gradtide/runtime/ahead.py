"""What takes long to load or to compile: made ready when a scheme is admitted.

Nothing is imported or compiled for the first time in a step that could have been
before (guard: tests/runtime/test_ahead.py). It would be counted as training, and fail
in the midst of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradtide import wire
from gradtide.collectives.dense import without_loss
from gradtide.core.payload import density_of, layers, traits, wire_of
from gradtide.scheme import Scheme, undecided
from gradtide.selectors import kernels
from gradtide.wire import indices


def prepare(params: Iterable[Tensor], scheme: Scheme) -> None:
    """Have ready what a scheme needs in its steps for such gradients. Local.

    Of the processes of a machine one compiles, and the others wait for it.
    """
    _load(scheme)
    kinds = {(p.dtype, p.device) for p in params}
    # Before a decision sparse schemes are rehearsed, whatever is chosen then.
    rehearsing = undecided(scheme) is not None
    for part in layers(scheme.collective):
        for dtype, device in kinds:
            if rehearsing or traits(part).scans:
                kernels.prepare(dtype, device)
            if rehearsing or density_of(part) is not None:
                indices.prepare(device)
            wire.prepare(wire_of(part), dtype, device)
            if getattr(part, "lossless", False):
                without_loss().prepare(device)


def _load(scheme: Scheme) -> None:
    """Load what is needed when an optimizer is known, which may be found in a step."""
    schedule = scheme.schedule
    local, deferred = schedule.launch == "step", schedule.update == "forward"
    if local:
        from gradtide.runtime.exchange import rounds, steps  # noqa: F401
    if local or deferred:
        from gradtide.runtime.optimizer import probing  # noqa: F401
    if scheme.preconditioner is not None:
        from gradtide.kfac import preconditioner  # noqa: F401
        from gradtide.runtime.exchange import preconditioned  # noqa: F401
