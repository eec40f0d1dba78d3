"""What a trace shows: the parts of the step, and the units that take longest."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradtide.lab.record import milliseconds
from gradtide.plan.trace import StepTrace, Unit

ROWS = 20


def summary(trace: StepTrace) -> str:
    """The line above the table."""
    return (
        f"{trace.name}: {trace.numel:,} parameters in {len(trace.units)} tensors, "
        f"{trace.nbytes / 1e6:.1f} MB of gradients; ms: forward "
        f"{milliseconds(trace.forward)}, loss {milliseconds(trace.loss)}, backward "
        f"{milliseconds(trace.backward)}, optimizer {milliseconds(trace.optimizer)}, "
        f"step {milliseconds(trace.compute)}"
    )


def table(trace: StepTrace, rows: int = ROWS) -> Table:
    """At most `rows` units, those that take longest, as their gradients get ready."""
    read = {unit: place for place, unit in enumerate(trace.forward_order)}
    most = sorted(range(len(trace.units)), key=lambda i: -_seconds(trace.units[i]))
    shown = sorted(most[:rows])
    grid = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("ready", justify="right", no_wrap=True)
    grid.add_column("read", justify="right", no_wrap=True)
    grid.add_column("parameter", overflow="fold")
    for heading in ("elements", "forward ms", "backward ms", "optimizer ms"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for i in shown:
        unit = trace.units[i]
        times = (unit.forward, unit.backward, unit.optimizer)
        grid.add_row(
            str(i),
            str(read[i]),
            unit.name,
            f"{unit.numel:,}",
            *(milliseconds(seconds) for seconds in times),
        )
    if len(trace.units) > rows:
        grid.caption = f"the {rows} that take longest, of {len(trace.units)}"
    return grid


def _seconds(unit: Unit) -> float:
    return unit.forward + unit.backward + unit.optimizer
