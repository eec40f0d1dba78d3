"""A text that every machine has: the sources of Python's own standard library.

No download and no licence question. Machines with another Python version have a
slightly different text; that changes the data, never the shapes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .workload import Batch

MAX_BYTES = 8_000_000  # read at most; more only costs start-up time
HELD_OUT_EVERY = 20  # one file in so many is held out: about 5 % of the text
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def corpus(max_bytes: int = MAX_BYTES) -> tuple[Tensor, Tensor]:
    """Training text and held-out text as bytes (uint8), split by whole files."""
    train, held_out, total = bytearray(), bytearray(), 0
    for position, path in enumerate(_sources()):
        content = path.read_bytes()[: max_bytes - total]
        (train if position % HELD_OUT_EVERY else held_out).extend(content)
        total += len(content)
        if total >= max_bytes:
            break
    return _tensor(train), _tensor(held_out)


def windows(text: Tensor, starts: NDArray[np.int64], block: int) -> Batch:
    """Inputs of `block` bytes from each start, and the same moved on by one byte."""
    at = torch.from_numpy(starts[:, None] + np.arange(block + 1))
    tokens = text[at].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _sources() -> Iterator[Path]:
    """Python files of the standard library in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        kept.extend(path.relative_to(root).as_posix() for path in paths)
    if len(kept) < 2 * HELD_OUT_EVERY:
        raise ValueError(
            f"found {len(kept)} source files of the standard library: the text "
            "workload needs a Python installed with its sources, not a zipped one"
        )
    return (root / path for path in sorted(kept))


def _tensor(content: bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8))
