"""The one style of tables in terminals and files."""

from __future__ import annotations

from functools import partial

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

name = partial(Column, no_wrap=True)
number = partial(Column, justify="right", no_wrap=True)
grid = partial(Table, header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
