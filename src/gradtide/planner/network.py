"""What a planner knows of a network: numbers, measured or imagined.

Knows nothing of how they were measured, nor of what they are used for (`cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist
from typing import Any

from gradtide.core.levels import rows
from gradtide.planner.data.device import TYPICAL as TYPICAL
from gradtide.planner.data.device import Device as Device
from gradtide.planner.data.device import Line as Line
from gradtide.planner.data.device import seconds
from gradtide.planner.data.document import Document, decode
from gradtide.planner.data.presets import Preset
from gradtide.transport.distance import Distance
from gradtide.transport.gloo import FEW, HOP, SMALL

DOCUMENT = Document("network", "gradtide network profile")
PACKET = 1448  # bytes of a message in each, on Ethernet
MOST = 1 << 17  # ranks: more take longer to simulate than to wait for
# What a file has to say of a device; the rest may be of later versions.
FIRST = ("take_in", "select", "scatter", "sort", "optimizer")
# Of numbers that are no times: whether one fits, and in words what does.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "interference": (lambda x: 1 <= x < math.inf, "a factor, 1 (none) or more"),
    "starved": (lambda x: 1 <= x < math.inf, "a factor, 1 (none) or more"),
    "sharing": (lambda x: 1 <= x <= 2, "a factor from 1 (none) to 2"),
    "processors": (lambda x: x is None or 0 < x < math.inf, "above 0, or None"),
    "spread": (lambda x: 0 <= x <= 1, "a share, from 0 to 1"),
    "occupancy": (lambda x: 0 < x <= 1, "a share, above 0 to 1"),
    "delay": (lambda x: 0 <= x < math.inf, "seconds, 0 or more"),
    "loss": (lambda x: 0 <= x < 1, "a share, from 0 to below 1"),
    "stragglers": (lambda x: 0 <= x < math.inf, "a share of a step, 0 or more"),
    "rate": (lambda x: x is None or 0 < x < math.inf, "bits/s, above 0, or None"),
}


@dataclass(frozen=True)
class Rate:
    """Seconds of a request of one kind over one link: alpha + beta * bytes a message.

    Both may come from a fit.
    """

    alpha: float = 0.0  # seconds of the start of a message
    beta: float = 0.0  # seconds per byte
    residual: float = 0.0  # root mean square of the fit's relative errors
    # What a rank's processor works meanwhile: for a message, and for a byte.
    processor: Line = Line()  # noqa: RUF009  (frozen: not shared by mistake)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "residual"):
            seconds(f"Rate({name}=...)", getattr(self, name))

    def __call__(self, nbytes: float, starts: float = 1) -> float:
        """Seconds of so many messages with so many bytes in all."""
        return self.alpha * starts + self.beta * nbytes


@dataclass(frozen=True)
class Link:
    """One kind of link: how long each kind of request takes over it."""

    ring: Rate  # the P - 1 messages in a row of a reduce-scatter or an all-gather
    direct: Rate  # messages to everybody at once, one after the other on the wire
    swap: Rate  # a message between two
    broadcast: Rate  # a round of a binomial tree

    @staticmethod
    def of(alpha: float, beta: float) -> Link:
        """A link that treats all kinds of requests alike."""
        rate = Rate(alpha, beta)
        return Link(rate, rate, rate, rate)

    def charged(self) -> Link:
        """A link on which requests take what they cost a processor."""
        return self._each(lambda r: Rate(r.processor.call, r.processor.each))

    def stretched(self, factor: float) -> Link:
        """The same link with `factor` times the seconds per byte."""
        return self._each(lambda r: replace(r, beta=r.beta * factor))

    def _each(self, change: Callable[[Rate], Rate]) -> Link:
        return Link(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Network:
    """`hosts` with `ranks_per_host` ranks each, behind one network card a host.

    Ranks are numbered host by host. Those that share processors finish one after the
    other; those that have too few keep them busy for a share of the time (`occupancy`),
    and wait for each other for the rest.
    """

    hosts: int
    ranks_per_host: int
    inter: Link  # of a host
    intra: Link | None = None  # among the ranks of one host; None: free, as memory is
    device: Device = Device()  # noqa: RUF009  (frozen: not shared by mistake)
    # Factors by which something slows: compute while the queue is busy, bytes inside
    # hosts while ranks compute, the queue's own work and the training thread's (1 where
    # each has a processor, 2 where ranks have one or less).
    interference: float = 1.0
    starved: float = 1.0
    sharing: float = 1.0
    spread: float = 0.0  # of the work before it: by so much a request is answered later
    processors: float | None = None  # for each rank alone; None: enough
    occupancy: float = 1.0
    rate: float | None = None  # bits/s: nominal, of `inter`
    delay: float = 0.0  # seconds one way: of what a message takes to another host
    loss: float = 0.0  # share of packets between hosts that are sent again
    stragglers: float = 0.0  # by how much steps vary among ranks, see `slowest`
    # As gradtide's transport over Gloo has them: parts of so many bytes and less, among
    # so many ranks (0: never), travel directly, and so do all-reduces that are small.
    one_hop_bytes: int = HOP
    one_hop_ranks: int = FEW
    small_bytes: int = SMALL

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(
                f"{self.hosts} hosts x {self.ranks_per_host} ranks: both are 1 or more"
            )
        for name, (fits, expected) in LIMITS.items():
            if not fits(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r}: {expected}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def words(self) -> str:
        """How many ranks where, for people."""
        told = f"{self.hosts} hosts x {self.ranks_per_host} ranks"
        if self.stragglers:
            told += f", whose steps vary by {100 * self.stragglers:.3g} %"
        if self.loss:
            told += f", with links that lose {100 * self.loss:.3g} % of packets"
        return told

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host."""
        return rows(self.size, self.ranks_per_host)

    @property
    def distance(self) -> Distance:
        """How far apart ranks of different hosts are."""
        return Distance(self.delay, self.delay)

    @property
    def share(self) -> float:
        """Of a processor, what a rank has while all ranks work."""
        return 1.0 if self.processors is None else min(self.processors, 1.0)

    def slowest(self, steps: int = 1) -> float:
        """How many times as long as usual the last of the ranks computes.

        Ranks wait for each other after so many `steps`. What each step takes has a
        standard deviation of `stragglers` times its mean, and does not depend on the
        step before. The last of P normal ones is late by their expected largest (Blom,
        1958), and in rounds of many steps quick ones make up for slow ones.
        """
        if not self.stragglers:
            return 1.0
        largest = NormalDist().inv_cdf((self.size - 0.375) / (self.size + 0.25))
        return 1 + self.stragglers * largest / math.sqrt(steps)

    def occupied(self, seconds: float) -> float:
        """How long ranks keep their processors busy that work for `seconds` each."""
        if self.processors is None:
            return 0.0
        return seconds / self.processors / self.occupancy

    def computing(self) -> Network:
        """The same network while its ranks compute."""
        if self.starved == 1.0 or self.intra is None:
            return self
        return replace(self, intra=self.intra.stretched(self.starved))

    def charged(self) -> Network:
        """The same network, on which requests take what they cost a processor."""
        intra = self.intra and self.intra.charged()
        return replace(self, inter=self.inter.charged(), intra=intra, loss=0.0)

    @staticmethod
    def ideal(
        hosts: int,
        ranks_per_host: int,
        bits_per_second: float,
        *,
        alpha: float = 5e-5,
        device: Device = TYPICAL,
    ) -> Network:
        """A network at its nominal rate, with `alpha` seconds for each message.

        Within a host a message takes a tenth of `alpha`, and its bytes no time.
        """
        if not 0 < bits_per_second < math.inf:
            raise ValueError(f"{bits_per_second!r} bits/s: a rate is above 0")
        inter, intra = Link.of(alpha, 8 / bits_per_second), Link.of(alpha / 10, 0.0)
        place = hosts, ranks_per_host, inter, intra
        return Network(*place, device=device, rate=bits_per_second)

    def scaled(
        self,
        *,
        hosts: int | None = None,
        ranks_per_host: int | None = None,
        rate: float | None = None,
    ) -> Network:
        """What if: more hosts, more ranks on each, or hosts' links of another rate.

        `rate` is bits/s; seconds per byte change in proportion to the nominal rate, or
        where that is not known so that rings run at `rate`.
        """
        asked = {"hosts": hosts, "ranks_per_host": ranks_per_host, "rate": rate}
        given: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
        there = replace(self, **given)
        if rate is None:
            return there
        ring = self.inter.ring
        if self.rate is None and ring.beta == 0:
            raise ValueError("this network's rings are free: no rate to scale")
        factor = (self.rate or 8 / (ring.beta or 1.0)) / rate
        return replace(there, inter=self.inter.stretched(factor))

    def delayed(self, round_trip: float) -> Network:
        """What if: hosts so many seconds of a round trip further from each other.

        Every message is on its way for half of it, and those that a host sends at once
        are on it together. How connections get up to their rate is not in it.
        """
        seconds("a delay", round_trip)
        way, others = round_trip / 2, (self.hosts - 1) * self.ranks_per_host
        if not others:
            return self
        inter = self.inter._each(lambda r: replace(r, alpha=r.alpha + way))
        direct = self.inter.direct
        together = replace(direct, alpha=direct.alpha + way / others)
        inter = replace(inter, direct=together)
        return replace(self, inter=inter, delay=self.delay + way)

    def lossy(self, share: float) -> Network:
        """What if: links that lose such a share of their packets, which are sent again.

        That holds for connections that do not slow down for it, as with BBR, or for
        several of them. See `resent` for what is late.
        """
        there = replace(self, loss=share)
        inter = self.inter.stretched(1 / (1 - share))
        rate = self.rate or 8 / max(self.inter.ring.beta, 1e-15)
        return replace(there, inter=inter, rate=rate)

    def resent(self, nbytes: float) -> float:
        """How much later than without loss a message to another host is whole.

        What is lost is known, and here, a round trip after it was sent. That is late if
        nothing else was left to send meanwhile: if one of the last packets is lost, as
        many as a link has on their way.
        """
        if not (self.loss and self.rate):
            return 0.0
        round_trip = 2 * self.delay
        last = min(nbytes, self.rate / 8 * round_trip) / PACKET
        return round_trip * float(1 - (1 - self.loss) ** last)

    def on(self, processor: Preset) -> Network:
        """What if: ranks with such processors."""
        return replace(
            self,
            device=processor.device,
            interference=processor.slowed,
            starved=processor.starved,
        )

    def save(self, path: Path) -> None:
        """Write JSON."""
        DOCUMENT.save(path, self)


def imagine(
    measured: Network | None,
    ranks: int | None,
    ranks_per_host: int | None,
    rate: float | None,
    delay: float = 0.0,
    loss: float = 0.0,
) -> Network:
    """`measured` (None: an ideal one) with other ranks or links; `rate` in bits/s.

    Round trips between hosts take `delay` seconds more, and such a share of packets is
    lost on the way.

    Hosts hold as many ranks as in the measured network (one, if there is none) unless
    `ranks_per_host` says otherwise. Raises ValueError where something has to be said.
    """
    if measured is None:
        if rate is None or ranks is None:
            raise ValueError(
                "say for which network: --network FILE (made by `gradtide profile "
                "network`), or --ranks 32 --rate 10gbit for one as it should be"
            )
        measured = Network.ideal(1, 1, rate)
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"--ranks-per-host {ranks_per_host}: 1 or more")
    per_host = ranks_per_host or measured.ranks_per_host
    ranks = measured.hosts * per_host if ranks is None else ranks
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: one rank has nobody to average with")
    if ranks % per_host:
        raise ValueError(
            f"--ranks {ranks} on hosts of {per_host}: choose a multiple, or say "
            "--ranks-per-host"
        )
    hosts = ranks // per_host
    there = measured.scaled(hosts=hosts, ranks_per_host=per_host, rate=rate)
    there = there.delayed(delay)
    return there.lossy(loss) if loss else there


def load(path: Path) -> Network:
    """The network that `Network.save` wrote; `ValueError` says what is wrong."""
    found = DOCUMENT.read(path)
    for name in ("skew", "contention"):  # in files of earlier versions
        found.pop(name, None)
    try:
        itemgetter("intra", "device")(found)
        itemgetter(*FIRST)(found["device"])
        return decode(Network, found)
    except (KeyError, TypeError, AttributeError) as error:
        remedy = DOCUMENT.remedy(path)
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
