"""The vocabulary of a collective algorithm: what it may ask of the other ranks.

An algorithm is a generator. It yields a request, or a tuple of requests that may travel
together, and is resumed with the answer (or the tuple of answers). It never sees a
process group, a stream, a clock or a thread, so the same source runs on
torch.distributed, on P ranks in one process and on a virtual clock.

Requests own the tensors that they carry until they are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor


class Group(NamedTuple):
    """This rank's place among the ranks that average together."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Answer: `tensor`, summed in place over all ranks."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """Answer: `tensor` (1-D), averaged in place over all ranks.

    This is a `ReduceScatter` and an `AllGather`: whoever drives the flow may ask for
    these in its place, and wait at the `Cut` between them (`halves`).
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Answer: this rank's part of the sum, a view of `tensor` (1-D), which is used up.

    `sizes` are the lengths of the parts in rank order; without them the length must be
    a multiple of the group's size. With `mean` the sum is divided by that
    size.
    """

    tensor: Tensor
    sizes: Sequence[int] | None = None
    mean: bool = False


@dataclass(frozen=True, slots=True)
class AllGather:
    """Answer: `into` when it is given, otherwise a new tensor of everybody's `tensor`.

    The new tensor has shape [size, *tensor.shape], or, with uneven `sizes` (lengths in
    rank order), is 1-D. `into` is 1-D and may contain `tensor` at its place already.
    """

    tensor: Tensor
    sizes: Sequence[int] | None = None
    into: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Answer: the rows that the ranks sent to this one, in rank order.

    `tensor` holds the rows for each rank one after the other; `send` and `recv` count
    the rows for and from every rank. With `used` they are at most one, and of every
    row of `tensor` so many leading elements matter, of which no other rank knows
    before: what is behind them may travel or not, and arrives as anything.
    """

    tensor: Tensor
    send: Sequence[int]
    recv: Sequence[int]
    used: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """Answer: the tensor of the same shape that `peer` sent in exchange."""

    tensor: Tensor
    peer: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Answer: `tensor`, overwritten in place with that of rank `source`."""

    tensor: Tensor
    source: int


@dataclass(frozen=True, slots=True)
class ToHost:
    """Answer: `tensor` in host memory. Nothing travels; the device is waited for."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """The first half is done: `part` is this rank's finished share of the mean.

    Whoever drives the flow may wait here until the parameters are next read. There is
    no answer.
    """

    part: Tensor


@dataclass(frozen=True, slots=True)
class Handover:
    """What follows travels over another link: what comes next may have this one.

    A flow that asks for it is launched as one that does (`payload.hands_over`): inside
    the host up to the first, between hosts up to the second, inside again to its end.
    There is no answer.
    """


@dataclass(frozen=True, slots=True)
class Among:
    """Answer: that of `op`, asked among some `ranks` of the group alone.

    All of these ask for it, as the next thing that they ask among themselves; what
    other ranks ask for is no business of theirs. Ranks in `op`, as a peer or a source,
    are places in `ranks`. `inside` says that these ranks share a host, so that nothing
    crosses its link.
    """

    op: Message
    ranks: Sequence[int]
    inside: bool = False


Message: TypeAlias = (
    AllReduce | Mean | ReduceScatter | AllGather | AllToAll | Swap | Broadcast
)
Op: TypeAlias = Message | Among | ToHost | Cut | Handover
Flow: TypeAlias = Generator[Op | tuple[Op, ...], Any, Tensor]
Steps: TypeAlias = Generator[Any, Any, Any]  # part of a flow, and what it comes to


def message_of(op: Op) -> Message | ToHost | Cut | Handover:
    """What is asked, of all ranks or of some."""
    return op.op if isinstance(op, Among) else op


def name_of(op: Op) -> str:
    """What a request is called in records: by what travels."""
    return type(message_of(op)).__name__


def is_inside(op: Op | tuple[Op, ...]) -> bool:
    """Whether nothing of a request, or of any of some, crosses a host's link."""
    if isinstance(op, tuple):
        return all(map(is_inside, op))
    return isinstance(op, Among) and op.inside


def subgroup(op: Among, group: Group) -> Group:
    """This rank's place among those that a request is asked of."""
    return Group(list(op.ranks).index(group.rank), len(op.ranks))


def crossing(op: Op, group: Group) -> int:
    """How many ranks send over a host's link what this one sends, for one request.

    A ring among all ranks leaves each host once, so there it is one.
    """
    if not isinstance(op, Among):
        return 1
    return 0 if op.inside else group.size // len(op.ranks)


def part_sizes(
    op: Mean | AllReduce | ReduceScatter | AllGather, group: Group
) -> list[int]:
    """Lengths of the parts of a request, in rank order: stated or even."""
    length, size = op.tensor.numel(), group.size
    if isinstance(op, Mean | AllReduce):
        return [length // size + (rank < length % size) for rank in range(size)]
    if op.sizes is not None:
        return list(op.sizes)
    if isinstance(op, AllGather):
        return [length] * size
    assert length % size == 0, f"{length} elements in {size} parts"
    return [length // size] * size


def sent_to(op: AllToAll) -> list[int]:
    """How many elements travel to every rank."""
    if op.used is None:
        row = op.tensor.numel() // max(len(op.tensor), 1)
        return [row * rows for rows in op.send]
    used = iter(op.used)
    return [next(used) if rows else 0 for rows in op.send]


def payload_bytes(op: Op, group: Group) -> int:
    """Bytes of payload that this rank puts on the wire to have `op` answered.

    The reductions and the gather travel around a ring, the rest in direct messages: no
    algorithm sends less with equal parts. Where hosts have several ranks, what is asked
    among some of them counts as often as it crosses a host's link (`crossing`).
    """
    rank, size = group
    match op:
        case Among():
            return crossing(op, group) * payload_bytes(op.op, subgroup(op, group))
        case AllReduce(tensor=x) | Mean(tensor=x):
            return 2 * (size - 1) * x.nbytes // size
        case ReduceScatter(tensor=x):
            return (x.numel() - part_sizes(op, group)[rank]) * x.element_size()
        case AllGather(tensor=x):
            sizes = part_sizes(op, group)
            return (sum(sizes) - sizes[(rank + 1) % size]) * x.element_size()
        case AllToAll(tensor=x):
            sent = sent_to(op)
            return (sum(sent) - sent[rank]) * x.element_size()
        case Swap(tensor=x, peer=peer):
            return x.nbytes if peer != rank else 0
        case Broadcast(tensor=x, source=source):
            return x.nbytes if rank == source and size > 1 else 0
        case _:
            return 0


def driven(flow: Flow, carry: Callable[[Any], Steps]) -> Flow:
    """A flow each of whose requests is carried out by another one."""
    answer: Any = None
    try:
        while True:
            answer = yield from carry(flow.send(answer))
    except StopIteration as stop:
        result: Tensor = stop.value
        return result
    finally:
        flow.close()


def in_halves(flow: Flow, group: Group) -> Flow:
    """The flow with two halves, and a cut between them, in the place of a `Mean`."""
    return driven(flow, lambda asked: halves(asked, group))


def halves(asked: Any, group: Group) -> Steps:
    """What is asked, or, if that is a `Mean`, its two halves and a `Cut` between."""

    def ask(op: Message) -> Op:
        return replace(asked, op=op) if isinstance(asked, Among) else op

    mean = None if isinstance(asked, tuple) else message_of(asked)
    if not isinstance(mean, Mean):
        return (yield asked)
    group = subgroup(asked, group) if isinstance(asked, Among) else group
    x, sizes = mean.tensor, part_sizes(mean, group)
    part = yield ask(ReduceScatter(x, sizes, mean=True))
    yield Cut(part)
    return (yield ask(AllGather(part, sizes, into=x)))
