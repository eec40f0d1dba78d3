"""How many threads torch has while something is measured."""

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
