"""How few bytes would hold gradients with all their bits, on five tasks.

    python benchmarks/entropy.py --out benchmarks/records/entropy.json

Each task of `tasks.py` is trained on four ranks' batches in one process. At some steps
the gradients of a rank, and the mean, are looked at as a bucket: as bf16 and as they
are, float32. Of a code nothing is shorter than the entropy of what it is told apart by,
so the record has, in bits a value: of sign, exponent and mantissa each alone, over all
of a bucket ("whole"), of the exponent below that of the largest in its block of 256
("block"), and of 16 bits of bf16 as one symbol. Beside these stands what a plain code
of fixed places takes: signs and mantissas as they are, of each exponent some bits below
the block's largest, and 8 bits more for each that is not reached ("escapes").

`gradtide.wire.lossless` is tried out for both, compiled by numba: its bits of every
bucket that is looked at ("taken"), and what it takes to encode and decode four million
values, in copies of the buffer of float32, on the thread's own clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import TASKS, build

from gradtide.lab.record import commit, machine, versions
from gradtide.wire.lossless import HEAD, Lossless, Message

RANKS = 4
BLOCK = 256  # values with a largest exponent of their own
LOOKED_AT = (10, 50, 150, 300)  # steps
PLACES = (2, 3, 4)  # bits of an exponent in codes of fixed places
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def entropy(symbols: np.ndarray[Any, Any]) -> float:
    """Bits a symbol, by their own shares: what a code would need that knows these."""
    shares = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-(shares * np.log2(shares)).sum())


def below_largest(exponents: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By how much each is smaller than the largest of its block."""
    padded = np.pad(exponents, (0, -len(exponents) % BLOCK), mode="edge")
    blocks = padded.astype(np.int32).reshape(-1, BLOCK)
    found = blocks.max(1, keepdims=True) - blocks
    return found.ravel()[: len(exponents)]  # type: ignore[no-any-return]


def looked_at(x: torch.Tensor) -> dict[str, Any]:
    """A bucket's entropies, in bits a value."""
    cast = x.to(torch.bfloat16).view(torch.int16).numpy().astype(np.int32) & 0xFFFF
    own = x.view(torch.int32).numpy()
    found: dict[str, Any] = {"numel": len(x), "zeros": float((x == 0).double().mean())}
    for name, bits, mantissa in (("bf16", cast, 7), ("fp32", own, 23)):
        exponent = (bits >> mantissa) & 0xFF
        lower = below_largest(exponent)
        parts: dict[str, Any] = {
            "sign": entropy((bits >> (mantissa + 8)) & 1),
            "exponent_whole": entropy(exponent),
            "exponent_block": entropy(lower) + 8 / BLOCK,
            # Of 23 bits too many kinds: the first eight, and pieces of eight behind.
            "mantissa": sum(
                entropy((bits >> low) & ((1 << min(8, mantissa - low)) - 1))
                for low in range(0, mantissa, 8)
            ),
        }
        least = min(parts["exponent_whole"], parts["exponent_block"])
        parts["bits"] = parts["sign"] + parts["mantissa"] + least
        parts["share"] = parts["bits"] / (9 + mantissa)
        for places in PLACES:
            escaped = float((lower >= (1 << places) - 1).mean())
            width = 1 + mantissa + places + 8 * escaped + 8 / BLOCK
            parts[f"fixed_{places}"] = {
                "escaped": escaped,
                "bits": width,
                "share": width / (9 + mantissa),
            }
        parts["taken"] = 8 * len(message_of(x.to(DTYPES[name]))) / len(x)
        found[name] = parts
    found["bf16"]["as_one"] = entropy(cast)
    return found


def message_of(x: torch.Tensor) -> torch.Tensor:
    """The bytes that travel of values."""
    own = Lossless(x.dtype, len(x))
    message = torch.empty(own.room, dtype=torch.uint8)
    own.write(x, message)
    return message[: own.length(message[:HEAD])]


def tried_out(x: torch.Tensor, name: str, turns: int = 15) -> dict[str, float]:
    """Copies of the float32 buffer that encode and decode take."""
    whole = x.repeat(-(-(1 << 22) // len(x)))
    values, other = whole.to(DTYPES[name]), torch.zeros_like(whole)
    own, back, times = Lossless(values.dtype, len(values)), values.clone(), []
    message = torch.zeros(own.room, dtype=torch.uint8)
    for _ in range(turns + 2):
        clocks = [time.thread_time()]
        other.copy_(whole)
        clocks.append(time.thread_time())
        own.write(values, message)
        clocks.append(time.thread_time())
        own.read(Message(message, message[:HEAD]), back)
        clocks.append(time.thread_time())
        times.append([b - a for a, b in pairwise(clocks)])
    assert back.view(torch.uint8).equal(values.view(torch.uint8))
    copy, encoding, decoding = np.median(times[2:], axis=0)
    return {
        "encode_copies": encoding / copy,
        "decode_copies": decoding / copy,
        "ns_a_value": 1e9 * (encoding + decoding) / len(values),
    }


def trained(task: str, steps: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Every rank's gradients, flat, at the steps that are looked at."""
    works = [build(task, rank, 0, TASKS[task].rates[1], steps) for rank in range(RANKS)]
    model, optimizer = works[0].model, works[0].optimizer
    assert works[0].scheduler is not None
    scheduler = works[0].scheduler(optimizer)
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(max(LOOKED_AT) + 1):
        rows = []
        for work in works:
            loss = works[0].loss(model, work.batch(step))
            rows.append(torch.autograd.grad(loss, params))
        if step in LOOKED_AT:
            yield step, [torch.cat([g.flatten() for g in row]) for row in rows]
        for p, *grads in zip(params, *rows, strict=True):
            p.grad = torch.stack(grads).mean(0)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, tried = [], {}
    for task in TASKS:
        for step, flats in trained(task, max(LOOKED_AT) + 1):
            mean = torch.stack(flats).mean(0)
            for what, x in (("gradient", flats[0]), ("mean", mean)):
                rows.append({"task": task, "step": step, "of": what, **looked_at(x)})
            tried[task] = {name: tried_out(flats[0], name) for name in DTYPES}
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "block": BLOCK,
        "rows": rows,
        "tried_out": tried,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for task in TASKS:
        own = [row for row in rows if row["task"] == task]
        print(f"{task}: {own[0]['numel']} values, {own[0]['zeros']:.1%} zeros")
        for kind, dtype in DTYPES.items():
            shares = [row[kind]["share"] for row in own]
            taken = [row[kind]["taken"] / (8 * dtype.itemsize) for row in own]
            exponent = [row[kind]["exponent_block"] for row in own]
            clocks = tried[task][kind]
            print(
                f"  {kind}: exponent {min(exponent):.2f} to {max(exponent):.2f} bits, "
                f"share by entropy {min(shares):.3f} to {max(shares):.3f}, "
                f"taken {min(taken):.3f} to {max(taken):.3f}; "
                f"{clocks['encode_copies']:.1f} + {clocks['decode_copies']:.1f} copies"
            )
    saved = [16 - row["bf16"]["taken"] for row in rows]
    print(f"bytes that a value is shorter by, median: {np.median(saved) / 8:.3f}")


if __name__ == "__main__":
    main()
