"""Matrices travel as two thin factors; what these do not span is the residual.

[Note: projection] With an orthonormal basis B, equal on all ranks, a rank sends its
coefficients C_r = W_r^T B of a matrix W_r and keeps W_r - B C_r^T, all that B does not
span. The mean is B C^T with C the mean of the C_r: the conservation law holds up to
rounding, and what stays behind is never longer than what was there. (The papers keep
W_r - B C^T, which has the same sum, and also what the ranks differ by within the span.)
As B is orthonormal, coefficients have the norm of the matrix that they stand for: what
is done at the `Cut` with a norm or a factor is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtide.collectives.dense import Dense, averaged
from gradtide.core.grouped import grouped
from gradtide.core.ops import AllReduce, Flow, Group
from gradtide.core.payload import Payload, Traits
from gradtide.wire import codec_of

SEED = 20190  # of the first factors, so that they are equal on all ranks


@dataclass(frozen=True)
class LowRank:
    """What both methods have in common."""

    rank: int = 4  # more: closer to the mean, and more bytes

    # A slice cuts through matrices.
    traits = Traits(depends_on="shapes", divisible=False)

    def __post_init__(self) -> None:
        if self.rank < 1:
            name = type(self).__name__
            raise ValueError(f"{name}(rank={self.rank}): a rank is at least 1")


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Send two thin factors of every matrix, by one power iteration a step.

    The method is by Vogels, Karimireddy and Jaggi (PowerSGD: Practical low-rank
    gradient compression for distributed optimization, NeurIPS 2019, arXiv:1905.13727).
    The iteration starts from the factor of the last step. Every tensor of two or more
    dimensions is a matrix of its first dimension by the others. It travels in rank
    (rows + columns) elements, if these are fewer than its own; all else travels as it
    is, with the second factor.

    Cost, with P ranks: four rounds of P - 1 messages: an all-reduce of the first
    factors, then a reduce-scatter and an all-gather. A rank sends 8 (P - 1) / P bytes
    for each float32 element that travels. A bucket without a matrix travels by `Dense`.

    Residual: what the factors do not span. If anything is not finite, the non-finite
    guard is told, the means of all matrices are NaN, and finite entries stay.

    Args:
        rank: The number of columns of a factor, 1 or more. Larger ranks are closer to
            the mean, and send more bytes in proportion. The default, 4, has a 256 x 256
            matrix travel in a 64th of its elements for each factor.

    Raises:
        ValueError: `rank` is less than 1.
    """

    def reduce(self, payload: Payload, group: Group) -> Flow:
        places = matrices_of(payload, self.rank)
        if group.size == 1 or not places:
            return (yield from Dense().reduce(payload, group))
        matrices = [place.of(payload.flat) for place in places]
        right = recall(payload, "right", [m.shape[1] for m in matrices], self.rank)
        sketch = _flat(m @ q for m, q in zip(matrices, right, strict=True))
        payload.check_finite(sketch)
        for r in gaps(places, len(payload.flat)):
            payload.check_finite(payload.flat[r])
        yield AllReduce(sketch)
        rows = [(m.shape[0], self.rank) for m in matrices]
        left = orthonormal(_split(sketch, rows))
        message = message_of(payload.flat, places, left, False)
        return (yield from project(payload, places, left, message, False, group))


class Place(NamedTuple):
    """A matrix within a bucket."""

    begin: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """The matrix, as a view of a tensor like the bucket's."""
        return flat[self.begin : self.end].view(self.rows, self.columns)


def matrices(payload: Payload) -> list[Place]:
    """The parts of two or more dimensions, in memory order.

    Columns are in memory order, too, which in channels-last tensors is another one.
    """
    origin = int(payload.flat.storage_offset())
    return sorted(
        Place(int(part.storage_offset()) - origin, len(part), prod(part.shape[1:]))
        for part in payload.parts
        if part.dim() >= 2 and part.numel()
    )


def matrices_of(payload: Payload, rank: int) -> list[Place]:
    """Those that take fewer elements as factors of `rank`."""
    return [
        place
        for place in matrices(payload)
        if rank * (place.rows + place.columns) < place.rows * place.columns
    ]


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal bases (each of its factor's shape) of the columns of every factor.

    The same input gives the same bits. Householder's QR, batched over equal shapes: a
    basis is complete even where columns are zero or dependent. Factors that are not
    finite are returned as NaN.
    """
    bases = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(factors)
    for alike in grouped(range(len(factors)), lambda i: factors[i].shape).values():
        stack = torch.stack([factors[i] for i in alike])
        wide = stack.to(torch.promote_types(stack.dtype, torch.float32))
        scale = wide.abs().amax((1, 2), keepdim=True)
        finite = scale.isfinite()
        safe = torch.where(finite, wide, 0) / torch.where(scale > 0, scale, 1)
        basis = torch.linalg.qr(safe.nan_to_num_(0.0))[0]
        basis = torch.where(finite, basis, torch.nan).to(stack.dtype)
        for i, one in zip(alike, basis, strict=True):
            bases[i] = one
    return bases


def message_of(
    flat: Tensor, places: Sequence[Place], bases: Sequence[Tensor], turned: bool
) -> Tensor:
    """What a rank sends: coefficients of the matrices, and all else as it is.

    Bases are of columns, or of rows if `turned`.
    """
    own = _oriented(flat, places, turned)
    coefficients = [w.T @ b for w, b in zip(own, bases, strict=True)]
    return _flat([*coefficients, *(flat[r] for r in gaps(places, len(flat)))])


def project(
    payload: Payload,
    places: Sequence[Place],
    bases: Sequence[Tensor],
    message: Tensor,
    turned: bool,
    group: Group,
) -> Flow:
    """The mean (1-D, like `flat`) of what `bases` span; see [Note: projection].

    `message` is `message_of`'s. Remembers the mean coefficients for the next step,
    unless there is something wrong with them.
    """
    own = _oriented(payload.flat, places, turned)
    rest = gaps(places, len(payload.flat))
    shapes = [(w.shape[1], b.shape[1]) for w, b in zip(own, bases, strict=True)]
    factors = sum(map(prod, shapes))
    payload.num_sent += len(message)
    for r in rest:
        payload.flat[r] = 0
    coefficients = message[:factors]
    if bool(coefficients.isfinite().all()):
        for w, b, c in zip(own, bases, _split(coefficients, shapes), strict=True):
            w.addmm_(b, c.T, alpha=-1)
    else:
        payload.flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    told = yield from averaged(message, payload, codec_of(None, message.dtype), group)
    means = _split(told[:factors], shapes)
    mean = payload.mean_buffer()
    for w, b, c in zip(_oriented(mean, places, turned), bases, means, strict=True):
        torch.mm(b, c.T, out=w)
    sizes = [r.stop - r.start for r in rest]
    for r, values in zip(rest, torch.split(told[factors:], sizes), strict=True):
        mean[r] = values
    if bool(told[:factors].isfinite().all()):
        payload.state["left" if turned else "right"] = told[:factors].clone()
    return mean


def _oriented(flat: Tensor, places: Sequence[Place], turned: bool) -> list[Tensor]:
    views = [place.of(flat) for place in places]
    return [view.T for view in views] if turned else views


def gaps(places: Sequence[Place], n: int) -> list[slice]:
    """The gaps between the matrices."""
    edges = [0, *chain.from_iterable((p.begin, p.end) for p in places), n]
    pairs = list(pairwise(edges))[::2]
    return [slice(begin, end) for begin, end in pairs if end > begin]


def recall(
    payload: Payload, name: str, lengths: Sequence[int], rank: int
) -> list[Tensor]:
    """The factors of the last step; at first random ones, equal on all ranks."""
    known = payload.state.get(name)
    shapes = [(length, rank) for length in lengths]
    if known is None or len(known) != sum(map(prod, shapes)):
        draws = []
        for i, shape in enumerate(shapes):
            rng = torch.Generator().manual_seed(SEED + i)
            draws.append(
                torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
            )
        known = _flat(draws).to(payload.flat)
    return _split(known, shapes)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(flat, [prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
