"""A pilot: how many more steps recipes need on a user's own script or model.

It is a race without slow links, and what its losses say of steps. Ranks of one machine
share its processors: nothing is timed, so it does not matter how long they take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradtide.lab.race import report, script
from gradtide.lab.spec import RaceSpec, split_schemes
from gradtide.lab.tables import folded, grid, number
from gradtide.planner import pilot
from gradtide.planner.prior import Cost
from gradtide.planner.search import kind
from gradtide.scheme.recommended import RECOMMENDED

EXACT, WARMUP = "wfbp", 60  # steps of a warm-up: a pilot is short


def usual() -> tuple[str, ...]:
    """The exact scheme, and those in README's table that send fewer bytes."""
    rows = [row for row in RECOMMENDED if row.short and kind(row.scheme) == "lossy"]
    shorter = (re.sub(r"warmup=\d+", f"warmup={WARMUP}", r.recipe) for r in rows)
    return EXACT, *shorter


def asked(
    program: Sequence[str] | None,
    workload: str | None,
    schemes: str | None,
    ranks: int,
    seconds: float,
    every: int,
    seed: int,
) -> RaceSpec:
    """The race, from what was typed. Raises ValueError where it tells nothing."""
    if bool(program) == (workload is not None):
        raise ValueError(
            "say what is trained: a script after --, or --workload mypkg.train:build"
        )
    names = usual() if schemes is None else split_schemes(schemes)
    others = [name for name in names if not pilot.is_exact(name)]
    if not others or len(others) == len(names):
        raise ValueError(
            f"--schemes {','.join(names)}: an exact one, wfbp or ddp, and at least one "
            "that is not"
        )
    trained = workload or f"script:{' '.join(program or [])}"
    return RaceSpec(names, trained, ranks, 1, None, seconds, every, seed=seed)


def hold(
    spec: RaceSpec,
    program: Sequence[str],
    pattern: str | None,
    out: Path,
    argv: Sequence[str],
) -> None:
    """Train, and say what each scheme costs; a script's losses are found by `pattern`.

    Raises ValueError for what cannot be raced, and where the losses tell nothing.
    """
    if program:
        pattern = script.LOSS if pattern is None else pattern
        script.race(spec, program, pattern, out, argv, resume=False)
    else:
        report.race(spec, out, argv)
    found = out / "record.json"
    console = Console()
    console.print(table(pilot.read(found)))
    console.print(f"for gradtide plan, and advise: --pilot {found}", highlight=False)


def table(found: dict[str, Cost]) -> Table:
    """What each scheme costs in steps to the same loss."""
    columns = (number(name) for name in ("more steps", "at least", "at most"))
    rows = grid(folded("scheme", [*found]), *columns)
    for name, cost in found.items():
        rows.add_row(name, *(f"{100 * share:+.0f} %" for share in cost.shares))
    return rows
