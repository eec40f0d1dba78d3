"""Ranks that are killed while the others train on, and ranks that come back.

    python benchmarks/elastic.py --out benchmarks/records/elastic_202611.json

Four ranks train a small model, counted by a lighthouse of torchft's. Every 50 steps one
of them gets SIGKILL, and a new one takes its place after some steps, or never does.
Beside each run there is one that nobody disturbs, from the same seed: what a rank
trains on follows from its number and the seed. With `--together` it is all ranks that
are killed, every 200 steps, and as many or one fewer or more take their places, which
go on from what a `Checkpointer` saved, of every `SAVES` steps. With `--divided` the
same number of samples is in every step: fewer ranks take more each. Counted are ranks
that ended for another reason, the longest stall of a rank that lived, steps that are
lost, whether all ranks end with the same parameters, the loss on held-out data, and
goodput: steps a second, as a share of those of the undisturbed run. `torchft` is
torchft's own Manager, which averages the gradients of one flat tensor, with the same
kills. `restarts` is what torchrun does: at once when a rank is killed all others are,
too, and as many new processes load torch, and go on from the last save, of every
`SAVES` steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing as mp
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
import torch._dynamo  # or every rank does, at length
import torch.distributed as dist
import typer
from torch import Tensor, nn

import gradtide
from gradtide.checkpoint import Checkpointer
from gradtide.elastic import Lighthouse
from gradtide.lab.record import origin
from gradtide.lab.spec import split_schemes
from gradtide.runtime import join  # noqa: F401  # as above
from gradtide.runtime.ahead import prepare
from gradtide.runtime.exchange import rounds  # noqa: F401  # as above
from gradtide.runtime.exchange import steps as exchanged  # noqa: F401
from gradtide.scheme import as_scheme

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
c10d: Any = dist  # whose stores are not exported for mypy
RANKS, EVERY, PAUSE, SAVES = 4, 50, 0.02, 10
SAMPLES = 16  # of a rank, in a step
TOGETHER = 200  # steps between two kills of all ranks
HEARTBEAT = 1.0  # seconds after which the lighthouse takes a silent rank for lost
STALL = 5.0  # seconds that a loss may take beyond that
SCHEMES = (
    "wfbp",
    "exdyna(0.05, schedule='local', warmup=60, wire='e3m0')",
    "diloco(every=10)",
)
OTHERS = "torchft", "restarts"
CASES: tuple[tuple[int, int | None], ...] = (0, None), (1, 20), (1, None)
ALL: tuple[tuple[int, int | None], ...] = (0, None), (RANKS, None)
torch.set_num_threads(1)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, other on every rank until it is replicated, and its optimizer."""
    torch.manual_seed(seed)
    layers = (nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(96, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def batch(generator: torch.Generator, size: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Inputs, and noisy targets: a loss that has an end."""
    weight = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
    x = torch.randn(size, 32, generator=generator)
    noise = 0.3 * torch.randn(size, 8, generator=generator)
    return x, torch.tanh(x @ weight / 4) + noise


def held_out(model: nn.Module) -> float:
    """The loss on data that nobody trains on."""
    x, y = batch(torch.Generator().manual_seed(11), 4096)
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def digest(model: nn.Module) -> str:
    """What tells the parameters' bits from others."""
    held = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(held).hexdigest()[:16]


def seeded(name: str) -> torch.Generator:
    """What a rank's data come from; its name ends with the seed of the run."""
    return torch.Generator().manual_seed(crc32(name.encode()))


def ours(name: str, where: Where, scheme: str, total: int, tell: Any) -> None:
    """A rank of gradtide's; it has a Checkpointer if there is a folder."""
    model, optimizer = build(crc32(name.encode()) % 1000)
    members = Lighthouse(where.address, name=name, timeout=30, patience=60)
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members)
    saved: Checkpointer | None = None
    if where.folder:
        how: Any = {"model": model, "optimizer": optimizer, "every": SAVES}
        saved = Checkpointer(where.folder, sync, **how)
        saved.resume()
    generator = seeded(name)
    while (step := sync.meet()) < total:
        size = SAMPLES
        if where.divides:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            first, end = (RANKS * SAMPLES * r // ranks for r in (rank, rank + 1))
            size = end - first
            sync.weight(size)
        x, y = batch(generator, size)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saved is not None:
            saved.step()
        time.sleep(PAUSE)  # a larger model
        tell(("step", step))
    sync.end_round()
    sync.flush()
    if saved is not None:
        saved.close()
    told = sync.metrics()
    tell(("end", digest(model), held_out(model), told["lost_steps"]))


def theirs(name: str, where: Where, scheme: str, total: int, tell: Any) -> None:
    """A rank of torchft's."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model, optimizer = build(0)
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=where.address,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=60),
        hostname="127.0.0.1",
    )
    outer = Optimizer(manager, optimizer)
    generator, lost = seeded(name), 0
    while (step := manager.current_step()) < total:
        x, y = batch(generator)
        outer.zero_grad()
        (model(x) - y).square().mean().backward()
        params = [*model.parameters()]
        flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        manager.allreduce(flat).wait()
        parts = torch.split(flat, [p.numel() for p in params])
        for p, part in zip(params, parts, strict=True):
            p.grad = part.view_as(p)
        outer.step()
        lost += manager.current_step() == step
        time.sleep(PAUSE)
        tell(("step", step))
    tell(("end", digest(model), held_out(model), lost))


def again(name: str, where: Where, scheme: str, total: int, tell: Any) -> None:
    """A rank that trains by `wfbp` from the last save on; its name has its number."""
    round_, rank = divmod(int(name.split()[0].removeprefix("rank")), RANKS)
    store = c10d.FileStore(f"{where.folder}/store{round_}", RANKS)
    limit = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=limit
    )
    model, optimizer = build(0)
    sync = gradtide.replicate(model, optimizer, "wfbp")
    generator = seeded(name)
    saved = Checkpointer(
        f"{where.folder}/saved", sync, model=model, optimizer=optimizer, every=SAVES
    )
    saved.resume()
    while saved.steps < total:
        x, y = batch(generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved.step()
        time.sleep(PAUSE)
        tell(("step", saved.steps))
    saved.close()
    tell(("end", digest(model), held_out(model), 0))


def run(
    name: str, where: Where, scheme: str, total: int, pipe: Any, quiet: bool
) -> None:
    """A rank's process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # what torch has to say of a store that is gone
    else:
        logging.basicConfig(
            level=logging.INFO, format=f"%(asctime)s {name} %(message)s"
        )
    try:
        work = {"torchft": theirs, "restarts": again}.get(scheme, ours)
        work(name, where, scheme, total, pipe.send)
        time.sleep(1)  # others may still have to hear of the end
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        os._exit(0)


def lighthouse(least: int = 1) -> tuple[subprocess.Popen[str], str]:
    """A lighthouse of so many ranks at least, a process of its own; its address."""
    beat = int(1e3 * HEARTBEAT)
    program = (
        "import sys; from torchft.coordination import LighthouseServer\n"
        f"house = LighthouseServer('[::]:0', {least}, 30000, 20, {beat})\n"
        "print(house.address(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    house = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
    assert house.stdout is not None
    port = house.stdout.readline().strip().rsplit(":", 1)[1].strip("/")
    return house, f"http://127.0.0.1:{port}"


@dataclass(frozen=True)
class Where:
    """The lighthouse's address, and the folder to save in, if any.

    `divides`: as many samples are in every step, however many ranks there are.
    """

    address: str
    folder: str = ""
    divides: bool = False


@dataclass
class Rank:
    """A process, what it has told, and when it told of its last step."""

    process: Any
    pipe: Any
    last: float = 0.0
    step: int = 0
    longest: float = 0.0
    ended: tuple[Any, ...] = ()
    killed: bool = False

    def told(self) -> Iterator[int]:
        """The steps that one which was killed has told of, and nobody has heard."""
        with suppress(EOFError):
            while True:
                kind, step, *_ = self.pipe.recv()
                if kind == "step":
                    yield step


def trial(
    scheme: str,
    total: int,
    kills: int,
    back: int | None,
    seed: int,
    quiet: bool,
    divides: bool = False,
) -> dict[str, Any]:
    """One run, in which so many ranks are killed at a time.

    One that was killed alone is `back` so many steps later.
    """
    draw = random.Random(seed)
    processes: Any = mp.get_context("spawn" if scheme == "restarts" else "fork")
    every = TOGETHER if kills == RANKS else EVERY
    house, address = lighthouse(RANKS - 1 if kills == RANKS else 1)
    folder = tempfile.TemporaryDirectory()
    saves = scheme == "restarts" or kills == RANKS
    where = Where(address, folder.name if saves else "", divides)
    ranks, number = dict[str, Rank](), iter(range(10**6))
    undone = list[int]()  # steps, by a kill of all

    def start() -> None:
        name = f"rank{next(number):04d} of {seed}"
        own, others = processes.Pipe(duplex=False)
        args = name, where, scheme, total, others, quiet
        process = processes.Process(target=run, args=args, daemon=True)
        process.start()
        others.close()
        ranks[name] = Rank(process, own)

    for _ in range(RANKS):
        start()
    at, returns, begin, first = every, list[int](), time.monotonic(), 0.0
    killed = awaited = 0
    limit = begin + 300 + total * 0.3
    while time.monotonic() < limit:
        open_: dict[Any, Rank] = {
            r.pipe: r for r in ranks.values() if not (r.ended or r.killed)
        }
        if not open_:
            break
        for pipe in wait(list(open_), 1.0):
            rank = open_[pipe]
            told: Any = ()
            try:
                told = rank.pipe.recv()
            except EOFError:
                rank.ended = "died", rank.process.exitcode
                continue
            now = time.monotonic()
            if told[0] == "step":
                first = first or now
                if awaited and not rank.last:
                    undone.append(awaited - told[1])
                    awaited = 0
                if rank.last:
                    rank.longest = max(rank.longest, now - rank.last)
                rank.last, rank.step = now, told[1]
            else:
                rank.ended = told
        lives = [r for r in ranks.values() if not r.killed]
        seen = max((r.step for r in lives), default=0)
        alive = [r for r in ranks.values() if not (r.killed or r.ended)]
        if kills and at <= seen < total - every // 2:
            at += every
            if kills == RANKS:
                time.sleep(draw.uniform(0, 0.3))
                for rank in alive:
                    rank.process.kill()
                    rank.killed = True
                    seen = max([seen, *rank.told()])
                killed, awaited = killed + len(alive), seen
                for _ in range(draw.choice((RANKS - 1, RANKS, RANKS + 1))):
                    start()
            elif len(alive) > 1:
                victim = draw.choice(alive)
                os.kill(victim.process.pid, signal.SIGKILL)
                victim.killed = True
                killed += 1
                if scheme == "restarts":
                    for other in alive:
                        other.process.kill()
                        other.killed = True
                    for _ in range(RANKS):
                        start()
                elif back is not None:
                    returns.append(seen + back)
        while returns and seen >= returns[0]:
            returns.pop(0)
            start()
    took = time.monotonic() - first
    for rank in ranks.values():
        rank.process.kill()
    house.kill()
    folder.cleanup()
    lived = [r for r in ranks.values() if not r.killed]
    good = [r.ended for r in lived if r.ended[:1] == ("end",)]
    wrong = [str(r.ended or "hung") for r in lived if r.ended[:1] != ("end",)]
    return {
        "scheme": scheme,
        "steps": total,
        "seed": seed,
        "kills": killed,
        "back after steps": back,
        **({"steps undone, at most": max(undone)} if undone else {}),
        "wrong": wrong,
        "alike": len({one[1] for one in good}) == 1,
        "loss": good[0][2] if good else None,
        "lost steps": max((int(one[3]) for one in good), default=None),
        "longest stall": round(max((r.longest for r in lived), default=0.0), 2),
        "steps a second": round(total / took, 2),
    }


def main(
    schemes: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(
        (*SCHEMES, "torchft", "restarts")
    ),
    steps: Annotated[int, typer.Option(help="Of each run.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Runs of each case.")] = 1,
    together: Annotated[bool, typer.Option(help="Kill all ranks at once.")] = False,
    returns: Annotated[bool, typer.Option(help="No runs without returns.")] = False,
    divided: Annotated[
        bool, typer.Option(help="As many samples in a step, however many ranks.")
    ] = False,
    loud: Annotated[bool, typer.Option(help="Print what ranks log.")] = False,
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Train undisturbed, with kills and returns, and with kills alone."""
    found, about = list[dict[str, Any]](), origin(sys.argv, "torchft")
    about["command"] = f"python {shlex.join(sys.argv)}"
    names = list(split_schemes(schemes))
    for name in names:  # before the fork, so that no run is about loading and compiling
        if name not in OTHERS:
            prepare([torch.zeros(1)], as_scheme(name))
    losses = defaultdict[tuple[str, int, int | None], list[float]](list)
    for name, seed in product(names, range(seeds)):
        undisturbed: dict[str, Any] = {}
        # With restarts no run goes on with fewer.
        for case in (
            ALL if together else CASES[: 2 if name == "restarts" or returns else 3]
        ):
            key, one = (name, *case), trial(name, steps, *case, seed, not loud, divided)
            undisturbed = undisturbed or one
            one["goodput"] = round(
                one["steps a second"] / undisturbed["steps a second"], 3
            )
            if one["loss"] and undisturbed["loss"]:
                one["loss, times"] = round(one["loss"] / undisturbed["loss"], 4)
                losses[key].append(one["loss, times"])
            found.append(one)
            print(json.dumps(one), flush=True)
            if out is not None:
                medians = [
                    {"scheme": n, "killed at once": k, "back": b, "loss, times": v}
                    for (n, k, b), each in losses.items()
                    for v in [round(statistics.median(each), 4)]
                ]
                record = {**about, "medians": medians, "results": found}
                out.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    typer.run(main)
