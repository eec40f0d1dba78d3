"""`gradtide doctor`: options, and exit codes."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from typer import Option

from gradtide.lab import options
from gradtide.lab.checks import check_file

if TYPE_CHECKING:
    from gradtide.doctor.run import Found

MOST = 3600.0  # seconds


def doctor(
    model: Annotated[
        str | None,
        Option(help="For advice: params=25M,step=300ms (computing alone)."),
    ] = None,
    trace: Annotated[
        str | None,
        Option(help="The same, by gradtide profile trace, or replay:resnet50."),
    ] = None,
    wait: Annotated[float, Option(help="Seconds to wait for other ranks.")] = 30.0,
    seconds: Annotated[
        float, Option(help="To measure the network, about; 0: only whether it works.")
    ] = 10.0,
    json: Annotated[
        Path | None, Option(help="Write what was found for programs, too.")
    ] = None,
) -> None:
    """Say whether training would work here, before it is tried.

    Started on all hosts as training will be: torchrun --no-python gradtide doctor, or
    srun gradtide doctor. Rank 0 reports. The exit code is 1 where training would fail.
    """
    from gradtide.doctor.advice import parse_model
    from gradtide.doctor.meeting import Unmet
    from gradtide.doctor.run import Asked, alone, among
    from gradtide.lab.place import place
    from gradtide.simulate.grid import read_trace

    with options.told():
        here = place(os.environ)
        for option, value, least in (("wait", wait, 1.0), ("seconds", seconds, 0.0)):
            if not least <= value <= MOST or math.isnan(value):
                raise ValueError(f"--{option} {value}: {least:g} to {MOST:g} seconds")
        if model is not None and trace is not None:
            raise ValueError("--model and --trace say the same: leave one out")
        step = None if model is None else parse_model(model)
        step = read_trace(trace) if trace is not None else step
        if json is not None and (here is None or here.rank == 0):
            check_file("--json", json)
    asked = Asked(wait, seconds, step)
    if here is None:
        _tell(alone(), json)
        return
    try:
        failed = among(here, asked, lambda found: _tell(found, json))
    except Unmet as error:
        _leave(f"error: {error}", 1)
    except RuntimeError as error:  # the store, whose host has gone
        _leave(f"error: {str(error).splitlines()[0]}", 1)
    _leave("", int(failed))


def _tell(found: Found, json: Path | None) -> None:
    from gradtide.doctor import report

    Console().print(report.show(found), highlight=False)
    sys.stdout.flush()
    if json is not None:
        json.write_text(report.dumps(found), encoding="utf-8")
    if found.place is None and found.failed:
        raise typer.Exit(1)


def _leave(words: str, status: int) -> NoReturn:
    """End this process, whatever its threads wait for."""
    if words:
        print(words, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
