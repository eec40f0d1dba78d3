"""What a trace shows: the parts of the step, and the units that take longest."""

from __future__ import annotations

from rich.table import Column, Table

from gradtide.lab import tables
from gradtide.lab.record import milliseconds
from gradtide.planner.trace import StepTrace


def summary(trace: StepTrace) -> str:
    return (
        f"{trace.name}: {trace.numel:,} parameters in {len(trace.units)} tensors, "
        f"{trace.nbytes / 1e6:.1f} MB of gradients; ms: forward "
        f"{milliseconds(trace.forward)}, loss {milliseconds(trace.loss)}, backward "
        f"{milliseconds(trace.backward)}, optimizer {milliseconds(trace.optimizer)}, "
        f"step {milliseconds(trace.compute)}"
    )


def table(trace: StepTrace, rows: int = 20) -> Table:
    """At most `rows` units, those that take longest, as their gradients get ready."""
    read = {unit: place for place, unit in enumerate(trace.forward_order)}
    times = [(unit.forward, unit.backward, unit.optimizer) for unit in trace.units]
    most = sorted(range(len(times)), key=lambda i: -sum(times[i]))
    grid = tables.grid(
        *map(tables.number, ("ready", "read")),
        Column("parameter", overflow="fold"),
        *map(tables.number, ("elements", "forward ms", "backward ms", "optimizer ms")),
    )
    for i in sorted(most[:rows]):
        unit = trace.units[i]
        cells = str(i), str(read[i]), unit.name, f"{unit.numel:,}"
        grid.add_row(*cells, *map(milliseconds, times[i]))
    if len(trace.units) > rows:
        grid.caption = f"the {rows} that take longest, of {len(trace.units)}"
    return grid
