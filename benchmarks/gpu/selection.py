"""Selection of entries, held against a copy of the same bucket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from gpu.results import Bar, Book
from gpu.setting import Setting
from gradtide.selectors import Exact, Selector, Threshold, kernels

SIZES = (25_600_000, 100_000_000)
DENSITIES = (0.01, 0.001)
Call = Callable[[Tensor, int], object]


def above(x: Tensor, k: int) -> Callable[[], object]:
    """One pass with a bound that is known; of normal values it is the quantile."""
    share = torch.tensor(1 - k / len(x) / 2, dtype=torch.float64)
    bound = float(torch.special.ndtri(share))
    return lambda: kernels.above(x, bound, 2 * k + 16)


def selector(select: Selector, x: Tensor, k: int) -> Callable[[], object]:
    state: dict[str, Tensor] = {}
    return lambda: select(x, k, state)


WAYS: dict[str, Callable[[Tensor, int], Callable[[], object]]] = {
    "a bound that is known": above,
    "Threshold": partial(selector, Threshold()),
    "torch.topk": partial(selector, Exact()),
}


def named(way: str, numel: int, density: float) -> str:
    return f"{way}, {100 * density:g} % of {numel / 1e6:g} M"


BARS = tuple(
    Bar(f"{named(way, 25_600_000, 0.01)}, in copies", name, "copies", most=1.5)
    for way in ("a bound that is known", "Threshold")
    for name in [named(way, 25_600_000, 0.01)]
)


def measure(book: Book, setting: Setting) -> None:
    for numel in (1 << 16,) if setting.tiny else SIZES:
        x = torch.empty(numel, device=setting.device).normal_()
        copy = setting.copy_milliseconds(numel)
        book.measure(
            {
                named(way, numel, density): partial(
                    timed, setting, make, x, int(numel * density), copy
                )
                for density, (way, make) in product(DENSITIES, WAYS.items())
            }
        )


def timed(
    setting: Setting,
    make: Callable[[Tensor, int], Callable[[], object]],
    x: Tensor,
    k: int,
    copy: float,
) -> dict[str, float | None]:
    call = make(x, k)
    ms = setting.milliseconds(call, repeat=15, warm=5)
    idle, waits = setting.idle_milliseconds(call), setting.waits(call)
    return {"ms": ms, "copies": ms / copy, "idle ms": idle, "waits": waits}
