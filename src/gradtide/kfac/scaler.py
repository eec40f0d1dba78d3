"""The GradScaler by which a step is called, so that a forgotten one is found out."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch.amp import GradScaler

# Everything that scales steps with this one: subclasses inherit it.
_STEP = GradScaler.step.__code__


def check(scale: Callable[[], float]) -> None:
    """Refuse a step by a GradScaler whose scale K-FAC was not told of.

    Nothing that a scaler leaves on an optimizer, or on gradients, tells of it. But
    `scaler.step(optimizer)` is above this call. Raises RuntimeError where its scale is
    not `scale()`.
    """
    scaler = _calling()
    if scaler is not None and scaler.get_scale() != scale():
        raise RuntimeError(
            f"this step is taken by a GradScaler with a scale of {scaler.get_scale()}; "
            f"K-FAC was told {scale()}: its factors are squares of scaled gradients; "
            "call replicate(..., grad_scaler=scaler)"
        )


def _calling() -> GradScaler | None:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _STEP:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None
