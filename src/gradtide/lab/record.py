"""The record of a comparison: what was typed, on what, and what came out.

Bytes and CPU seconds are per rank and step. None stands where a thing does not apply.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gradtide


@dataclass(frozen=True)
class Result:
    """One contestant's row; seconds are medians over the timed steps."""

    scheme: str
    step_seconds: float
    step_seconds_p25: float
    step_seconds_p75: float
    payload_bytes: float
    cpu_seconds: float
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    apply_seconds: float
    speedup_over_ddp: float | None = None
    interface_bytes: float | None = None
    select_seconds: float | None = None
    limit_seconds: float | None = None
    density: float | None = None
    final_loss: float | None = None
    # Left out of the record where None:
    evaluation: dict[str, float] | None = None
    became: str | None = None  # the scheme that `auto` decided on
    stages: dict[str, float] | None = None  # of K-FAC: busy seconds, they overlap


def origin(argv: Sequence[str], *optional: str) -> dict[str, Any]:
    """What every record says first; `optional` packages, where they are installed."""
    return {
        "command": command_line(argv),
        "commit": commit(),
        "versions": versions(*optional),
        "machine": machine(),
    }


def milliseconds(seconds: float) -> str:
    """A number for people: whole from 100 ms on, three digits below."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def command_line(argv: Sequence[str]) -> str:
    """`argv` as typed; program and home directory are reduced to their names."""
    return " ".join(["gradtide", *map(_word, argv[1:])])


def versions(*optional: str) -> dict[str, str]:
    """Of what the numbers depend on."""
    packages = {"gradtide": gradtide.__version__}
    packages |= {name: version(name) for name in ("torch", "numpy")}
    packages["python"] = platform.python_version()
    for name in optional:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


def machine() -> dict[str, str | int]:
    """The hardware and the kernel; nothing that names the machine or its owner."""
    import psutil  # of an extra, which not all who write a number for people need

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def commit() -> str | None:
    """gradtide's commit, with "-dirty" after it if files differ; None outside git."""
    # An installed copy inside somebody's repository is not that repository's commit.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _word(typed: str) -> str:
    home = Path.home()
    path = Path(typed)
    if home in path.parents:
        return f"~/{shlex.quote(str(path.relative_to(home)))}"
    return shlex.quote(typed)


def _git(*arguments: str) -> str | None:
    where = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=where, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if "model name" in line:
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
