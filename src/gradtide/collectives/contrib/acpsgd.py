"""Of every matrix one thin factor travels, in turns."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.collectives.dense import Dense
from gradtide.collectives.lowrank import (
    LowRank,
    matrices_of,
    message_of,
    orthonormal,
    project,
    recall,
)
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload, next_step


@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Send one of two thin factors of every matrix, the other in the next step.

    A factor is the projection of the matrix on the other factor of the step before.
    This is ACP-SGD (Zhang et al., Evaluation and optimization of gradient compression
    for distributed deep learning, ICDCS 2023). Matrices are those of `PowerSGD`; the
    basis is a step older.

    Cost, with P ranks: two rounds of P - 1 messages, a reduce-scatter and an
    all-gather: half of those of `PowerSGD`. A matrix travels in rank x rows elements in
    one step and rank x columns in the next; a rank sends 8 (P - 1) / P bytes for each
    float32 element that travels. A bucket without a matrix travels by `Dense`.

    Residual: what the factors do not span. Values that are not finite are treated as by
    `PowerSGD`.

    Args:
        rank: The number of columns of a factor, see `PowerSGD`.

    Raises:
        ValueError: `rank` is less than 1.
    """

    def reduce(self, payload: Payload, group: Group) -> Flow:
        places = matrices_of(payload, self.rank)
        if group.size == 1 or not places:
            return (yield from Dense().reduce(payload, group))
        turned = next_step(payload.state) % 2 == 0
        lengths = [p.columns if turned else p.rows for p in places]
        known = recall(payload, "right" if turned else "left", lengths, self.rank)
        basis = orthonormal(known)
        message = message_of(payload.flat, places, basis, turned)
        payload.check_finite(message)
        return (yield from project(payload, places, basis, message, turned, group))
