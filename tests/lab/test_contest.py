"""Progress: a bar on a terminal, and lines where there is none."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from gradtide.lab import contest


def told(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> list[str]:
    now = [0.0]
    monkeypatch.setattr(contest.time, "monotonic", lambda: now[0])
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=80)
    with contest.bar(console, 100.0) as advance:
        for second in range(21):
            now[0] = float(second)
            advance("dear(wire='bf16'), in a long recipe " * 3, 5.0 * second)
    return file.getvalue().splitlines()


def test_where_stdout_is_no_terminal_a_line_comes_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *lines = told(monkeypatch, terminal=False)
    assert first == "starting"
    assert [line.split(" done,")[0] for line in lines] == [
        "5 s: 25 %",
        "10 s: 50 %",
        "15 s: 75 %",
        "20 s: 100 %",
    ]
    assert all("\x1b" not in line for line in lines)


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "starting" not in told(monkeypatch, terminal=True)
