"""Buckets that wait for the next gradient where that is cheaper than a start-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradtide.fusion.base import Cost, Trace


@dataclass(frozen=True)
class MgWfbp:
    """MG-WFBP (Shi et al., INFOCOM 2019, arXiv:1811.11141).

    A tensor joins the bucket before it if the bucket's exchange, which could begin when
    its own gradients are ready and the exchanges before it have ended, would have to
    wait for less time than one exchange instead of two saves. Needs the trace's
    backward times and a cost; raises ValueError without.
    """

    def __call__(self, trace: Trace, cost: Cost) -> list[slice]:
        if trace.backward is None or not cost(1) > 0:
            raise ValueError(
                "MgWfbp() needs the backward time of every tensor and the cost of an "
                "exchange, which a training run does not know in advance: measure them "
                "with `gradtide profile` and train with the Cuts(...) that `gradtide "
                "plan` works out, or use BinarySearch() or Bayesian(), which measure "
                "during training"
            )
        nbytes, ready = trace.nbytes, list(accumulate(trace.backward))
        slices: list[slice] = []
        begin, filled, free = 0, 0, 0.0  # of the bucket being filled; of the network
        for i, n in enumerate(nbytes):
            if i > begin:
                start = max(free, ready[i - 1])
                saved = cost(filled) + cost(n) - cost(filled + n)
                if ready[i] - start >= saved:
                    slices.append(slice(begin, i))
                    begin, filled, free = i, 0, start + cost(filled)
            filled += n
        return [*slices, slice(begin, len(nbytes))] if nbytes else []


def overlapped(trace: Trace, slices: Sequence[slice], cost: Cost) -> float:
    """Seconds from the beginning of backward until all buckets have been exchanged.

    One exchange at a time, each as soon as the bucket is full: what a step takes beside
    its forward when means are needed at `step()`.
    """
    assert trace.backward is not None
    ready = list(accumulate(trace.backward))
    end = 0.0
    for piece in slices:
        end = max(end, ready[piece.stop - 1]) + cost(sum(trace.nbytes[piece]))
    return max(end, ready[-1])
