"""What the tests of the lab share: whether it can be had here, and who is left."""

from __future__ import annotations

from functools import cache
from pathlib import Path as File

import pytest

from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.internet import Internet, Link, Path
from gradtide.lab.namespaces import networks


@cache
def refusal(internet: Internet | None = None) -> str | None:
    """Why this machine has no emulated networks, or None if it has."""
    hosts = 1 if internet is None else len(internet.links)
    try:
        with networks(Cluster(hosts, rate=1e9, internet=internet)):
            return None
    except LabError as error:
        return str(error)


def needs_networks(rate: float | None) -> None:
    """Skips the test where the networks that the rate needs cannot be had."""
    if rate is not None and (reason := refusal()):
        pytest.skip(reason)


def needs_distance() -> None:
    """Skips the test where hosts cannot be put far from each other."""
    path = Path(delay=0.01, loss=0.1)
    if reason := refusal(Internet.alike(2, Link(1e9), path)):
        pytest.skip(reason)


def processes_with(word: str) -> list[str]:
    """The command lines, on the whole machine, that contain the word."""
    found = []
    for file in File("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in line:
            found.append(line)
    return found
