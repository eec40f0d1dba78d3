"""Codecs, held against what their bytes would take at the speed of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu.results import Bar, Book
from gpu.setting import Setting
from gradtide.wire import WIRES, Wire, codec_of

NUMEL = 25_600_000
CALLS = ("encode", "decode", "add")
BARS = tuple(
    Bar(f"{wire}, {call}, by its bytes", f"{wire}, {call}", "times", most=2.5)
    for wire in WIRES
    for call in CALLS
)


def measure(book: Book, setting: Setting) -> None:
    numel = 1 << 16 if setting.tiny else NUMEL
    copy = setting.copy_milliseconds(numel)
    wires: Any = WIRES
    for wire in wires:
        book.measure(
            {
                f"{wire}, {name}": partial(timed, setting, call, moved * copy / 8)
                for name, call, moved in calls(setting, wire, numel)
            }
        )


def calls(
    setting: Setting, wire: Wire, numel: int
) -> Iterator[tuple[str, Callable[[], None], float]]:
    """What is called, and the bytes that it has to read and write for each value."""
    codec = codec_of(wire, torch.float32)
    x = torch.empty(numel, device=setting.device).normal_()
    total = x.clone()
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=setting.device)
    codec.write(x.clone(), message)
    # Encoded again and again: values, then what was rounded off, takes as long.
    yield "encode", lambda: codec.encode(x, message), 8 + codec.width
    yield "decode", lambda: codec.decode(message, total), 4 + codec.width
    yield "add", lambda: codec.add(message[None], total), 8 + codec.width


def timed(
    setting: Setting, call: Callable[[], None], ideal: float
) -> dict[str, float | None]:
    ms = setting.milliseconds(call, repeat=15, warm=3)
    idle, waits = setting.idle_milliseconds(call), setting.waits(call)
    return {"ms": ms, "times": ms / ideal, "idle ms": idle, "waits": waits}
