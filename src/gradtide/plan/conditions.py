"""When a scheme is of no use for a model among so many ranks, and why."""

from __future__ import annotations

from gradtide.bucket import settled, traits
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
    own = traits(settled(scheme.collective))
    if getattr(scheme, "preconditioner", None) is not None:
        return "it changes what a step does: plans compare steps of the same effect"
    if own.dense:
        return ""
    if own.depends_on == "shapes" and not _shaped(trace):
        return "it works on matrices, and the trace has no shapes: compare in the lab"
    if sent < (1 - SAVED) * dense:
        return ""
    words = f"sends {sent / 1e6:.3g} MB a step, a dense exchange {dense / 1e6:.3g} MB"
    bound = own.pays_below(size)
    if bound is not None:
        words += f": among {size} ranks it pays below a density of {bound:.2g}"
    return words


def wire(collective: object) -> str | None:
    """The type on the wire, where it is not the gradients' own."""
    found: str | None = getattr(settled(collective), "wire", None)
    return found


def _shaped(trace: StepTrace) -> bool:
    return any(len(getattr(unit, "shape", ())) > 1 for unit in trace.units)
