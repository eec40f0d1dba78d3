"""What is wrong, and what is only unwise: pure functions of what the ranks found.

A failure is what no training would survive. A warning is what costs time, or misleads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gradtide.core.grouped import grouped
from gradtide.doctor.facts import SHARED, Facts, Host, hosts, parted, ranks_of
from gradtide.doctor.pairs import Heard
from gradtide.transport.addresses import VARIABLE, loops, outward
from gradtide.transport.distance import FAR
from gradtide.transport.links import LANES

STRICT = ("gradtide", "torch")  # these must be alike; of Python, the minor version
LATE = 1.0  # seconds between two clocks that confuse
FILES = 64  # that a rank opens beside its connections to the others
EACH = 2 + len(LANES)  # to each of them: two groups of Gloo's, and gradtide's own
SMALL = 1 << 28  # bytes of shared memory
WHOEVER = (
    "Nothing is encrypted: who is on the way can read gradients and change them. Train "
    "in a tunnel, such as WireGuard's, or let a firewall pass the job's hosts alone"
)
SLOW = 0.5  # of the typical rate between hosts: what stands out


@dataclass(frozen=True)
class Finding:
    """Something to put right, and how."""

    level: Literal["failure", "warning"]
    words: str


failure, warning = partial(Finding, "failure"), partial(Finding, "warning")


def alone(own: Facts) -> list[Finding]:
    """What a process can see of itself."""
    found = [*_limits([own]), *_threads([own]), *_exposed([own])]
    if own.error:
        return [failure(own.error), *found]
    if loops(own.address):
        words = f"{_unheard(own)}: before several hosts train, {_instead(own)}"
        found.append(warning(words))
    return found


def together(everybody: Sequence[Facts]) -> list[Finding]:
    """What is seen when all ranks' facts lie side by side."""
    rules = (
        _told_alike,
        _versions,
        _addresses,
        _exposed,
        _backends,
        _layout,
        _limits,
        _threads,
    )
    return [found for rule in rules for found in rule(everybody)]


def _told_alike(everybody: Sequence[Facts]) -> Iterator[Finding]:
    sizes = grouped(everybody, lambda each: str(each.size))
    if len(sizes) > 1:
        yield failure(f"WORLD_SIZE differs: {parted(sizes)}")
    names = {name for each in everybody for name in each.variables}
    for name in sorted(names):
        values = grouped(everybody, partial(_entry, "variables", name, "not set"))
        if len(values) > 1:
            yield warning(f"{name} differs: {parted(values)}")


def _versions(everybody: Sequence[Facts]) -> Iterator[Finding]:
    for name in everybody[0].versions:
        found = grouped(everybody, partial(_entry, "versions", name, "none"))
        if len(found) > 1:
            minor = {version.rpartition(".")[0] for version in found}
            strict = name in STRICT or (name == "python" and len(minor) > 1)
            words = f"{name} differs: {parted(found)}: install the same everywhere"
            yield failure(words) if strict else warning(words)


def _entry(field: str, name: str, missing: str, each: Facts) -> str:
    return str(getattr(each, field).get(name, missing))


def _addresses(everybody: Sequence[Facts]) -> Iterator[Finding]:
    there = hosts(everybody)
    by_rank = {each.rank: each for each in everybody}
    several = len({each.network for each in everybody}) > 1
    for host in there:
        own = by_rank[host.head]
        if own.error:
            yield failure(f"{host}: {own.error}")
        elif several and loops(own.address):
            yield failure(f"{host}: {_unheard(own)}: {_instead(own)}")
        here = [by_rank[rank] for rank in host.ranks]
        addresses = grouped(here, lambda each: each.address)
        if len(addresses) > 1:
            words = f"{host}: its ranks use different addresses: {parted(addresses)}"
            yield warning(words)
    heads = [by_rank[host.head] for host in there if not by_rank[host.head].error]
    for address, own_heads in grouped(heads, lambda each: each.address).items():
        places = {each.network for each in own_heads}
        if len(places) > 1 and not loops(address):
            names = ", ".join(f"host of rank {each.rank}" for each in own_heads)
            yield failure(
                f"{address} ({own_heads[0].interface}) is the address of several hosts "
                f"({names}): {_instead(own_heads[0])}"
            )


def _unheard(own: Facts) -> str:
    return f"Gloo listens at {own.address} ({own.why}), where no other host gets to"


def _instead(own: Facts) -> str:
    """Another interface to name, with its address."""
    others = outward(own.interfaces)
    others.pop(own.interface, None)
    named = " or ".join(f"{name} ({at})" for name, at in sorted(others.items()))
    none = "the interface that leads to the others (this host seems to have none)"
    return f"export {VARIABLE}={named or none}"


def _exposed(everybody: Sequence[Facts]) -> Iterator[Finding]:
    """What anybody may reach, where an address is of no private network.

    The store listens at all addresses of its host: that of rank 0, as launchers do it.
    """
    there = hosts(everybody)
    by_rank = {each.rank: each for each in everybody}
    first = by_rank[there[0].head]
    if first.public:
        at = ", ".join(f"{at} ({name})" for at, name in sorted(first.public.items()))
        yield warning(
            f"torch's store listens at every address of {there[0]}, also at {at}, "
            "of no private network: whoever reaches it there can read and write what "
            "ranks tell each other, and so end the run or join it. Let a firewall pass "
            f"the job's hosts alone; {VARIABLE} does not change where it listens"
        )
    heads = [by_rank[host.head] for host in there]
    open_to_all = [own for own in heads if own.address in own.public]
    if open_to_all:
        own = open_to_all[0]
        at = ", ".join(f"{each.address} ({each.interface})" for each in open_to_all)
        yield warning(
            f"ranks listen at {at}, of no private network: gradtide's own port sends "
            "away who does not know the job's word, but Gloo's takes everybody in, so "
            f"that enough of them end a rank. {WHOEVER}, and {_inward(own)}"
        )


def _inward(own: Facts) -> str:
    """An interface to name that leads to a private network."""
    others = {n: at for n, at in own.interfaces.items() if at not in own.public}
    named = " or ".join(f"{n} ({at})" for n, at in sorted(outward(others).items()))
    return f"export {VARIABLE}={named or 'that of the tunnel (wg0)'}"


def _backends(everybody: Sequence[Facts]) -> Iterator[Finding]:
    backends = grouped(everybody, lambda each: each.backend)
    if len(backends) > 1:
        yield failure(
            f"some ranks see GPUs and some do not: {parted(backends)}: name a backend "
            "in init_process_group(), or mend the drivers"
        )
    for host in hosts(everybody):
        gpus = min(each.gpus for each in everybody if each.rank in host.ranks)
        if 0 < gpus < len(host.ranks):
            yield warning(f"{host}: {len(host.ranks)} ranks share {gpus} GPUs")


def _layout(everybody: Sequence[Facts]) -> Iterator[Finding]:
    there = hosts(everybody)
    if len({len(host.ranks) for host in there}) > 1:
        words = "; ".join(f"{host}: {ranks_of(host.ranks)}" for host in there)
        yield warning(
            f"hosts have unlike numbers of ranks ({words}): the link of one that has "
            "more carries more than it must. Start equally many on each"
        )
    for each in everybody:
        own = next(host for host in there if each.rank in host.ranks)
        if each.local_size not in (None, len(own.ranks)):
            yield warning(
                f"LOCAL_WORLD_SIZE is {each.local_size} on rank {each.rank}, but "
                f"{own} has {len(own.ranks)} ranks"
            )
            return


def _limits(everybody: Sequence[Facts]) -> Iterator[Finding]:
    few = [
        e for e in everybody if e.files is not None and e.files < FILES + EACH * e.size
    ]
    if few:
        yield failure(
            f"rank {few[0].rank} may open {few[0].files} files, too few for "
            f"connections to each of {few[0].size} ranks: ulimit -n 65536"
        )
    small = [e for e in everybody if e.shared is not None and e.shared < SMALL]
    if small:
        yield warning(
            f"rank {small[0].rank} has {small[0].shared / 1e6:.0f} MB of {SHARED}: "  # type: ignore[operator]
            "DataLoader workers may die of a bus error (docker run --shm-size 8g; "
            "in Kubernetes, an emptyDir with medium: Memory)"
        )


def _threads(everybody: Sequence[Facts]) -> Iterator[Finding]:
    for own in grouped(everybody, lambda each: each.machine).values():
        threads, cores = sum(each.threads for each in own), max(e.cores for e in own)
        if threads > max(cores, len(own)):
            per = max(cores // len(own), 1)
            yield warning(
                f"{len(own)} ranks on the machine of rank {own[0].rank} compute with "
                f"{threads} threads on {cores} cores: export OMP_NUM_THREADS={per}"
            )
            return


def reached(
    there: Sequence[Host], heard: Mapping[int, Mapping[int, Heard]]
) -> list[Finding]:
    """Who does not reach whom, and clocks; `heard` by who asked, and whom."""
    own = {rank: host for host in there for rank in host.ranks}
    found, ahead = [], {}
    for asker, answers in sorted(heard.items()):
        for other, told in sorted(answers.items()):
            if told.error:
                ends = [f"rank {rank} on {own[rank]}" for rank in (asker, other)]
                words = f"{' does not reach '.join(ends)}: {told.error}"
                found.append(failure(words))
            elif other == there[0].head and own[asker] is not there[0]:
                ahead[own[asker].number] = -told.clock
    number, off = max(ahead.items(), key=lambda item: abs(item[1]), default=(0, 0.0))
    if abs(off) > LATE:
        words = f"the clock of {there[number]} is {off:+.1f} s off that of host 0"
        found.append(warning(f"{words}: training does not mind, but logs and TLS do"))
    return found


def ungoverned(
    everybody: Sequence[Facts],
    there: Sequence[Host],
    round_trips: Mapping[tuple[int, int], float],
) -> list[Finding]:
    """Far hosts whose ranks may not have BBR; round trips by numbers of hosts."""
    without = [own for own in everybody if not own.governed]
    pair = max(round_trips, key=lambda pair: round_trips[pair], default=(0, 0))
    if not without or round_trips.get(pair, 0.0) <= 2 * FAR:
        return []
    one, other = (str(there[number]) for number in pair)
    return [
        warning(
            f"from {one} to {other} and back takes {1e3 * round_trips[pair]:.0f} ms, "
            f"and rank {without[0].rank} may not have BBR: a packet that is lost slows "
            "its connection for long, so that there are several to each rank. Better, "
            "on every host: modprobe tcp_bbr, and sysctl -w "
            'net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
        )
    ]


def slow(
    there: Sequence[Host], rates: Mapping[tuple[int, int], float]
) -> list[Finding]:
    """Links that are much slower than the typical one; rates by numbers of hosts."""
    if len(rates) < 3:
        return []
    typical = sorted(rates.values())[len(rates) // 2]
    worst = min(rates, key=lambda pair: rates[pair])
    if rates[worst] >= SLOW * typical:
        return []
    sender, receiver = (str(there[number]) for number in worst)
    return [
        warning(
            f"from {sender} to {receiver} data takes {typical / rates[worst]:.1f} "
            "times as long as on the typical link: all ranks wait for the slowest"
        )
    ]
