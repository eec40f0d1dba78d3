"""The commands of `gradtide profile`: options and exit codes."""

from __future__ import annotations

import sys
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
