"""What commands have in common: options, where ranks are, and how errors are told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Annotated, NamedTuple, TypeVar

from typer import Exit, Option, echo

from gradtide.lab.amounts import parse_share, parse_time
from gradtide.lab.atlas import read, read_events
from gradtide.lab.cluster import LabError
from gradtide.lab.internet import Internet, Link, Path
from gradtide.lab.place import Place, place
from gradtide.lab.rate import limited, parse_rate

Hosts = Annotated[int | None, Option(help="Emulated hosts. Not under torchrun.")]
RanksPerHost = Annotated[int, Option(help="Ranks on each host.")]
LocalRate = Annotated[
    str | None, Option(help="Of what a host's ranks send each other, together.")
]
Up = Annotated[
    str | None, Option(help="Of what each host sends; else as --rate: 20mbit.")
]
Delay = Annotated[
    str | None, Option(help="Of a round trip between any two hosts: 40ms.")
]
Jitter = Annotated[
    str | None, Option(help="By how much a round trip varies, at most: 5ms.")
]
Timetable = Annotated[
    str | None, Option("--events", help="File of what happens to links and ranks.")
]
FromFile = Annotated[
    str | None,
    Option(
        "--internet",
        help="File of hosts that differ, or transatlantic, home; for all of these.",
    ),
]
Stragglers = Annotated[
    str | None,
    Option(help="Of a step, by how much its time varies among ranks (deviation): 10%."),
]
Loss = Annotated[
    str | None, Option(help="Share of packets that is lost on each way: 0.5%.")
]
Warmup = Annotated[int, Option(help="Steps before the first timed one.")]
Device = Annotated[str, Option(help="Where tensors are: cpu or cuda.")]
Processor = Annotated[
    str | None,
    Option(
        "--device",
        help="Whose times to assume: cpu, t4, l4, v100, a100, h100, h200, 3090, 4090.",
    ),
]
StepMs = Annotated[
    float | None, Option(help="Milliseconds of compute of a step; for a replay.")
]
Times = Annotated[
    File | None, Option(help="JSON with the times of layers; for a replay.")
]

ELSE = "--rate none: loopback; --internet FILE: hosts that differ"

N = TypeVar("N", bound=float)


def examples(*lines: str) -> str:
    """The end of a command's help: lines to copy, each of which fits a terminal."""
    return "\n\n".join(["Examples:", *lines])


@contextmanager
def told() -> Iterator[None]:
    """What a user can put right is told in a line, without a traceback."""
    try:
        yield
    except (ValueError, LabError) as error:
        echo(f"error: {error}", err=True)
        raise Exit(1 if isinstance(error, LabError) else 2) from None


def numbers(option: str, text: str, kind: Callable[[str], N], example: str) -> list[N]:
    """What an option gives with commas between. Raises ValueError."""
    remedy = f"write numbers with commas between, such as {example}"
    try:
        text.encode("ascii")  # numbers may be written with the digits of any script
        found = [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: {remedy}") from None
    if not all(-math.inf < number < math.inf for number in found):
        raise ValueError(f"{option} {text!r} has one that is not finite: {remedy}")
    return found


def torchrun() -> Place | None:
    """Where this process is among torchrun's; None where torchrun has not started it.

    Raises ValueError where RANK is set, and the rest is not as torchrun sets it.
    """
    if "RANK" not in os.environ:
        return None
    remedy = "start this command with torchrun, or unset RANK"
    found = place({"LOCAL_WORLD_SIZE": "1", **os.environ}, remedy)
    if found is not None and (not found.local_size or found.size % found.local_size):
        words = f"WORLD_SIZE={found.size} and LOCAL_WORLD_SIZE={found.local_size}"
        raise ValueError(f"{words} do not fit together: {remedy}")
    return found


def local_bits(rate: str | None) -> float | None:
    """Bits/s inside hosts. Raises ValueError where torchrun has started this."""
    if rate is not None and "RANK" in os.environ:
        raise ValueError(
            "torchrun has started this on real hosts: leave out --local-rate"
        )
    return None if rate is None else parse_rate(rate)


@dataclass(frozen=True)
class Far:
    """What is said of what lies between hosts, as it was typed."""

    up: str | None = None
    delay: str | None = None
    jitter: str | None = None
    loss: str | None = None
    internet: str | None = None
    events: str | None = None

    @property
    def said(self) -> list[str]:
        """The options that were given."""
        return [f"--{name}" for name, value in vars(self).items() if value is not None]

    def between(self, hosts: int, rate: float | None) -> Internet | None:
        """What lies between so many hosts with such links; None: a switch.

        Raises ValueError for what cannot be emulated.
        """
        if not self.said:
            return None
        if rate is None:
            need = (
                f"{self.said[0]} needs links with a limit: give --rate, such as 1gbit"
            )
            raise ValueError(need)
        path = Path(
            parse_time("--delay", self.delay or "0ms"),
            parse_time("--jitter", self.jitter or "0ms"),
            parse_share("--loss", self.loss or "0%"),
        )
        up = None
        if self.up is not None:
            up = limited(self.up, "--up none: a link has a limit, such as 20mbit")
        return self.with_events(Internet.alike(hosts, Link(rate, up), path))

    def with_events(self, found: Internet) -> Internet:
        """With what happens besides what the file of the internet says."""
        if self.events is None:
            return found
        if found.events:
            raise ValueError("--events: the file of --internet has events already")
        return replace(found, events=read_events(self.events, found.links))


class Layout(NamedTuple):
    """Hosts, ranks on each, bits/s of the slowest link, and what lies between hosts."""

    hosts: int
    ranks_per_host: int
    rate: float | None
    internet: Internet | None = None


def layout(
    hosts: int | None,
    ranks_per_host: int,
    rate: str | None,
    far: Far,
    example: str,
) -> Layout:
    """As asked, or as torchrun has it. Raises ValueError for what does not fit."""
    there = torchrun()
    if there is not None:
        if far.said:
            raise ValueError(
                "torchrun has started this on real hosts: leave out "
                + " and ".join(far.said)
            )
        local = there.local_size or 1
        bits = None if rate is None else parse_rate(rate)
        return Layout(there.size // local, local, bits)
    remedy = (
        f"{example} emulates a cluster ({ELSE}); or start this command with torchrun"
    )
    return asked(hosts, ranks_per_host, rate, far, remedy)


def asked(
    hosts: int | None, ranks_per_host: int, rate: str | None, far: Far, remedy: str
) -> Layout:
    """As asked. Raises ValueError for what does not fit, `remedy` for too little."""
    if far.internet is not None:
        return _from_file(hosts, ranks_per_host, rate, far)
    if hosts is None or rate is None:
        raise ValueError(remedy)
    bits = parse_rate(rate)
    between = far.between(hosts, bits)
    slowest = bits if between is None else between.slowest
    return Layout(hosts, ranks_per_host, slowest, between)


def planned(
    ranks: int | None,
    ranks_per_host: int,
    rate: str | None,
    far: Far,
) -> tuple[int | None, float | None, float, float]:
    """For a planner: ranks, and of links the least rate, longest way and most loss.

    Those are bits/s, seconds of a round trip, and a share of packets.

    All ranks send as much as they receive, so a link is as slow as its slower way.
    Raises ValueError for what has no plan.
    """
    up, internet = far.up, far.internet
    if internet is None:
        bits = None
        if rate is not None:
            bits = limited(rate, f"--rate {rate}: a link without a limit has no plan")
        if up is not None:
            if bits is None:
                raise ValueError(f"--up {up}: say --rate, too, of what hosts receive")
            bits = min(bits, limited(up, f"--up {up}: a link has a limit"))
        delay = parse_time("--delay", far.delay or "0ms")
        loss = parse_share("--loss", far.loss or "0%")
        if loss == 1:
            raise ValueError(f"--loss {far.loss}: nothing arrives, and takes for ever")
        return ranks, bits, delay, loss
    given = {"--rate": rate, "--up": up, "--ranks": ranks, "--delay": far.delay}
    given["--loss"] = far.loss
    if twice := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"--internet {internet} says what links are like: leave out "
            + " and ".join(twice)
        )
    found = read(internet)
    paths = found.paths().values()
    longest = max((path.delay for path in paths), default=0.0)
    most = max((path.loss for path in paths), default=0.0)
    return len(found.links) * ranks_per_host, found.slowest, longest, most


def _from_file(
    hosts: int | None, ranks_per_host: int, rate: str | None, far: Far
) -> Layout:
    assert far.internet is not None
    also = [name for name in far.said if name not in ("--internet", "--events")]
    also = [*(["--rate"] if rate is not None else []), *also]
    if also:
        raise ValueError(
            f"--internet {far.internet} says what links are like: leave out "
            + " and ".join(also)
        )
    found = far.with_events(read(far.internet))
    if hosts is not None and hosts != len(found.links):
        raise ValueError(
            f"--internet {far.internet} has {len(found.links)} hosts: leave out "
            f"--hosts {hosts}, or change the file"
        )
    return Layout(len(found.links), ranks_per_host, found.slowest, found)
