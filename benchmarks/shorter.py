"""Bytes of sparse schemes with short indices and means without zeros, and before.

    python benchmarks/shorter.py --out benchmarks/records/shorter.json

P ranks in one process exchange random gradients with heavy tails for some steps: by
each scheme as it is, and by the same with indices of two bytes and a mean with its
zeros, as all messages were up to commit 60262b3 (`as_published`; the 4 bytes that were
sent for each 65536 elements are left out). Bytes are counted by what travels; means and
residuals must have the same bits, or the program ends. Beside the bytes stands what
numba and torch take to encode and decode indices, and a rank to leave out zeros and put
them back, on the thread's own clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from as_published import longer
from torch import Tensor

from gradtide.collectives._nonzero import NonZero
from gradtide.core.ops import Group
from gradtide.core.payload import Collective, Payload, settled
from gradtide.lab.record import commit, machine, versions
from gradtide.scheme import parse
from gradtide.testing import lockstep
from gradtide.wire import codec_of, indices
from gradtide.wire.indices import Indices

NUMEL = 1 << 21
STEPS = 3
SIZES = (2, 4, 8, 16)
SCHEMES = tuple(
    f"{call}{wire})"
    for call in ("exdyna(0.01", "topka2a(0.02", "oktopk(0.01", "topk(0.01")
    for wire in (", wire='e3m0'", ", wire='bf16'", "")
)
ENTRIES = 1 << 18


def exchanged(collective: Collective, size: int) -> tuple[Counter[str], list[Tensor]]:
    """Bytes of all ranks by request, and every mean and residual."""
    draw = torch.Generator().manual_seed(size)
    flats = [torch.zeros(NUMEL) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    traffic, found = Counter[str](), []
    for _ in range(STEPS):
        for flat in flats:
            flat += torch.randn(NUMEL, generator=draw).pow_(3)
        flows = [collective.reduce(x, Group(r, size)) for r, x in enumerate(loads)]
        found.append(lockstep(flows, traffic)[0].clone())
    del traffic["rounds"]
    return traffic, found + flats


def compared(text: str, size: int) -> dict[str, Any]:
    """Bytes that a rank sends in a step, of what all of float32 would be."""
    inner: Any = settled(parse(text).collective)
    sent, bits = [], []
    for context in (longer(), nullcontext()):
        with context:
            traffic, tensors = exchanged(inner, size)
        sent.append(sum(traffic.values()) / size / STEPS)
        bits.append(tensors)
    for before, now in zip(*bits, strict=True):
        if not torch.equal(before.view(torch.int32), now.view(torch.int32)):
            raise SystemExit(f"{text} among {size}: other bits")
    dense = 2 * (size - 1) / size * 4 * NUMEL
    return {
        "scheme": text,
        "ranks": size,
        "before": sent[0],
        "now": sent[1],
        "ratio": sent[1] / sent[0],
        "of_dense": sent[1] / dense,
    }


def seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(11):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return median(times)


def cost(density: float, compiled: bool) -> dict[str, Any]:
    """Of encoding and decoding indices, for a million of them."""
    own = Indices(ENTRIES, round(ENTRIES / density))
    draw = torch.Generator().manual_seed(0)
    where = torch.randint(own.span, (ENTRIES,), generator=draw, dtype=torch.int32)
    where = where.sort().values
    message = torch.zeros(own.nbytes, dtype=torch.uint8)
    kept = indices._compiled
    if not compiled:
        indices._compiled = lambda _: None  # type: ignore[assignment]
    try:
        encode = seconds(lambda: own.encode(where, message))
        decode = seconds(lambda: own.decode(message, ENTRIES, torch.int32))
    finally:
        indices._compiled = kept
    return {
        "density": density,
        "tool": "numba" if compiled else "torch",
        "bits": 8 * own.nbytes / ENTRIES,
        "encode_ms": 1e9 * encode / ENTRIES,
        "decode_ms": 1e9 * decode / ENTRIES,
    }


def leaving_out(wire: Any, size: int) -> dict[str, Any]:
    """What a rank takes for zeros of its part, and of all parts that it hears of."""
    codec, span = codec_of(wire, torch.float32), NUMEL // size
    draw = torch.Generator().manual_seed(0)
    part, most = torch.zeros(span), NUMEL // 50
    part[torch.randperm(span, generator=draw)[:most]] = 1.0
    own = NonZero(codec, span, most)
    whole = torch.zeros(codec.nbytes(span), dtype=torch.uint8)
    codec.write(part.clone(), whole)
    short, other = torch.zeros(own.nbytes, dtype=torch.uint8), torch.zeros(NUMEL)
    bucket = torch.zeros(NUMEL)
    copy = seconds(lambda: other.copy_(bucket))
    once = seconds(lambda: own.shorten(whole, short))
    back = seconds(lambda: own.restore(short, whole))
    saved = (size - 1) * (len(whole) - len(short))
    return {
        "wire": wire,
        "ranks": size,
        "copies": (once + size * back) / copy,
        "ms": 1e3 * (once + size * back),
        "saved_ms_50mbit": 8e3 * saved / 50e6,
        "saved_ms_1gbit": 8e3 * saved / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for text in SCHEMES:
        for size in SIZES:
            rows.append(row := compared(text, size))
            print(
                f"{text} among {size}: {row['now'] / 1e3:.0f} kB, {row['ratio']:.3f} "
                f"of before, {row['of_dense']:.2%} of dense"
            )
    costs = [cost(d, tool) for tool in (True, False) for d in (0.001, 0.01, 0.02)]
    for each in costs:
        print(
            f"{each['density']} by {each['tool']}: {each['bits']:.2f} bits, "
            f"{each['encode_ms']:.1f} + {each['decode_ms']:.1f} ms for a million"
        )
    zeros = [leaving_out(w, size) for w in ("e3m0", "bf16", None) for size in (2, 4, 8)]
    for each in zeros:
        print(
            f"zeros, {each['wire']} among {each['ranks']}: {each['copies']:.1f} "
            f"copies, {each['ms']:.1f} ms for {each['saved_ms_50mbit']:.0f} ms at "
            f"50 Mb/s and {each['saved_ms_1gbit']:.1f} at 1 Gb/s"
        )
    record = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "numel": NUMEL,
        "rows": rows,
        "costs": costs,
        "zeros": zeros,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
