"""What a trace shows in a terminal."""

from __future__ import annotations

from rich.console import Console

from gradtide.planner.trace import StepTrace, Unit
from gradtide.profile.trace.report import summary, table

UNITS = (
    Unit("head.weight", 1000, 4, forward=0.001, backward=0.002, optimizer=0.0),
    Unit("body.weight", 24, 4, forward=0.010, backward=0.020, optimizer=0.0),
    Unit("stem.weight", 8, 4, forward=0.002, backward=0.004, optimizer=0.0),
)
TRACE = StepTrace("a model", UNITS, 0.0, loss=0.001, forward_order=(2, 1, 0))


def lines(rows: int) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(TRACE, rows))
    return capture.get().splitlines()


def test_units_come_as_their_gradients_get_ready() -> None:
    shown = [line.split() for line in lines(rows=20) if ".weight" in line]
    assert [row[:3] for row in shown] == [
        ["0", "2", "head.weight"],
        ["1", "1", "body.weight"],
        ["2", "0", "stem.weight"],
    ]
    assert shown[0][3] == "1,000"


def test_of_many_those_are_shown_that_take_longest() -> None:
    shown = lines(rows=2)
    assert not any("head.weight" in line for line in shown)
    assert [line.split()[2] for line in shown if ".weight" in line] == [
        "body.weight",
        "stem.weight",
    ]
    assert "the 2 that take longest, of 3" in " ".join(shown)


def test_a_summary_adds_up() -> None:
    told = summary(TRACE)
    assert told.startswith("a model: 1,032 parameters in 3 tensors, 0.0 MB of")
    assert "forward 13" in told
    assert "backward 26" in told
