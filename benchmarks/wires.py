"""What it takes to encode and decode a buffer, beside a copy of it, on one thread.

    python benchmarks/wires.py --out benchmarks/records/wires.json

Every turn encodes fresh values in place, as a sender does that keeps what is rounded
off, and decodes the message; beside it the values are copied. Times are those of the
thread's processor, medians of turns in which all take part: so other programs count
little, and slow all alike. Small buffers stay in the processor's caches, as those do
that backward has just written; large ones are swept out of them before everything that
is timed. Also recorded: which share of values of a normal distribution, by norm, a
message does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradtide.lab.record import commit, machine, versions
from gradtide.wire import WIRES, Codec, codec_of, tools

SIZES = (1 << 20, 1 << 22)  # elements: 4 and 17 MB
SWEEP = torch.zeros(1 << 24)  # elements: more than caches hold
TURNS = 60


def seconds(work: Callable[[], object], cold: bool) -> float:
    """Of this thread's processor: other programs do not count."""
    if cold:
        SWEEP.add_(1)
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def turn(
    values: Tensor,
    room: Tensor,
    other: Tensor,
    codecs: dict[str, tuple[Codec, Tensor]],
) -> dict[str, tuple[float, ...]]:
    """Seconds of a copy, of encoding, and of decoding, for each codec."""
    cold = len(values) == SIZES[-1]
    found: dict[str, tuple[float, ...]] = {}
    for name, (codec, message) in codecs.items():
        room.copy_(values)
        copy = seconds(lambda: other.copy_(room), cold)
        encode = seconds(lambda: codec.encode(room, message), cold)  # noqa: B023
        decode = seconds(lambda: codec.decode(message, other), cold)  # noqa: B023
        found[name] = copy, encode, decode
    return found


def measured(n: int, turns: int) -> dict[str, Any]:
    values = torch.randn(n, generator=torch.Generator().manual_seed(0))
    codecs: dict[str, tuple[Codec, Tensor]] = {}
    for name in WIRES:
        codec = codec_of(name, torch.float32)
        codecs[name] = codec, torch.zeros(codec.nbytes(n), dtype=torch.uint8)
    # The same memory in every turn: fresh pages would be what takes time.
    rooms = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(3):
        turn(values, *rooms, codecs)
    rows = [turn(values, *rooms, codecs) for _ in range(turns)]
    copies = [copy for row in rows for copy, *_ in row.values()]
    found: dict[str, Any] = {"megabytes": 4 * n / 1e6, "copy_ms": 1e3 * median(copies)}
    for name, (codec, message) in codecs.items():
        rest = values.clone()
        codec.encode(rest, message)
        copy, encode, decode = (median(row[name][i] for row in rows) for i in range(3))
        found[name] = {
            "bits": 8 * len(message) / n,
            "encode_copies": encode / copy,
            "decode_copies": decode / copy,
            "both_copies": (encode + decode) / copy,
            "not_held": float(rest.norm() / values.norm()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "turns": args.turns,
        "compiled": [measured(n, args.turns) for n in SIZES],
    }
    del tools.TOOLS["cpu"]
    record["torch"] = [measured(SIZES[0], max(args.turns // 10, 1))]
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for kind in ("compiled", "torch"):
        for row in record[kind]:
            print(f"{kind}, {row['megabytes']:.0f} MB, a copy {row['copy_ms']:.2f} ms")
            for name in WIRES:
                own = row[name]
                print(
                    f"  {name}: {own['bits']:.3f} bits, {own['encode_copies']:.2f} + "
                    f"{own['decode_copies']:.2f} = {own['both_copies']:.2f} copies, "
                    f"{own['not_held']:.1%} not held"
                )


if __name__ == "__main__":
    main()
