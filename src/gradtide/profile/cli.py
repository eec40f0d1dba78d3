"""The commands of `gradtide profile`: options and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure what this machine, model and network are like.", no_args_is_help=True
)

QUICK = 10**6  # elements


@app.callback()
def _main() -> None: ...


@app.command()
def selection(
    sizes: Annotated[
        str, typer.Option(help="Numbers of elements, with commas between.")
    ] = "1e5,1e6,1e7,1e8",
    densities: Annotated[
        str, typer.Option(help="Shares that are selected, with commas between.")
    ] = ".001,.01,.1",
    rates: Annotated[
        str, typer.Option(help="Of links, for the dense gradient's time on the wire.")
    ] = "100mbit,1gbit,10gbit",
    ranks: Annotated[int, typer.Option(help="Among which gradients are averaged.")] = 8,
    threads: Annotated[int, typer.Option(help="That torch may use.")] = 1,
    repeats: Annotated[
        int, typer.Option(help="Timed rounds of each; fewer where they take long.")
    ] = 15,
    device: Annotated[str, typer.Option(help="Where gradients are: cpu or cuda.")] = (
        "cpu"
    ),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Up to 1e6 elements, 3 repeats: a first look."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for record, table and chart.")
    ] = None,
) -> None:
    """Time every selector beside torch.topk, a copy, and the wire.

    Shows below which bandwidth sending the largest entries pays, by selector.
    """
    from rich.console import Console

    from gradtide.profile.selection.measure import Effort
    from gradtide.profile.selection.report import preface, table, write
    from gradtide.profile.selection.run import Plan, run

    try:
        wanted = [round(size) for size in _numbers("sizes", sizes)]
        if quick and min(wanted) > QUICK:
            raise ValueError(f"--quick measures up to 1e6 elements: --sizes is {sizes}")
        plan = Plan(
            sizes=[n for n in wanted if n <= QUICK] if quick else wanted,
            densities=_numbers("densities", densities),
            rates=_rates(rates),
            ranks=ranks,
            threads=threads,
            device=device,
            effort=Effort(3, 0.2) if quick else Effort(repeats),
        )
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console()
    console.print(preface(device, threads, ranks), highlight=False)
    record = run(plan, sys.argv, lambda rows, dense: console.print(table(rows, dense)))
    if out is not None:
        write(out, record)


@app.command()
def trace(
    what: Annotated[
        str,
        typer.Argument(
            help="package.module:function, which returns (model, optimizer, loss); or"
            " a workload of the lab, such as replay:resnet50."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File for the trace, JSON.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before the first timed one.")] = 3,
    ranks: Annotated[
        int,
        typer.Option(help="Copies at once: what ranks that share this machine see."),
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(help="That torch may use. Default: its own choice.")
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of compute of a step; for a replay."),
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="JSON with the times of layers; for a replay.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of a rank; for a computed workload.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Of the table: the slowest tensors.")] = 20,
) -> None:
    """Time a model's own step: when parameters are read and gradients get ready.

    Under torchrun all ranks take part, and rank 0 reports.
    """
    from rich.console import Console

    from gradtide.profile.trace.report import summary, table
    from gradtide.profile.trace.run import Effort, among, copies, here
    from gradtide.profile.trace.subject import Wanted

    with _told():
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: at least 1 is needed")
        where = None if times is None else str(times.absolute())
        wanted = Wanted(what, step_ms, where, batch_size)
        effort = Effort(steps, warmup, threads)
        if out is not None:
            _check_file(out)
        if "RANK" in os.environ:
            if ranks > 1:
                raise ValueError("torchrun has started the ranks: leave out --ranks")
            found = among(wanted, effort)
        elif ranks > 1:
            found = copies(wanted, effort, ranks)
        else:
            found = here(wanted, effort)
        if found is None:
            return
        console = Console()
        console.print(summary(found), highlight=False)
        console.print(table(found, rows))
        if out is not None:
            found.save(out)


@app.command()
def network(
    out: Annotated[
        Path | None, typer.Option(help="File for the profile, JSON.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="File for a picture of points and fits, PNG.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Emulated hosts. Not under torchrun.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(help="Of each host's link: emulated; under torchrun, nominal."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="To spend, about; very slow links need more.")
    ] = 60.0,
    device: Annotated[str, typer.Option(help="Where gradients are: cpu or cuda.")] = (
        "cpu"
    ),
) -> None:
    """Time requests over sizes between ranks, and fit them to start-up and rate.

    --hosts and --rate emulate a cluster; under torchrun, its ranks are used.
    """
    from rich.console import Console

    from gradtide.lab.rate import parse_rate
    from gradtide.profile.network import report
    from gradtide.profile.network.chart import draw
    from gradtide.profile.network.progress import shown
    from gradtide.profile.network.run import Plan, among, emulated

    with _told():
        for file in (out, chart):
            if file is not None:
                _check_file(file)
        bits = None if rate is None else parse_rate(rate)
        if "RANK" in os.environ:
            if hosts is not None:
                raise ValueError("torchrun has started the ranks: leave out --hosts")
            size = int(os.environ["WORLD_SIZE"])
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            plan = Plan(size // local, local, bits, seconds, device)
            if os.environ["RANK"] == "0":
                with shown(seconds) as tell:
                    found = among(plan, tell)
            else:
                found = among(plan)
        else:
            if hosts is None or rate is None:
                raise ValueError(
                    "say what to measure: --hosts 8 --rate 100mbit emulates a cluster "
                    "(--rate none: loopback); or start this command with torchrun"
                )
            plan = Plan(hosts, ranks_per_host, bits, seconds, device)
            with shown(seconds) as tell:
                found = emulated(plan, tell)
        if found is None:
            return
        console = Console()
        console.print(report.fits(found), report.device(found.network))
        for line in report.notes(found):
            console.print(line, highlight=False)
        if out is not None:
            found.network.save(out)
        if chart is not None:
            draw(found, chart)


@contextmanager
def _told() -> Iterator[None]:
    """What a user can put right is told in a line, without a traceback."""
    from gradtide.lab.failure import LabError

    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except LabError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _check_file(out: Path) -> None:
    """ValueError where the file cannot be written, before anything is measured."""
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(
            f"--out {out} cannot be written: name a file in a folder that is there"
        )


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{option} {text!r}: write numbers with commas between, such as 1e5,1e6"
        ) from None


def _rates(text: str) -> list[float]:
    from gradtide.lab.rate import parse_rate

    rates = [parse_rate(word) for word in text.split(",")]
    if None in rates:
        raise ValueError('--rates: "none" has no time on the wire; leave it out')
    return [rate for rate in rates if rate is not None]
