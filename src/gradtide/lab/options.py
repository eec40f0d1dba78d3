"""What commands have in common: options, where ranks are, and how errors are told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as File
from typing import Annotated, TypeVar

from typer import Exit, Option, echo

from gradtide.lab.amounts import parse_share, parse_time
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
Loss = Annotated[
    str | None, Option(help="Share of packets that is lost on each way: 0.5%.")
]
Warmup = Annotated[int, Option(help="Steps before the first timed one.")]
Device = Annotated[str, Option(help="Where tensors are: cpu or cuda.")]
StepMs = Annotated[
    float | None, Option(help="Milliseconds of compute of a step; for a replay.")
]
Times = Annotated[
    File | None, Option(help="JSON with the times of layers; for a replay.")
]

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


def internet(
    hosts: int,
    rate: float | None,
    up: str | None,
    delay: str | None,
    jitter: str | None,
    loss: str | None,
) -> Internet | None:
    """What lies between `hosts`; None where nothing is said of it, and it is a switch.

    Raises ValueError for what cannot be emulated.
    """
    given = {"--up": up, "--delay": delay, "--jitter": jitter, "--loss": loss}
    said = [name for name, value in given.items() if value is not None]
    if not said:
        return None
    if "RANK" in os.environ:
        raise ValueError(
            f"torchrun has started this on real hosts: leave out {' and '.join(said)}"
        )
    none = f"{said[0]} needs links with a limit: give --rate, such as 1gbit"
    if rate is None:
        raise ValueError(none)
    path = Path(
        parse_time("--delay", delay or "0ms"),
        parse_time("--jitter", jitter or "0ms"),
        parse_share("--loss", loss or "0%"),
    )
    sends = None if up is None else limited(up, none.replace("--rate", "--up"))
    return Internet.alike(hosts, Link(rate, sends), path)


def layout(
    hosts: int | None, ranks_per_host: int, rate: str | None, example: str
) -> tuple[int, int, float | None]:
    """Hosts, ranks on each, and bits/s: as asked, or as torchrun has them."""
    bits = None if rate is None else parse_rate(rate)
    there = torchrun()
    if there is not None:
        local = there.local_size or 1
        return there.size // local, local, bits
    if hosts is None or rate is None:
        raise ValueError(
            f"{example} emulates a cluster (--rate none: loopback); or start this "
            "command with torchrun"
        )
    return hosts, ranks_per_host, bits
