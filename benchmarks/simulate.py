"""How long a large grid takes: 4096 ranks, what is recommended and four more, 6 rates.

python benchmarks/simulate.py --out FILE.json
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gradtide.lab.spec import split_schemes
from gradtide.scheme import parse
from gradtide.scheme.recommended import candidates
from gradtide.simulate.grid import read_network, read_trace, run

SCHEMES = ",".join((*candidates(), "topk", "topka2a", "micro", "cltk"))
RATES = (1e8, 1e9, 1e10, 2.5e10, 1e11, 4e11)  # bits/s
ALLOWED = 60.0  # seconds


def main(
    trace: Annotated[str, typer.Option(help="As of gradtide simulate.")] = (
        "replay:resnet50"
    ),
    ranks: Annotated[int, typer.Option(help="How many.")] = 4096,
    ranks_per_host: Annotated[int, typer.Option(help="Behind one card.")] = 8,
    schemes: Annotated[str, typer.Option(help="Which.")] = SCHEMES,
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Simulate the grid in this process, once, from nothing, and time it."""
    start, cpu = time.perf_counter(), time.process_time()
    parsed = {name: parse(name) for name in split_schemes(schemes)}
    network = read_network("10gbit", ranks_per_host)
    taken = {}
    cells = []
    for name, scheme in parsed.items():
        begin = time.perf_counter()
        grid = run(read_trace(trace), network, {name: scheme}, [ranks], RATES)
        taken[name] = time.perf_counter() - begin
        cells += [vars(cell.prediction) | {"scheme": name} for cell in grid.cells]
        print(f"{name}: {taken[name]:.1f} s for {len(grid.cells)} cells")
    seconds, busy = time.perf_counter() - start, time.process_time() - cpu
    print(f"{len(cells)} cells: {seconds:.1f} s, {busy:.1f} s of CPU")
    if out is not None:
        record = {
            "command": " ".join(sys.argv),
            "cores": os.cpu_count(),
            "seconds": seconds,
            "cpu_seconds": busy,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "seconds_by_scheme": taken,
            "met": seconds < ALLOWED,
            "cells": cells,
        }
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
