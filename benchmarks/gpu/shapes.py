"""How many elements, or blocks, a program of a kernel has, and how many warps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from gpu.results import Book
from gpu.setting import Setting
from gradtide.wire import codec_of

NUMEL = 25_600_000
DENSITY = 0.01
BOUND = 2.5758  # that 1 % of normal values are above
SELECTION = ((4096, 8), (4096, 4), (2048, 4), (8192, 8), (1024, 4), (2048, 8))
ROWS = ((4, 1), (4, 2), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4))
BARS = ()


def measure(book: Book, setting: Setting) -> None:
    figures = {
        f"selection, {block} elements, {warps} warps": partial(
            selection, setting, block, warps
        )
        for block, warps in SELECTION
    }
    figures |= {
        f"int8, {rows} blocks, {warps} warps": partial(codec, setting, rows, warps)
        for rows, warps in ROWS
    }
    if setting.cuda:
        book.measure(figures)
    else:
        book.skip(figures, "needs a CUDA device")


def selection(setting: Setting, block: int, warps: int) -> dict[str, float]:
    """Milliseconds of looking for 1 %, without the wait for how many there are."""
    from gradtide.selectors import triton_kernels as kernels

    x = torch.empty(NUMEL, device=setting.device).normal_()
    room = int(2 * DENSITY * NUMEL)
    launch = {**kernels._LAUNCH, "BLOCK": block, "num_warps": warps}
    with patch.multiple(kernels, BLOCK=block, _LAUNCH=launch):
        return timed(setting, scan=lambda: kernels.scan(x, BOUND, room, False))


def codec(setting: Setting, rows: int, warps: int) -> dict[str, float]:
    from gradtide.wire import triton_kernels as kernels

    found = codec_of("int8", torch.float32)
    x = torch.empty(NUMEL, device=setting.device).normal_()
    message = torch.zeros(found.nbytes(NUMEL), dtype=torch.uint8, device=setting.device)
    total = x.clone()
    launch = {**kernels._LAUNCH, "num_warps": warps}
    with patch.multiple(kernels, ROWS=rows, _LAUNCH=launch):
        return timed(
            setting,
            encode=lambda: found.encode(x, message),
            decode=lambda: found.decode(message, total),
            add=lambda: found.add(message[None], total),
        )


def timed(setting: Setting, **calls: Callable[[], object]) -> dict[str, float]:
    """Milliseconds, and what a copy of as many floats takes."""
    found = {name: setting.milliseconds(call, 10) for name, call in calls.items()}
    return {**found, "copy": setting.copy_milliseconds(NUMEL)}
