"""When a scheme is of no use for a model among so many ranks, and why."""

from __future__ import annotations

from typing import Any

from gradtide.collectives import ACPSGD, Corrected, Dense, GTopK, PowerSGD, TopK, Warmup
from gradtide.collectives.gtopk import rounds
from gradtide.plan.trace import StepTrace
from gradtide.scheme import Scheme

SAVED = 0.02  # of the dense bytes must be saved: less is not worth any remainder


def refusal(
    scheme: Scheme, trace: StepTrace, size: int, sent: float, dense: float
) -> str:
    """Why a scheme is of no use among `size` ranks; empty where it may be.

    `sent` and `dense` are the bytes that a rank sends in a step by it and by a dense
    exchange with the same type on the wire.
    """
    collective = within(scheme.collective)
    if getattr(scheme, "preconditioner", None) is not None:
        return "it changes what a step does: plans compare steps of the same effect"
    if isinstance(collective, Dense):
        return ""
    if isinstance(collective, PowerSGD | ACPSGD) and not _shaped(trace):
        return "it works on matrices, and the trace has no shapes: compare in the lab"
    if sent < (1 - SAVED) * dense:
        return ""
    words = f"sends {sent / 1e6:.3g} MB a step, a dense exchange {dense / 1e6:.3g} MB"
    bound = _highest_density(collective, size)
    if bound is not None:
        words += f": among {size} ranks it pays below a density of {bound:.2g}"
    return words


def within(collective: Any) -> Any:
    """The collective inside of all wrappers."""
    while isinstance(collective, Warmup | Corrected):
        collective = collective.collective
    return collective


def wire(collective: Any) -> str | None:
    """The type on the wire, where it is not the gradients' own."""
    found: str | None = getattr(within(collective), "wire", None)
    return found


def _shaped(trace: StepTrace) -> bool:
    return any(len(getattr(unit, "shape", ())) > 1 for unit in trace.units)


def _highest_density(collective: Any, size: int) -> float | None:
    """Below which density fewer bytes travel than densely, where P decides that.

    An entry of 4 bytes has 2 bytes of index, one of 2 bytes also (docs/schemes.md).
    """
    dense = 2 * (size - 1) / size / (1.5 if wire(collective) is None else 2)
    if isinstance(collective, TopK):
        return dense / (size - 1)
    if isinstance(collective, GTopK):
        return dense / rounds(size)
    return None
