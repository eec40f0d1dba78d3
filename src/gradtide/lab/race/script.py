"""A race of a training script, by the losses that it prints.

Every contestant starts the script anew, on the same emulated hosts, one after the
other: a program of its own cannot take turns. Its clock begins with the first loss that
rank 0 prints, so that starting is nobody's time, and it is ended when its time is over.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from rich.console import Console

from gradtide.lab.checks import check_folder
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.job import Tell
from gradtide.lab.launch import launch
from gradtide.lab.race.report import conclude, progress, resumed
from gradtide.lab.race.standings import Point
from gradtide.lab.spec import RaceSpec, check_place
from gradtide.scheme import Scheme

LOSS = r"\bloss\b\W{0,3}([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
PLACE = "{scheme}"  # in the script's arguments, where it takes a scheme itself
START = 600.0  # seconds until a first loss


class Over(Exception):
    """A contestant has had its time."""


def race(
    spec: RaceSpec,
    script: Sequence[str],
    pattern: str,
    out: Path,
    argv: Sequence[str],
    resume: bool,
) -> None:
    """Race `script` by each of the schemes; `pattern` finds a loss in a line.

    Raises ValueError before anything starts, and LabError when a rank fails or no loss
    is seen.
    """
    finds = _compiled(pattern)
    for name, scheme in check_place(spec).items():
        check_contestant(name, scheme, script)
    check_folder("--out", out)
    if resume:
        spec = resumed(spec, out / "record.json")
    cluster, console = spec.cluster, Console()
    found: dict[str, list[Point]] = {}
    with progress(spec, console) as tell:
        for name in spec.missing:
            done = spec.seconds * len(found)
            found[name] = course(spec, cluster, name, script, finds, tell, done)
    out.mkdir(parents=True, exist_ok=True)
    conclude(spec, found, out, argv, console)


def check_contestant(name: str, scheme: Scheme | None, script: Sequence[str]) -> None:
    """ValueError for a baseline that a script does not have."""
    if scheme is None and name != "ddp" and PLACE not in " ".join(script):
        raise ValueError(
            f"--schemes: {name!r} is a hook, which the script itself has to register: "
            f"leave it out, or have the script take it as {PLACE}"
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        finds = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"--loss-pattern {pattern!r} is no regular expression: {error}"
        ) from (None)
    if finds.groups != 1:
        raise ValueError(
            f"--loss-pattern {pattern!r}: put the number into a group, (...)"
        )
    return finds


def command(name: str, script: Sequence[str]) -> list[str]:
    """What a rank runs: the script, or `gradtide run` in front of it."""
    own = [sys.executable] if script[0].endswith(".py") else []
    if PLACE in " ".join(script):
        return [*own, *(word.replace(PLACE, name) for word in script)]
    if name == "ddp":
        return [*own, *script]
    run = [sys.executable, "-m", "gradtide", "run", "--scheme", name]
    return [*run, "--", *script]


def course(
    spec: RaceSpec,
    cluster: Cluster,
    name: str,
    script: Sequence[str],
    finds: re.Pattern[str],
    tell: Tell,
    done: float,
) -> list[Point]:
    """Where one contestant was when; `done` seconds were raced before it."""
    seen: list[tuple[float, float]] = []  # moments and losses

    def follow(rank: int, line: str) -> None:
        if rank == 0 and (match := finds.search(line)):
            seen.append((time.monotonic(), float(match[1])))
            passed = seen[-1][0] - seen[0][0]
            tell(f"{done + min(passed, spec.seconds):.1f} {name}")
            if passed >= spec.seconds:
                raise Over

    env = {"PYTHONUNBUFFERED": "1", "GRADTIDE_SCHEME": ""}
    words, most = command(name, script), START + spec.seconds
    with suppress(Over):
        launch(cluster, words, env=env, on_line=follow, timeout=most)
    found = list(points(seen, spec.every))
    if len(found) < 2:
        raise LabError(
            f"{name}: {len(seen)} losses in the lines of rank 0, and two looks need "
            f"{2 * spec.every}: have it print loss=1.23 every few steps, or say by "
            "--loss-pattern how it does, or a smaller --every"
        )
    return found


def points(seen: Sequence[tuple[float, float]], every: int) -> Iterator[Point]:
    """A look for each `every` losses: their mean, when the last of them was printed."""
    for end in range(every, len(seen) + 1, every):
        mean = fmean(loss for _, loss in seen[end - every : end])
        yield Point(seen[end - 1][0] - seen[0][0], end, 0.0, mean)
