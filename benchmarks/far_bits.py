r"""Exchanges of real ranks over links that delay and lose: the law, and the same bits.

    gradtide lab run --hosts 4 --rate 1gbit -- \
        python benchmarks/far_bits.py --out out/near.json
    gradtide lab run --hosts 4 --rate 100mbit --delay 40ms --loss .5% -- \
        python benchmarks/far_bits.py --same-as out/near.json --out out/far.json

Every collective on every wire that loses nothing, several buckets beside each other,
which ranks launch with naps of their own between them. After each step what all ranks
had is what was delivered and what is left, on some random projections, and all ranks
hold the same bits. With `--same-as` these are the bits of that run.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from law import LENGTHS, collectives, tensors
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.payload import Collective, Payload
from gradtide.lab.record import commit, machine, versions
from gradtide.transport.connect import connect

BESIDE = 6  # buckets that travel beside each other
LONG = 40_008  # elements for every rank, of one bucket in three: several frames
NAP = 0.02  # seconds at the most
TOLERANCE = 1e-9


class Bucket:
    """What ranks exchange by one collective, step by step."""

    def __init__(self, number: int, collective: Collective, engine: Engine) -> None:
        draw = Random(number)
        length = LONG if draw.random() < 1 / 3 else max(LENGTHS)
        self.name = f"{number} {collective}"
        self._engine, self._collective = engine, collective
        self._flat = torch.zeros(length * engine.group.size, dtype=torch.float64)
        self._payload = Payload(self._flat, tensors(self._flat))
        own = draw.getrandbits(40) + engine.group.rank
        self._rng = torch.Generator().manual_seed(own)
        signs = torch.Generator().manual_seed(number)
        rows = torch.randint(0, 2, (4, len(self._flat)), generator=signs)
        self._signs = rows.double().mul_(2).sub_(1)
        self.had: list[float] = []

    def launch(self) -> None:
        noise = torch.randn(len(self._flat), generator=self._rng, dtype=torch.float64)
        self._flat += noise.pow_(3)
        self.had = (self._signs @ self._flat).tolist()
        flow = self._collective.reduce(self._payload, self._engine.group)
        self.flight = self._engine.launch(self.name, flow)

    def finish(self) -> tuple[str, list[float], list[float], list[float]]:
        """A digest, and projections of what was had, delivered, and is left."""
        mean: Tensor = self._engine.finish(self.flight)
        delivered = (self._signs @ mean).tolist()
        digest = sha256(mean.numpy().tobytes()).hexdigest()
        if mean.data_ptr() == self._flat.data_ptr():
            self._flat.zero_()
        return digest, self.had, delivered, (self._signs @ self._flat).tolist()


def wrong(told: list[tuple[str, list[float], list[float], list[float]]]) -> str:
    """What is not as it should be with what all ranks say of a bucket."""
    digests, had, delivered, left = zip(*told, strict=True)
    if len({*digests}) > 1:
        return "ranks hold different bits"
    for before, mean, after in zip(
        zip(*had, strict=True), delivered[0], zip(*left, strict=True), strict=True
    ):
        scale = sum(map(abs, before)) + sum(map(abs, after)) + 1.0
        if abs(sum(before) - len(told) * mean - sum(after)) > TOLERANCE * scale:
            return f"{sum(before)} became {len(told) * mean} and {sum(after)}"
    return ""


def main() -> None:
    """Exchange, and print how many exchanges were wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--same-as", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    engine = Engine(connect(None, torch.device("cpu")))
    begin, nap = time.monotonic(), Random(dist.get_rank())
    buckets = [Bucket(i, each, engine) for i, each in enumerate(collectives())]
    digests: dict[str, list[str]] = {}
    failures = []
    for first in range(0, len(buckets), BESIDE):
        some = buckets[first : first + BESIDE]
        for step in range(args.steps):
            for bucket in some:
                time.sleep(nap.random() * NAP)
                bucket.launch()
            told = engine.transport.gather_objects([each.finish() for each in some])
            for bucket, *own in zip(some, *told, strict=True):
                digests.setdefault(bucket.name, []).append(own[0][0])
                if why := wrong(own):
                    failures.append(f"{bucket.name}, step {step}: {why}")
    same = None
    if args.same_as:
        same = json.loads(args.same_as.read_text())["digests"] == digests
    distance = engine.transport.distance  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        exchanges = sum(map(len, digests.values()))
        found = {
            "ranks": dist.get_world_size(),
            "one_way_s": distance.most,
            "exchanges": exchanges,
            "failures": failures,
            "same_bits": same,
            "seconds": round(time.monotonic() - begin, 1),
        }
        print(json.dumps(found), flush=True)
        found |= {"commit": commit(), "machine": machine(), "versions": versions()}
        if args.out:
            whole = json.dumps({**found, "digests": digests}, indent=1)
            args.out.write_text(whole + "\n")
    engine.transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
