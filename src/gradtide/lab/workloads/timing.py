"""How long each replayed unit takes: by its work, or from a trace file.

A trace is a JSON list with one object for every unit of the architecture, in any
order, times in seconds of one forward and one backward of that layer alone:

    [{"name": "conv1", "forward_seconds": 0.0021, "backward_seconds": 0.0038}, ...]

Names are those of `shapes.units`. A unit whose time is unknown gets 0, not omission.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtide.lab.workloads.shapes import Unit
from gradtide.lab.workloads.workload import Timing
from gradtide.planner.data.document import is_number, read_json

FORWARD_SHARE = 1 / 3  # forward to backward is 1 : 2, gradients of input and weight


def by_work(units: Sequence[Unit], step_ms: float) -> list[Timing]:
    """`step_ms` milliseconds over all units and both passes, in proportion to work."""
    if not 0 < step_ms <= 1e7:
        raise ValueError(f"step_ms is {step_ms}: give the milliseconds of one step")
    total = sum(unit.work for unit in units)
    seconds = [step_ms / 1e3 * unit.work / total for unit in units]
    return [Timing(s * FORWARD_SHARE, s * (1 - FORWARD_SHARE)) for s in seconds]


def from_trace(units: Sequence[Unit], path: Path) -> list[Timing]:
    """The trace's times in the order of `units`; `ValueError` says what is wrong."""
    entries = read_json(path, "trace")
    if not isinstance(entries, list):
        raise ValueError(
            f"{path} holds a {type(entries).__name__}: a trace is a list of objects "
            "with name, forward_seconds and backward_seconds"
        )
    times: dict[str, Timing] = {}
    for position, entry in enumerate(entries):
        name, timing = _entry(entry, f"{path}, unit {position}")
        if name in times:
            raise ValueError(f"{path}: {name} occurs twice; add its times up")
        times[name] = timing
    _check_names(path, times, units)
    return [times[unit.name] for unit in units]


def _entry(entry: Any, where: str) -> tuple[str, Timing]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, found {entry!r}")
    keys = ("name", "forward_seconds", "backward_seconds")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ValueError(f"{where}: no {' and no '.join(missing)}")
    name, *seconds = (entry[key] for key in keys)
    if not isinstance(name, str):
        raise ValueError(f"{where}: name is {name!r}, expected a string")
    for key, value in zip(keys[1:], seconds, strict=True):
        if not (is_number(value, float) and 0 <= value <= 1e6):
            raise ValueError(
                f"{where} ({name}): {key} is {value!r}, expected seconds, 0 to 1e6"
            )
    return name, Timing(*map(float, seconds))


def _check_names(path: Path, times: dict[str, Timing], units: Sequence[Unit]) -> None:
    expected = [unit.name for unit in units]
    missing = [name for name in expected if name not in times]
    unknown = sorted(times.keys() - set(expected))
    for problem, names in (("no times for", missing), ("no such units:", unknown)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{path}: {problem} {', '.join(names[:5])}{more}")
