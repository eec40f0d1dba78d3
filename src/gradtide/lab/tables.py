"""The one style of tables in terminals and files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

name = partial(Column, no_wrap=True)
number = partial(Column, justify="right", no_wrap=True)
grid = partial(Table, header_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def folded(heading: str, names: Sequence[str]) -> Column:
    """A column in which recipes' names stay whole, and constructor calls are folded."""
    width = max(6, min(max(map(len, names)), 24))
    # Where a terminal is narrow it is this column that gives way: numbers are whole.
    return Column(heading, overflow="fold", max_width=width)
