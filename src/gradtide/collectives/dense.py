"""Everything travels: the two halves of a ring all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradtide.collectives._entries import Steps, check
from gradtide.collectives._nonzero import NonZero
from gradtide.core.ops import AllGather, AllToAll, Cut, Flow, Group, Mean
from gradtide.core.payload import Payload, Traits
from gradtide.wire import NARROW, Codec, Wire, codec_of, round_off


@dataclass(frozen=True)
class Dense:
    """Average everything, by a reduce-scatter and an all-gather.

    The ring of both halves is by Patarasuk and Yuan (Bandwidth optimal all-reduce
    algorithms for clusters of workstations, JPDC 2009). With `wire` parts go directly
    to their owners, as in DeepSpeed's 1-bit all-reduce.

    Cost, with P ranks: two rounds of P - 1 messages. Of a bucket of n elements a rank
    sends 2 n (P - 1) / P: for float32 8 n (P - 1) / P bytes, with `wire` half of that
    (16 bits), a quarter ("int8"), an eighth ("e3m0") and less.

    Residual: none for float32 and for wires of 16 bits. Contributions are rounded once
    when they leave, and the mean once; sums are taken in the bucket's own dtype. What
    the casts to 16 bits take off is lost, which is the one exception from the
    conservation law. What narrower wires take off is kept: that of a contribution by
    its sender, that of the mean by the owner of the part.

    Args:
        wire: In what values travel. "bf16" keeps the range of float32 and 8 bits of
            precision; "fp16" keeps 11 bits, overflows above 65504, and loses very small
            values. "int8", "e3m0", "2bit" and "sign" have 8, 4, 2 and 1 bits, and a
            scale for every 256 values. None, the default, changes nothing, because only
            that is exact. Values of at most 16 bits are not cast.
        lossless: Whether float32 and bfloat16 travel without the bits of their
            exponents that neighbours share, see `wire.lossless`: fewer bytes, and the
            same means to the bit. Other values travel as they are. The default is
            False: it takes some passes over memory, and as much memory as the bucket
            for messages, which pays where links are slow.

    Raises:
        ValueError: `wire` is something else, or `lossless` is given with another wire
            than "bf16".
    """

    wire: Wire = None
    lossless: bool = False

    @property
    def traits(self) -> Traits:
        rounds_off = self.wire in NARROW
        return Traits(dense=True, rounds_off=rounds_off, depends_on="length")

    def __post_init__(self) -> None:
        check(self)
        if self.lossless and self.wire not in (None, "bf16"):
            raise ValueError(
                f"{self!r}: lossless shortens the exponents of float32 and bfloat16: "
                "use wire='bf16' or no wire, or leave lossless out"
            )

    def __repr__(self) -> str:
        """The text of checkpoints from before `lossless`, where that is not used."""
        more = ", lossless=True" if self.lossless else ""
        return f"Dense(wire={self.wire!r}{more})"

    def reduce(self, payload: Payload, group: Group) -> Flow:
        x = payload.flat
        codec = codec_of(self.wire, x.dtype)
        alone = group.size == 1 or not len(x)
        if self.lossless and not alone and codec.dtype in without_loss().INTEGERS:
            mean: Tensor = yield from without_loss().mean(payload, codec, group)
            return mean
        if codec.exact or alone:
            yield Mean(x)
            return x
        mean = x
        if codec.keeps:
            payload.num_sent += len(x)
            mean = payload.mean_buffer()
        part = yield from first_half(x, mean, codec, payload, group)
        yield Cut(part)
        return (yield from second_half(mean, part, codec, payload, group))


def without_loss() -> Any:
    """What exchanges without loss; loaded here, as most trainings do without."""
    from gradtide.collectives import _lossless

    return _lossless


def pays(sent: int, n: int, size: int, codec: Codec) -> bool:
    """Whether so many bytes of a rank are fewer than those of a dense exchange.

    That sends 2 n (P - 1) / P values, coded.
    """
    return size > 1 and sent * size < 2 * (size - 1) * codec.nbytes(n)


def first_half(
    x: Tensor, mean: Tensor, codec: Codec, payload: Payload, group: Group
) -> Steps:
    """This rank's part of the mean of `x`, as the codec holds it: a part of `mean`.

    Both are 1-D, their length a multiple of the group's size. If they are the same
    memory, what the codec rounds off is lost; else it is what stays in `x`, and the
    non-finite guard is told of what is sent. The payload lends memory for messages.
    Direct messages, instead of a ring, which would round partial sums at every hop.
    """
    rows, span = x.view(group.size, -1), x.numel() // group.size
    own, part = rows[group.rank], mean.view(group.size, -1)[group.rank]
    # Where all that is rounded off is kept, what stays here is not rounded.
    sent = [int(r != group.rank or not codec.keeps) for r in range(group.size)]
    messages = payload.message_buffer(sum(sent), codec.nbytes(span))
    leaving = [row for row, there in zip(rows, sent, strict=True) if there]
    lost = mean is x
    for row, message in zip(leaving, messages, strict=True):
        (codec.write if lost else codec.encode)(row, message)
    if not lost:
        payload.check_finite(codec.witness(messages, span))
    if codec.keeps:
        payload.check_finite(torch.stack(torch.aminmax(own)).to(codec.dtype))
        part.copy_(own)
        own.zero_()
    received = yield AllToAll(messages, sent, sent)
    if codec.keeps:
        codec.add(received, part)
    else:
        codec.decode(received[0], part)
        codec.add(received[1:], part)
    part.div_(group.size)
    if not lost:
        # Before the cut: what is cut out of a part later is not in the residual's
        # units.
        own.add_(round_off(part, codec), alpha=group.size)
    return part


def second_half(
    mean: Tensor,
    part: Tensor,
    codec: Codec,
    payload: Payload,
    group: Group,
    most: int | None = None,
) -> Flow:
    """All parts of the mean, written to `mean`, of which `part` is this rank's.

    Where it is known of every part that at most so many values are not zero, the others
    stay behind if that is shorter.
    """
    if most is not None and (short := NonZero(codec, len(part), most)).pays:
        return (yield from _without_zeros(short, mean, part, payload, group))
    if codec.exact:
        whole: Tensor = yield AllGather(part, into=mean)
        return whole
    messages = payload.message_buffer(group.size, codec.nbytes(part.numel()))
    codec.write(part, messages[group.rank])
    yield AllGather(messages[group.rank], into=messages.flatten())
    for message, row in zip(messages, mean.view(group.size, -1), strict=True):
        codec.decode(message, row)
    return mean


def _without_zeros(
    short: NonZero, mean: Tensor, part: Tensor, payload: Payload, group: Group
) -> Flow:
    codec, messages = short.codec, payload.message_buffer(group.size, short.nbytes)
    whole = part.new_empty(codec.nbytes(len(part)), dtype=torch.uint8)
    codec.write(part, whole)
    short.shorten(whole, messages[group.rank])
    yield AllGather(messages[group.rank], into=messages.flatten())
    for message, row in zip(messages, mean.view(group.size, -1), strict=True):
        if codec.exact:  # a row is what its message decodes to
            short.restore(message, row.view(torch.uint8))
        else:
            short.restore(message, whole)
            codec.decode(whole, row)
    return mean


def averaged(
    values: Tensor,
    payload: Payload,
    codec: Codec,
    group: Group,
    where: Tensor | None = None,
) -> Flow:
    """The mean of all ranks' `values` (1-D).

    With a codec that is not exact, `where` they were taken from is the same on all
    ranks, and what is rounded off is given back to the payload there.
    """
    length = -(-max(len(values), 1) // group.size) * group.size
    x = torch.nn.functional.pad(values, (0, length - len(values)))
    if codec.exact:
        yield Mean(x)
        return x[: len(values)]
    mean = torch.empty_like(x)
    part = yield from first_half(x, mean, codec, payload, group)
    if where is not None:
        payload.add_residual(where, x[: len(values)])
    yield Cut(part)
    mean = yield from second_half(mean, part, codec, payload, group)
    return mean[: len(values)]
