"""Programs of benchmarks/, imported by the names that they have there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def imported(name: str, *parts: str) -> Iterator[Any]:
    """A program; it and its parts are known by their own names meanwhile."""
    sys.path.insert(0, str(BENCHMARKS))
    known = {each: sys.modules.pop(each, None) for each in (name, *parts)}
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for each, before in known.items():
            sys.modules.pop(each, None)
            if before is not None:
                sys.modules[each] = before
