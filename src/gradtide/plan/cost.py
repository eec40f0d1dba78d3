"""Seconds of a request on a network: formulas, from Hockney's alpha and beta.

[Note: Two levels] Ranks are numbered host by host, and all of a host's ranks share its
network card. A ring enters and leaves every host once: a card carries what one rank
sends, and of the P - 1 hops of a part, one a host is between hosts. Everything direct
is charged per card: of a host's ranks all send at once, and what is for other hosts
adds up. Within a host, links are not shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Group,
    Op,
    ReduceScatter,
    Swap,
    part_sizes,
)
from gradtide.plan.network import Link, Network
from gradtide.transport.ring import carried

FREE = Link.of(0.0, 0.0)


def seconds(op: Op, group: Group, network: Network, scale: float = 1.0) -> float:
    """From the moment a request is posted on an idle wire until it is answered.

    Every rank of `group` posts the same at the same time. `scale` multiplies the bytes,
    for a request that stands for a larger one. Requests that need no wire take 0.
    """
    if group.size == 1:
        return 0.0
    match op:
        case ReduceScatter(tensor=x) | AllGather(tensor=x):
            width = x.element_size() * scale
            return parts([n * width for n in part_sizes(op, group)], network)
        case AllReduce(tensor=x):
            return all_reduce(_bytes(x) * scale, group.size, network)
        case AllToAll(tensor=x, send=send, recv=recv):
            row = _bytes(x) / max(len(x), 1) * scale
            return max(
                direct([n * row for n in send], group.rank, network),
                direct([n * row for n in recv], group.rank, network),
            )
        case Swap(tensor=x, peer=peer):
            return swap(_bytes(x) * scale, group.rank, peer, network)
        case Broadcast(tensor=x):
            return broadcast(_bytes(x) * scale, network)
    return 0.0


def parts(sizes: Sequence[float], network: Network) -> float:
    """A reduce-scatter to, or an all-gather from, owners of parts of these bytes."""
    size, largest = len(sizes), max(sizes)
    if size <= network.one_hop_ranks and largest <= network.one_hop_bytes:
        return direct([largest] * size, 0, network)
    return ring(sizes, network)


def ring(sizes: Sequence[float], network: Network) -> float:
    """P - 1 messages in a row around all ranks, each as `transport.ring` cuts it."""
    inside, between = hops(network)
    intra = (network.intra or FREE).ring
    beta = max(
        intra.beta if inside else 0.0, network.inter.ring.beta if between else 0.0
    )
    nbytes = carried(sum(sizes), max(sizes), min(sizes), len(sizes))
    return inside * intra.alpha + between * network.inter.ring.alpha + nbytes * beta


def hops(network: Network) -> tuple[float, float]:
    """Of a ring's P - 1 hops, those within hosts and those between hosts."""
    size, hosts = network.size, network.hosts
    between = hosts * (size - 1) / size if hosts > 1 else 0.0
    return size - 1 - between, between


def all_reduce(nbytes: float, size: int, network: Network) -> float:
    """One hop where it is small, else both halves of a ring."""
    if size <= network.one_hop_ranks and nbytes <= network.small_bytes:
        return direct([nbytes] * size, 0, network)
    return 2 * ring([nbytes / size] * size, network)


def direct(sizes: Sequence[float], rank: int, network: Network) -> float:
    """Messages of these bytes to (or from) every rank, one after the other."""
    local = network.ranks_per_host
    first = rank // local * local
    here = [n for i, n in enumerate(sizes[first : first + local], first) if i != rank]
    bytes_here, messages_here = sum(here), sum(n > 0 for n in here)
    own = sizes[rank]
    bytes_there = max(sum(sizes) - bytes_here - own, 0.0)
    messages = len(sizes) - sizes.count(0)
    messages_there = messages - messages_here - (own > 0)
    intra, inter = (network.intra or FREE).direct, network.inter.direct
    starts = messages_here * intra.alpha + messages_there * inter.alpha
    return starts + max(bytes_here * intra.beta, local * bytes_there * inter.beta)


def swap(nbytes: float, rank: int, peer: int, network: Network) -> float:
    """A message each way between two ranks, while all others do likewise."""
    if peer == rank:
        return 0.0
    local = network.ranks_per_host
    if peer // local == rank // local:
        rate = (network.intra or FREE).swap
        return rate.alpha + nbytes * rate.beta
    return network.inter.swap.alpha + local * nbytes * network.inter.swap.beta


def broadcast(nbytes: float, network: Network) -> float:
    """A binomial tree over the hosts, then one within each."""
    intra, inter = (network.intra or FREE).broadcast, network.inter.broadcast
    there = (network.hosts - 1).bit_length()
    here = (network.ranks_per_host - 1).bit_length()
    return there * (inter.alpha + nbytes * inter.beta) + here * (
        intra.alpha + nbytes * intra.beta
    )


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
