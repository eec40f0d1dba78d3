"""Seconds of a request on a network: formulas, from Hockney's alpha and beta.

[Note: Two levels] Ranks are numbered host by host, and all of a host's ranks share its
network card. A ring enters and leaves every host once: a card carries what one rank
sends, and of the P - 1 hops of a part, one a host is between hosts. Everything direct
is charged per card: of a host's ranks all send at once, and what is for other hosts
adds up. Within a host, links are not shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtide.core import ops
from gradtide.core.ops import Group, Op
from gradtide.planner.network import Link, Network
from gradtide.transport.ring import carried

FREE = Link.of(0.0, 0.0)
AGES = 1e5  # seconds: longer than the bytes of any message take


def seconds(op: Op, group: Group, network: Network) -> float:
    """From the moment a request is posted on an idle wire until it is answered.

    Every rank of `group` posts the same at the same time. Requests that need no wire
    take 0.
    """
    if group.size == 1:
        return 0.0
    few = group.size <= network.one_hop_ranks
    match op:
        case ops.AllReduce(tensor=x) if few and x.nbytes <= network.small_bytes:
            return direct([x.nbytes] * group.size, 0, network)
        case ops.Mean() | ops.AllReduce() | ops.ReduceScatter() | ops.AllGather():
            width = op.tensor.element_size()
            halves = 1 + isinstance(op, ops.Mean | ops.AllReduce)
            sizes = [n * width for n in ops.part_sizes(op, group)]
            if in_one_hop(sizes, network, group):
                return halves * direct([max(sizes)] * group.size, 0, network)
            return halves * ring(sizes, network)
        case ops.AllToAll(tensor=x, send=send, recv=recv):
            row = x.nbytes / max(len(x), 1)
            ways = ([n * row for n in numels] for numels in (send, recv))
            return max(direct(sizes, group.rank, network) for sizes in ways)
        case ops.Swap(tensor=x, peer=peer):
            return swap(x.nbytes, group.rank, peer, network)
        case ops.Broadcast(tensor=x):
            if in_one_hop([x.nbytes], network, group):
                return direct([x.nbytes] * group.size, 0, network)
            return broadcast(x.nbytes, network)
    return 0.0


def in_one_hop(sizes: Sequence[float], network: Network, group: Group) -> bool:
    """Whether parts of so many bytes go directly, as `transport.gloo` decides it."""
    if group.size > network.one_hop_ranks:
        return False
    pays = network.distance.direct_pays(sum(sizes), group.size)
    return pays or max(sizes) <= network.one_hop_bytes


def hops(op: Op, group: Group) -> int:
    """How many messages wait for each other until a request is answered.

    This is among ranks on hosts of their own that are so far apart that nothing else
    takes time; a message inside a host is none.
    """
    if isinstance(op, ops.Among):
        return 0 if op.inside else hops(op.op, ops.subgroup(op, group))
    far = Network(group.size, 1, FREE).delayed(2 * AGES)
    return math.ceil(round(seconds(op, group, far) / AGES, 6))


def ring(sizes: Sequence[float], network: Network) -> float:
    """P - 1 messages in a row around all ranks, each as `transport.ring` cuts it."""
    size, hosts = network.size, network.hosts
    between = hosts * (size - 1) / size if hosts > 1 else 0.0
    inside = size - 1 - between
    inter, intra = network.inter.ring, (network.intra or FREE).ring
    beta = max(intra.beta if inside else 0.0, inter.beta if between else 0.0)
    nbytes = carried(sum(sizes), max(sizes), min(sizes), len(sizes))
    late = between * network.resent(max(sizes))
    return inside * intra.alpha + between * inter.alpha + nbytes * beta + late


def direct(sizes: Sequence[float], rank: int, network: Network) -> float:
    """Messages of these bytes to (or from) every rank, one after the other."""
    local = network.ranks_per_host
    first = rank // local * local
    here = [n for i, n in enumerate(sizes[first : first + local], first) if i != rank]
    bytes_here, messages_here = sum(here), sum(n > 0 for n in here)
    own = sizes[rank]
    bytes_there = max(sum(sizes) - bytes_here - own, 0.0)
    messages_there = len(sizes) - sizes.count(0) - messages_here - (own > 0)
    intra, inter = (network.intra or FREE).direct, network.inter.direct
    starts = messages_here * intra.alpha + messages_there * inter.alpha
    late = network.resent(bytes_there) if bytes_there else 0.0
    carried = max(bytes_here * intra.beta, local * bytes_there * inter.beta)
    return starts + carried + late


def swap(nbytes: float, rank: int, peer: int, network: Network) -> float:
    """A message each way between two ranks, while all others do likewise."""
    if peer == rank:
        return 0.0
    local = network.ranks_per_host
    if peer // local == rank // local:
        return (network.intra or FREE).swap(nbytes)
    return network.inter.swap(local * nbytes) + network.resent(nbytes)


def broadcast(nbytes: float, network: Network) -> float:
    """A binomial tree over the hosts, then one within each."""
    there = (network.hosts - 1).bit_length()
    here = (network.ranks_per_host - 1).bit_length()
    inter, intra = network.inter, network.intra or FREE
    each = inter.broadcast(nbytes) + network.resent(nbytes)
    return there * each + here * intra.broadcast(nbytes)
