"""At which densities sparse schemes overtake each other, on the virtual clock.

    python benchmarks/crossovers.py --out FILE.json

Nothing is computed from formulas: for every number of ranks the density is bisected at
which one scheme gets faster than the other, on links without start-ups and a device
that costs nothing, and compared with the density at which the volumes that the papers
state are equal. There an index is as long as a value, and so it is here, by
`as_published` and `wire="bf16"`: 2 bytes. (As they are, indices are shorter, and
`TopKA2A` leaves out zeros of the mean, after which it never loses to `TopK`.)

One is another than the paper's: gTop-k there sends every entry twice per round,
up and down a tree; gradtide's butterfly of swaps sends it once, which moves the
crossover from f / (4 log2 P - 2 f) to f / (2 log2 P - 2 f) with f = (P - 1) / P.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from as_published import as_published

from gradtide.collectives import Dense, GTopK, TopK, TopKA2A, TopkDSA
from gradtide.core.payload import Collective
from gradtide.planner.network import Device, Network
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import simulate
from gradtide.scheme import Scheme

NUMEL = 1 << 22
SURE = 0.999  # faster than by rounding

Make = Callable[[float], Collective]
MAKE: dict[str, Make] = {
    "dense": lambda density: Dense("bf16"),
    "topk": lambda density: as_published(TopK)(density, wire="bf16"),
    "gtopk": lambda density: as_published(GTopK)(density, wire="bf16"),
    "topka2a": lambda density: as_published(TopKA2A)(density, wire="bf16"),
    "topkdsa": lambda density: as_published(TopkDSA)(density, wire="bf16"),
}
# Below its density the first is faster than the second.
PAIRS = (
    ("topk", "dense"),
    ("topk", "topka2a"),
    ("gtopk", "topka2a"),
    ("topkdsa", "topka2a"),
)


def derived(pair: tuple[str, str], size: int) -> float:
    """The density at which both send as much (gtopk: see above)."""
    share, rounds = (size - 1) / size, math.log2(size)
    return {
        ("topk", "dense"): 1 / size,
        ("topk", "topka2a"): 1 / (2 * (size - 1)),
        ("gtopk", "topka2a"): share / (2 * rounds - 2 * share),
        ("topkdsa", "topka2a"): 1 - 2 ** (-1 / size),
    }[pair]


def seconds(scheme: str, density: float, size: int) -> float:
    """Of one exchange with nothing to hide behind."""
    trace = StepTrace("one bucket", (Unit("w", NUMEL, 4, 0.0, 0.0, 0.0),), 0.0)
    network = Network.ideal(size, 1, 1e9, alpha=0.0, device=Device())
    return simulate(trace, Scheme(MAKE[scheme](density)), network).step


def crossover(pair: tuple[str, str], size: int, steps: int = 9) -> float:
    """The density up to which the first of a pair is faster, by bisection."""
    low, high = derived(pair, size) / 1.7, min(derived(pair, size) * 1.7, 0.999)
    first, second = pair
    for _ in range(steps):
        middle = math.sqrt(low * high)
        faster = seconds(first, middle, size) < SURE * seconds(second, middle, size)
        low, high = (middle, high) if faster else (low, middle)
    return math.sqrt(low * high)


def main(
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Print densities from the virtual clock beside derived ones."""
    rows = []
    for size in (4, 8, 16, 32, 64, 128, 256):
        for pair in PAIRS:
            found, expected = crossover(pair, size), derived(pair, size)
            rows.append([size, *pair, found, expected, found / expected - 1])
            print(
                f"P = {size:3}  {pair[0]:7} < {pair[1]:7}  below {found:.4f}, derived "
                f"{expected:.4f}, {100 * (found / expected - 1):+.1f} %"
            )
    worst = max(abs(float(row[-1])) for row in rows)
    print(f"at most {worst:.1%} off")
    if out is not None:
        columns = ["ranks", "faster", "than", "below", "derived", "error"]
        table = [dict(zip(columns, row, strict=True)) for row in rows]
        record = {"command": " ".join(sys.argv), "worst": worst, "rows": table}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
