"""What a planner knows of a network: numbers, measured or imagined.

Knows nothing of how they were measured, nor of what they are used for (`cost`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradtide.plan.device import TYPICAL as TYPICAL
from gradtide.plan.device import Device as Device
from gradtide.plan.device import Line as Line
from gradtide.plan.device import seconds
from gradtide.plan.document import Document

DOCUMENT = Document(
    "network", "gradtide network profile", 1, "gradtide profile network"
)
ONE_HOP_BYTES, ONE_HOP_RANKS = 1 << 17, 32  # as gradtide.transport.gloo has them
SMALL_BYTES = 1 << 14


@dataclass(frozen=True)
class Rate:
    """Seconds of a request of one kind over one link: alpha + beta * bytes a message.

    `alpha` is seconds of the start of a message, `beta` seconds per byte. Both may come
    from a fit; `residual` is then the root mean square of its relative errors.
    `processor` is what a rank's processor works meanwhile: a message, and a byte.
    """

    alpha: float = 0.0
    beta: float = 0.0
    residual: float = 0.0
    processor: Line = Line()  # noqa: RUF009  (frozen: not shared by mistake)

    def __post_init__(self) -> None:
        if isinstance(self.processor, Mapping):  # as it comes from a file
            object.__setattr__(self, "processor", Line(**self.processor))
        for name in ("alpha", "beta", "residual"):
            seconds(f"Rate({name}=...)", getattr(self, name))


@dataclass(frozen=True)
class Link:
    """One kind of link: how long each kind of request takes over it.

    `ring`: the P - 1 messages in a row of a reduce-scatter or an all-gather. `direct`:
    messages to everybody at once, one after the other on the wire. `swap`: a message
    between two. `broadcast`: a round of a binomial tree.
    """

    ring: Rate
    direct: Rate
    swap: Rate
    broadcast: Rate

    @staticmethod
    def of(alpha: float, beta: float) -> Link:
        """A link that treats all kinds of requests alike."""
        rate = Rate(alpha, beta)
        return Link(rate, rate, rate, rate)

    def charged(self) -> Link:
        """A link on which requests take what they cost a processor."""
        lines = ((f.name, getattr(self, f.name).processor) for f in fields(self))
        return Link(**{name: Rate(line.call, line.each) for name, line in lines})

    def stretched(self, factor: float) -> Link:
        """The same link with `factor` times the seconds per byte."""
        rates = ((f.name, getattr(self, f.name)) for f in fields(self))
        return Link(**{n: replace(r, beta=r.beta * factor) for n, r in rates})


@dataclass(frozen=True)
class Network:
    """`hosts` with `ranks_per_host` ranks each, behind one network card a host.

    `inter` is the link of a host, `intra` joins the ranks of one host (None: as fast
    as memory, free). Ranks are numbered host by host. `rate` is the nominal rate of
    `inter` in bits/s, if known. Parts of up to `one_hop_bytes` among up to
    `one_hop_ranks` ranks travel directly instead of around a ring, and all-reduces of
    up to `small_bytes`: gradtide's transport over Gloo (0 ranks: never).

    `interference` is the factor by which compute slows while the lane is busy, and
    `contention` that by which a request slows while another lane's is on the wire.
    `sharing` is the factor by which the lane's own work and that of the training thread
    slow each other: 1 where each has a processor, 2 where ranks have one or less.
    `spread` is by which share of the work before it a request is answered later: ranks
    that share processors finish one after the other.

    `processors` is how many a rank has for itself, less than 1 where ranks share them
    (None: enough). Ranks that have too few keep them busy for a share `occupancy` of
    the time, and wait for each other for the rest.
    """

    hosts: int
    ranks_per_host: int
    inter: Link
    intra: Link | None = None
    device: Device = Device()  # noqa: RUF009  (frozen: not shared by mistake)
    interference: float = 1.0
    contention: float = 2.0
    sharing: float = 1.0
    spread: float = 0.0
    processors: float | None = None
    occupancy: float = 1.0
    rate: float | None = None
    one_hop_bytes: int = ONE_HOP_BYTES
    one_hop_ranks: int = ONE_HOP_RANKS
    small_bytes: int = SMALL_BYTES

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise ValueError(
                f"{self.hosts} hosts x {self.ranks_per_host} ranks: both are 1 or more"
            )
        for name in ("interference", "contention"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 1):
                raise ValueError(f"{name}={value!r}: a factor, 1 (none) or more")
        if not 1 <= self.sharing <= 2:
            raise ValueError(f"sharing={self.sharing!r}: a factor from 1 (none) to 2")
        if self.processors is not None and not 0 < self.processors < math.inf:
            raise ValueError(f"processors={self.processors!r}: above 0, or None")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread={self.spread!r}: a share, from 0 to 1")
        if not 0 < self.occupancy <= 1:
            raise ValueError(f"occupancy={self.occupancy!r}: a share, above 0 to 1")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def share(self) -> float:
        """Of a processor, what a rank has while all ranks work."""
        return 1.0 if self.processors is None else min(self.processors, 1.0)

    def occupied(self, seconds: float) -> float:
        """How long ranks keep their processors busy that work for `seconds` each."""
        if self.processors is None:
            return 0.0
        return seconds / self.processors / self.occupancy

    def charged(self) -> Network:
        """The same network, on which requests take what they cost a processor."""
        intra = self.intra
        return replace(
            self,
            inter=self.inter.charged(),
            intra=None if intra is None else intra.charged(),
        )

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
        if not (math.isfinite(bits_per_second) and bits_per_second > 0):
            raise ValueError(f"{bits_per_second!r} bits/s: a rate is above 0")
        return Network(
            hosts,
            ranks_per_host,
            Link.of(alpha, 8 / bits_per_second),
            Link.of(alpha / 10, 0.0),
            device=device,
            rate=bits_per_second,
        )

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
        inter = self.inter
        if rate is not None:
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{rate!r} bits/s: a rate is above 0")
            if self.rate is None and inter.ring.beta == 0:
                raise ValueError("this network's rings are free: no rate to scale")
            factor = (self.rate or 8 / (inter.ring.beta or 1.0)) / rate
            inter = inter.stretched(factor)
        return replace(
            self,
            hosts=self.hosts if hosts is None else hosts,
            ranks_per_host=(
                self.ranks_per_host if ranks_per_host is None else ranks_per_host
            ),
            inter=inter,
            rate=self.rate if rate is None else rate,
        )

    def save(self, path: Path) -> None:
        """Write JSON."""
        DOCUMENT.save(path, asdict(self))


def load(path: Path) -> Network:
    """The network that `Network.save` wrote; `ValueError` says what is wrong."""
    found = DOCUMENT.read(path)
    found.pop("skew", None)  # seconds after any work, in files of earlier versions
    try:
        device = dict(found.pop("device"))
        device["select"] = {
            name: Line(**line) for name, line in device["select"].items()
        }
        for name in ("take_in", "scatter", "sort", "optimizer"):
            device[name] = Line(**device[name])
        intra = found.pop("intra")
        return Network(
            inter=_link(found.pop("inter")),
            intra=None if intra is None else _link(intra),
            device=Device(**device),
            **found,
        )
    except (KeyError, TypeError, AttributeError) as error:
        remedy = DOCUMENT.remedy(path)
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _link(found: Mapping[str, Any]) -> Link:
    return Link(**{kind: Rate(**rate) for kind, rate in found.items()})
