"""The commands of `gradtide lab`: options, signals and exit codes."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from typer import Argument, Option

from gradtide.lab import options
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.launch import launch
from gradtide.lab.options import LocalRate, RanksPerHost, examples, told
from gradtide.lab.probe import pairs, survey, table
from gradtide.lab.probe import probe as measure

app = typer.Typer(
    help="A slow cluster, emulated on this machine.", no_args_is_help=True
)

Hosts = Annotated[int | None, Option(help="Hosts, each a network namespace.")]
Rate = Annotated[
    str | None, Option(help="Of each host's link, each way: 100mbit; none: loopback.")
]
Mtu = Annotated[
    int | None,
    Option(help="Largest packet of the links, in bytes: 9000, or 1500 over a delay."),
]


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "gradtide lab run --hosts 4 --rate 100mbit -- python examples/train_gpt.py"
    ),
)
def run(
    command: Annotated[
        list[str],
        Argument(help="What every rank runs, after --.", metavar="-- COMMAND"),
    ],
    hosts: Hosts = None,
    rate: Rate = None,
    ranks_per_host: RanksPerHost = 1,
    local_rate: LocalRate = None,
    mtu: Mtu = None,
    up: options.Up = None,
    delay: options.Delay = None,
    jitter: options.Jitter = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    events: options.Timetable = None,
    timeout: Annotated[
        float | None, Option(help="Seconds after which the run is ended.")
    ] = None,
) -> None:
    """Run a command on every rank of an emulated cluster, as torchrun would."""
    with _ending():
        far = options.Far(up, delay, jitter, loss, internet, events)
        cluster = _cluster(hosts, ranks_per_host, rate, far, mtu, local_rate)
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"--timeout {timeout}: seconds, above 0")
        launch(cluster, command, timeout=timeout)


@app.command(epilog=examples("gradtide lab probe --hosts 4 --rate 100mbit"))
def probe(
    hosts: Hosts = None,
    rate: Rate = None,
    mtu: Mtu = None,
    up: options.Up = None,
    delay: options.Delay = None,
    jitter: options.Jitter = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    seconds: Annotated[float, Option(help="For each measurement.")] = 1.0,
) -> None:
    """Measure what an emulated cluster really delivers."""
    with _ending():
        far = options.Far(up, delay, jitter, loss, internet)
        cluster = _cluster(hosts, 1, rate, far, mtu)
        if cluster.internet is None:
            shown = table(cluster, measure(cluster, seconds))
        else:
            shown = pairs(cluster, survey(cluster, seconds))
        Console().print(shown)


def _cluster(
    hosts: int | None,
    ranks_per_host: int,
    rate: str | None,
    far: options.Far,
    mtu: int | None,
    local_rate: str | None = None,
) -> Cluster:
    """The one that was asked for; here torchrun's variables say nothing."""
    remedy = f"say which hosts: --hosts 4 --rate 100mbit ({options.ELSE})"
    there = options.asked(hosts, ranks_per_host, rate, far, remedy)
    inside = options.local_bits(local_rate)
    return Cluster.emulating(*there[:3], mtu=mtu, local_rate=inside, internet=there[3])


@contextmanager
def _ending() -> Iterator[None]:
    """Gives ranks the time to end on a signal, and every ending its exit code."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    with told():
        try:
            yield
        except LabError as error:
            for line in error.lines:
                typer.echo(line, err=True)
            raise LabError(error.what) from None
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
