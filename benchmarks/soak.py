"""Long trainings with harmless disturbances: does anything grow, or come apart?

    python benchmarks/campaign.py soak --steps 100000

Three ranks train a small model by one scheme of each family. Now and then one of them
is stopped for a moment, collects garbage, or all begin anew from their states. Every
`look` steps all ranks compare checksums of their parameters, and each notes its memory,
descriptors and threads: the last are not to be more than those of the first quarter,
but for `MORE`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing as mp
import os
import random
import signal
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradtide

c10d: Any = dist  # whose stores are not exported for mypy

RANKS = 3
SCHEMES = (
    "wfbp",
    "dear(wire='bf16')",
    "oktopk(0.05, wire='int8', schedule='dear')",
    "exdyna(0.05, momentum_correction=True)",
    "topka2a(0.05, schedule='local', warmup=6, wire='e3m0')",
    "wfbp(wire='sign')",
    "streaming_diloco(every=6, delay=1, fragments=2)",
    "sparseloco(every=4)",
)
# What a rank may have more at the end: some bytes of memory; and a descriptor for each
# other rank, at which it may have looked since the last new beginning, while it waited.
MORE = {"memory": 6 << 20, "descriptors": RANKS - 1, "threads": 0}
KEYS = (*MORE, "objects")
TIMEOUT = 60.0  # seconds: the group's
PAUSE = 0.02, 0.3  # seconds of a stop
BETWEEN = 0.5, 4.0  # seconds from one to the next


def state_of_process() -> dict[str, int]:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
    }


class Runner:
    """A rank's model, optimizer and replica, which begin anew."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.begin()

    def begin(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh()
        self.model = nn.Sequential(*layers, nn.Linear(20, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.sync = gradtide.replicate(self.model, self.optimizer, self.scheme)

    def step(self, x: torch.Tensor) -> None:
        (self.model(x) - 1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restart(self) -> None:
        """Save, remove, build and load: the run goes on with the same bits."""
        saved = self.model.state_dict(), self.optimizer.state_dict()
        state = self.sync.state_dict()
        self.sync.remove(end_round=False)
        self.begin()
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.sync.load_state_dict(state)

    def digest(self) -> str:
        """Of what all ranks have in common, after all that was done."""
        self.sync.flush()
        self.sync.end_round()
        return self.bits()

    def bits(self) -> str:
        found = hashlib.sha256()
        for p in self.model.parameters():
            found.update(p.detach().numpy().tobytes())
        return found.hexdigest()


def train(rank: int, scheme: str, steps: int, look: int, folder: Path) -> None:
    """A rank's program; it leaves what it saw every `look` steps."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=TIMEOUT)
    store = c10d.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=limit
    )
    runner, rng = Runner(scheme), torch.Generator().manual_seed(rank)
    own, seen = random.Random(rank), list[dict[str, Any]]()
    for step in range(1, steps + 1):
        runner.step(torch.randn(4, 16, generator=rng))
        if own.random() < 0.001:
            gc.collect()
        if step % look == 0:
            runner.restart()
            digests: list[Any] = [None] * RANKS
            dist.all_gather_object(digests, runner.digest())
            assert len({*digests}) == 1, f"ranks differ after {step} steps: {digests}"
            gc.collect()
            seen.append({"step": step, **state_of_process()})
    runner.sync.remove()
    names = [t.name for t in threading.enumerate() if "gradtide" in t.name]
    told = {"digest": runner.bits(), "seen": seen, "threads": names}
    (folder / f"rank{rank}").write_text(json.dumps(told))


def disturbed(ranks: list[Any], seed: int, seconds: float) -> int:
    """Stop a rank for a moment now and then, until all have ended; how often."""
    draw, stops, begin = random.Random(seed), 0, time.monotonic()
    while any(process.is_alive() for process in ranks):
        if time.monotonic() - begin > seconds or any(p.exitcode for p in ranks):
            break
        end = time.monotonic() + draw.uniform(*BETWEEN)
        while time.monotonic() < end and any(p.is_alive() for p in ranks):
            time.sleep(0.02)
        pid = draw.choice(ranks).pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(*PAUSE))
            os.kill(pid, signal.SIGCONT)
            stops += 1
    return stops


def soak(scheme: str, steps: int, seed: int, seconds: float) -> dict[str, Any]:
    """One scheme's training, and what was wrong with it."""
    fork, begin = mp.get_context("fork"), time.monotonic()
    look = max(steps // 40, 10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            fork.Process(target=train, args=(rank, scheme, steps, look, folder))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        stops = disturbed(ranks, seed, seconds)
        for process in ranks:
            process.join(5.0)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        files = [folder / f"rank{rank}" for rank in range(RANKS)]
        told = [json.loads(f.read_text()) if f.exists() else None for f in files]
    return {
        "scheme": scheme,
        "steps": steps,
        "stops": stops,
        "restarts": steps // look,
        "seconds": round(time.monotonic() - begin),
        "wrong": verdict(codes, told),
        "first and last": [
            each and {k: (each["seen"][0][k], each["seen"][-1][k]) for k in KEYS}
            for each in told
        ],
    }


def verdict(codes: list[int | None], told: list[Any]) -> list[str]:
    """What is wrong: ranks that failed, came apart, or grew."""
    wrong = [f"rank {r} ended with {code}" for r, code in enumerate(codes) if code != 0]
    if None in told:
        return wrong
    if len({each["digest"] for each in told}) > 1:
        wrong.append("ranks end with different parameters")
    for rank, each in enumerate(told):
        if each["threads"]:
            wrong.append(f"rank {rank} has threads left: {each['threads']}")
        seen = each["seen"]
        early = seen[: max(len(seen) // 4, 1)]
        for key, more in MORE.items():
            most = max(one[key] for one in early)
            if seen[-1][key] > most + more:
                wrong.append(f"rank {rank}: {key} {most} grew to {seen[-1][key]}")
    return wrong
