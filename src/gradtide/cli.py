"""The command line: `gradtide schemes | lab | compare | profile`.

Knows options and exit codes. What a command does is imported when it runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradtide.lab.cli import app as lab
from gradtide.profile.cli import app as profile
from gradtide.simulate.cli import simulate

app = typer.Typer(
    help="Data-parallel PyTorch training over networks that cannot keep up.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(lab, name="lab")
app.add_typer(profile, name="profile")
app.command()(simulate)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"gradtide {version('gradtide')}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print it.", callback=_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command()
def schemes() -> None:
    """List the schemes that have a name, and the baselines."""
    from rich.console import Console
    from rich.table import Table

    from gradtide.lab.contestants import BASELINES
    from gradtide.scheme import RECIPES

    listed = Table(box=None, pad_edge=False, header_style="bold")
    listed.add_column("name", no_wrap=True)
    listed.add_column("stands for", overflow="fold")
    for name, scheme in RECIPES.items():
        listed.add_row(name, repr(scheme))
    for name, (meaning, _) in BASELINES.items():
        listed.add_row(name, f"{meaning}; to compare with only")
    Console().print(listed)


@app.command()
def compare(
    schemes: Annotated[
        str,
        typer.Option(help="Which, with commas between: `gradtide schemes` lists them."),
    ],
    workload: Annotated[str, typer.Option(help="What is trained, such as gpt.")],
    out: Annotated[Path, typer.Option(help="Folder for record, table, chart, trace.")],
    hosts: Annotated[
        int | None, typer.Option(help="Emulated hosts. Not under torchrun.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(help="Of each host's link, such as 100mbit. Not under torchrun."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each scheme.")] = 30,
    warmup: Annotated[int, typer.Option(help="Steps before the first timed one.")] = 3,
    rounds: Annotated[int, typer.Option(help="Times that each has its turn.")] = 3,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of compute of a step; for a replay."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON with the times of layers; for a replay.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of models, data and replays.")] = 0,
) -> None:
    """Train the same model with each scheme in turn, and show where the time goes.

    --hosts and --rate emulate a cluster; under torchrun, its ranks are used.
    """
    from gradtide.lab import compare as lab_compare
    from gradtide.lab.launch import LabError
    from gradtide.lab.spec import Spec, split_schemes

    try:
        size, per_host, bits = _ranks(hosts, ranks_per_host, rate)
        spec = Spec(
            schemes=split_schemes(schemes),
            workload=workload,
            hosts=size,
            ranks_per_host=per_host,
            rate=bits,
            steps=steps,
            warmup=warmup,
            rounds=rounds,
            step_ms=step_ms,
            trace=None if trace is None else str(trace.absolute()),
            seed=seed,
        )
        if "RANK" in os.environ:
            lab_compare.compare_here(spec, out, sys.argv, int(os.environ["RANK"]))
        else:
            lab_compare.compare(spec, out, sys.argv)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except LabError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def plan(
    trace: Annotated[
        str,
        typer.Option(
            help="Made by gradtide profile trace, or a workload: replay:resnet50."
        ),
    ],
    network: Annotated[
        Path | None,
        typer.Option(help="Made by gradtide profile network. Without: an ideal one."),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Forward and backward of a replay workload."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of all ranks.")] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Behind one network card.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of each host's link, such as 10gbit.")
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(help="To rank beside the dense ones. Without: sparse recipes."),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(help="Share of more steps that a lossy scheme has to be worth."),
    ] = 0.25,
    json: Annotated[
        Path | None, typer.Option(help="Write the plan for programs, too.")
    ] = None,
) -> None:
    """Rank schemes by the time of a step that they would take, and say why.

    Nothing is exchanged: the engine runs on a virtual clock.
    """
    from rich.console import Console

    from gradtide.lab.rate import parse_rate
    from gradtide.lab.spec import split_schemes
    from gradtide.plan.advice import advise
    from gradtide.plan.network import load as load_network
    from gradtide.plan.report import dumps, show
    from gradtide.plan.search import rank
    from gradtide.plan.whatif import imagine
    from gradtide.scheme import parse
    from gradtide.simulate.grid import read_trace

    try:
        step = read_trace(trace, step_ms)
        measured = None if network is None else load_network(network)
        bits = None if rate is None else parse_rate(rate)
        there = imagine(measured, ranks, ranks_per_host, bits)
        names = None if schemes is None else split_schemes(schemes)
        asked = None if names is None else {name: parse(name) for name in names}
        advice = advise(rank(step, there, asked), there.size, margin)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    Console().print(show(advice, step, there), highlight=False)
    if json is not None:
        json.write_text(dumps(advice, step, there), encoding="utf-8")


def _ranks(
    hosts: int | None, ranks_per_host: int, rate: str | None
) -> tuple[int, int, float | None]:
    """Hosts, ranks on each, and bits/s: as asked, or as torchrun has them."""
    from gradtide.lab.rate import parse_rate

    if "RANK" not in os.environ:
        if hosts is None or rate is None:
            raise ValueError(
                "say on what to compare: --hosts 4 --rate 100mbit emulates a cluster "
                "(--rate none: loopback); or start this command with torchrun"
            )
        return hosts, ranks_per_host, parse_rate(rate)
    if hosts is not None or rate is not None:
        raise ValueError(
            "torchrun has started this on real hosts: leave out --hosts and --rate"
        )
    size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return size // local, local, None


if __name__ == "__main__":  # for torchrun -m gradtide.cli
    app()
