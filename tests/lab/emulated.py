"""What the tests of the lab share: whether it can be had here, and who is left."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.namespaces import networks


@cache
def refusal() -> str | None:
    """Why this machine has no emulated networks, or None if it has."""
    try:
        with networks(Cluster(1, rate=1e9)):
            return None
    except LabError as error:
        return str(error)


def needs_networks(rate: float | None) -> None:
    """Skips the test where the networks that the rate needs cannot be had."""
    if rate is not None and (reason := refusal()):
        pytest.skip(reason)


def processes_with(word: str) -> list[str]:
    """The command lines, on the whole machine, that contain the word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in line:
            found.append(line)
    return found
