"""`gradtide simulate`: options and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from gradtide.lab.amounts import parse_time
from gradtide.lab.checks import check_folder, require
from gradtide.lab.options import Delay, Processor, StepMs, numbers, told
from gradtide.scheme.recommended import candidates, unsuited


def simulate(
    trace: Annotated[
        str, Option(help="What is trained: a file, or such as replay:resnet50.")
    ],
    out: Annotated[Path, Option(help="Folder for JSON and pictures.")],
    network: Annotated[
        str, Option(help="Where: a network profile, or a rate such as 10gbit.")
    ] = "10gbit",
    ranks: Annotated[
        str, Option(help="Numbers of ranks, with commas between.")
    ] = "4,8,16,32,64",
    rates: Annotated[
        str | None,
        Option(help="Rates of hosts' links to try; else the network's own."),
    ] = None,
    ranks_per_host: Annotated[
        int | None, Option(help="Ranks on each host, if not as in the profile.")
    ] = None,
    delay: Delay = None,
    device: Processor = None,
    schemes: Annotated[
        str | None, Option(help="Which. Without: those that `gradtide schemes` lists.")
    ] = None,
    step_ms: StepMs = None,
) -> None:
    """Predict steps on clusters that are not there, on a virtual clock.

    A table, JSON, curves of scaling efficiency and a map of the fastest schemes.
    """
    from gradtide.lab.rate import limited
    from gradtide.lab.spec import split_schemes
    from gradtide.scheme import parse
    from gradtide.simulate import grid, report

    with told():
        require("lab", "matplotlib")
        check_folder("--out", out)
        there = grid.read_network(network, ranks_per_host or 1)
        if ranks_per_host is not None:
            there = there.scaled(ranks_per_host=ranks_per_host)
        none = "--rates none: a link without a limit cannot be simulated"
        tried = [limited(rate, none) for rate in rates.split(",")] if rates else []
        step = grid.read_trace(trace, step_ms, device)
        there = grid.equipped(there, device, step)
        if schemes is None:
            asked = {
                name: scheme
                for name, scheme in candidates().items()
                if not unsuited(name, step.steps)
            }
        else:
            asked = {name: parse(name) for name in split_schemes(schemes)}
        found = grid.run(
            step,
            there,
            asked,
            numbers("--ranks", ranks, int, "4,8,16"),
            tried,
            parse_time("--delay", delay or "0ms"),
        )
    console = Console()
    report.show(found, console)
    for path in report.write(found, out, sys.argv):
        console.print(str(path), soft_wrap=True)
