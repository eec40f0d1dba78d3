"""The commands of `gradtide profile`: options and exit codes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from gradtide.lab import options
from gradtide.lab.checks import check_file, check_folder, require
from gradtide.lab.rate import limited

app = typer.Typer(
    help="Measure what this machine, model and network are like.", no_args_is_help=True
)

QUICK = 10**6  # elements
PICTURES = (".png", ".pdf", ".svg")


@app.command(
    epilog=options.examples("gradtide profile selection --quick --out out/selection")
)
def selection(
    sizes: Annotated[
        str, Option(help="Numbers of elements, with commas between.")
    ] = "1e5,1e6,1e7,1e8",
    densities: Annotated[
        str, Option(help="Shares that are selected, with commas between.")
    ] = ".001,.01,.1",
    rates: Annotated[
        str, Option(help="Of links, for the dense gradient's time on the wire.")
    ] = "100mbit,1gbit,10gbit",
    ranks: Annotated[int, Option(help="Among which gradients are averaged.")] = 8,
    threads: Annotated[int, Option(help="That torch may use.")] = 1,
    repeats: Annotated[
        int, Option(help="Timed rounds of each; fewer where they take long.")
    ] = 15,
    device: options.Device = "cpu",
    quick: Annotated[
        bool,
        Option("--quick", help="Up to 1e6 elements, 3 repeats: a first look."),
    ] = False,
    out: Annotated[
        Path | None, Option(help="Folder for record, table and chart.")
    ] = None,
) -> None:
    """Time every selector beside torch.topk, a copy, and the wire.

    Shows below which bandwidth sending the largest entries pays, by selector.
    """
    from gradtide.profile.selection.report import preface, table, write
    from gradtide.profile.selection.run import Plan, run

    with options.told():
        wanted = [*map(round, options.numbers("--sizes", sizes, float, "1e5,1e6"))]
        if quick and min(wanted) > QUICK:
            raise ValueError(f"--quick measures up to 1e6 elements: --sizes is {sizes}")
        kept = [n for n in wanted if n <= QUICK] if quick else wanted
        shares = options.numbers("--densities", densities, float, ".01,.1")
        none = '--rates: "none" has no time on the wire; leave it out'
        links = [limited(word, none) for word in rates.split(",")]
        effort = (3, 0.2) if quick else (repeats, 1.0)
        require("lab", "psutil", *(["matplotlib"] if out is not None else []))
        if out is not None:
            check_folder("--out", out)
        plan = Plan(kept, shares, links, ranks, threads, device, *effort)
    console = Console()
    console.print(preface(device, threads, ranks), highlight=False)
    record = run(plan, sys.argv, lambda rows, dense: console.print(table(rows, dense)))
    if out is not None:
        write(out, record)


@app.command(
    epilog=options.examples(
        "gradtide profile trace mypkg.train:build --out trace.json",
        "gradtide profile trace replay:resnet50 --step-ms 300 --out trace.json",
    )
)
def trace(
    what: Annotated[
        str,
        Argument(
            help="package.module:function, which returns (model, optimizer, loss); or"
            " a workload of the lab, such as replay:resnet50."
        ),
    ],
    out: Annotated[Path | None, Option(help="File for the trace, JSON.")] = None,
    steps: Annotated[int, Option(help="Timed steps.")] = 10,
    warmup: options.Warmup = 3,
    ranks: Annotated[
        int,
        Option(help="Copies at once: what ranks that share this machine see."),
    ] = 1,
    threads: Annotated[
        int | None, Option(help="That torch may use. Default: its own choice.")
    ] = None,
    step_ms: options.StepMs = None,
    times: options.Times = None,
    batch_size: Annotated[
        int | None, Option(help="Samples of a rank; for a computed workload.")
    ] = None,
    rows: Annotated[int, Option(help="Of the table: the slowest tensors.")] = 20,
) -> None:
    """Time a model's own step: when parameters are read and gradients get ready.

    Under torchrun all ranks take part, and rank 0 reports.
    """
    from gradtide.profile.trace.report import summary, table
    from gradtide.profile.trace.run import Effort, among, copies, here
    from gradtide.profile.trace.subject import Wanted

    with options.told():
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: at least 1 is needed")
        if rows < 0:
            raise ValueError(f"--rows {rows}: 0 or more")
        wanted = Wanted(what, step_ms, times and times.absolute(), batch_size)
        effort = Effort(steps, warmup, threads)
        started = options.torchrun()
        if out is not None and (started is None or started.rank == 0):
            check_file("--out", out)
        if started is not None:
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


@app.command(
    epilog=options.examples(
        "gradtide profile network --hosts 8 --rate 100mbit --out network.json",
        "torchrun --nproc-per-node 1 -m gradtide profile network --out network.json",
    )
)
def network(
    out: Annotated[Path | None, Option(help="File for the profile, JSON.")] = None,
    chart: Annotated[
        Path | None, Option(help="File for a picture of points and fits, PNG.")
    ] = None,
    hosts: options.Hosts = None,
    ranks_per_host: options.RanksPerHost = 1,
    rate: Annotated[
        str | None,
        Option(help="Of each host's link: emulated; under torchrun, nominal."),
    ] = None,
    local_rate: options.LocalRate = None,
    up: options.Up = None,
    delay: options.Delay = None,
    jitter: options.Jitter = None,
    loss: options.Loss = None,
    internet: options.FromFile = None,
    seconds: Annotated[
        float, Option(help="To spend, about; very slow links need more.")
    ] = 60.0,
    device: options.Device = "cpu",
) -> None:
    """Time requests over sizes between ranks, and fit them to start-up and rate.

    --hosts and --rate emulate a cluster; under torchrun, its ranks are used.
    """
    from gradtide.lab.job import silent
    from gradtide.profile.network import report
    from gradtide.profile.network.run import Plan, among, emulated

    with options.told():
        started = options.torchrun()
        if started is not None and hosts is not None:
            raise ValueError("torchrun has started the ranks: leave out --hosts")
        example = "say what to measure: --hosts 8 --rate 100mbit"
        far = options.Far(up, delay, jitter, loss, internet)
        there = options.layout(hosts, ranks_per_host, rate, far, example)
        inside = options.local_bits(local_rate)
        plan = Plan(*there[:3], seconds, device, inside, there.internet)
        reports = started is None or started.rank == 0
        if reports and out is not None:
            check_file("--out", out)
        if reports and chart is not None:
            require("lab", "matplotlib")
            if chart.suffix.lower() not in PICTURES:
                raise ValueError(f"--chart {chart}: end it in {', '.join(PICTURES)}")
            check_file("--chart", chart)
        measure = emulated if started is None else among
        with report.shown(seconds) if reports else nullcontext(silent) as tell:
            found = measure(plan, tell)
        if found is None:
            return
        console = Console()
        console.print(report.fits(found), report.device(found.network))
        for line in report.notes(found):
            console.print(line, highlight=False)
        if out is not None:
            found.network.save(out)
        if chart is not None:
            report.draw(found, chart)
