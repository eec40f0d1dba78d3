"""What is measured on: whether it is there, and how many threads of it torch has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

THREADS = 1024  # of torch, at most: more than any machine has use for


def check_threads(threads: int) -> None:
    """Raise ValueError unless torch can have as many."""
    if not 1 <= threads <= THREADS:
        raise ValueError(f"{threads} threads: at least 1 is needed, at most {THREADS}")


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Inside, torch has so many; None: its own choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the device, such as cpu or cuda:1.

    Nothing is started on it.
    """
    remedy = "Use cpu, or cuda where torch finds one."
    try:
        asked = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: {reason}. {remedy}") from None
    if asked.type == "cpu":
        return
    found = None
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
    if found is None or found.type != asked.type:
        raise ValueError(f"--device {name}: torch finds no such device here. {remedy}")
    count = torch.accelerator.device_count()
    if (asked.index or 0) >= count:
        raise ValueError(f"--device {name}: there are {count}, from {asked.type}:0 on.")
