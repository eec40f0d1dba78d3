"""Ranks that are killed at random moments: does every survivor say so, and who it was?

    python benchmarks/kills.py --kills 300 --out benchmarks/records/kills_202611.json

Ranks train for some steps, remove the replica and begin anew, until one of them gets
SIGKILL: while ranks meet and connect, in a first forward, in backward and step, in a
round, at the end. Every other rank has to end within `LIMIT` seconds, by an error that
names the one that was killed. Every second job has its store in rank 0. What a trial
does follows from its seed alone, but for the moment: the clock decides on that.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # or every rank does, at length
import torch.distributed as dist
import typer
from torch import nn

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.spec import split_schemes
from gradtide.runtime import join  # noqa: F401  # as above
from gradtide.runtime.ahead import prepare
from gradtide.runtime.exchange import rounds  # noqa: F401  # as above
from gradtide.scheme import as_scheme
from gradtide.scheme.recommended import RECOMMENDED

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile:
# five seconds where no name server does.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

c10d: Any = dist  # whose stores are not exported for mypy

LIMIT = 5.0  # seconds that a survivor may take
GROUP = 60.0  # seconds: the group's timeout, which nobody may wait for
EARLY = 0.25  # seconds in which ranks connect: every second kill falls there
LATE = 2.5  # seconds: trainings have begun anew by then
STEPS = 12
# What README recommends, with warm-ups that end within these steps, and rounds.
SCHEMES = [
    re.sub(r"warmup=\d+", "warmup=6", row.recipe)
    for row in RECOMMENDED
    if row.recipe != "auto"
]
SCHEMES += ["diloco(every=4)", "sparseloco(every=4)"]


def train(rank: int, scheme: str, ready: Any) -> None:
    """Train, remove and begin anew; it ends when another rank has."""
    while True:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 8))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ready.set()
        sync = gradtide.replicate(model, optimizer, scheme)
        for _ in range(STEPS):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.end_round()
        sync.remove()


def work(rank: int, size: int, folder: str, scheme: str, ready: Any) -> None:
    """A rank's program; what it raises, and when, is left in a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what torch has to say of a store that is gone
    port = Path(folder, "port").read_text() if Path(folder, "port").exists() else ""
    limit = timedelta(seconds=GROUP)
    store: Any = c10d.FileStore(str(Path(folder, "store")), size)
    if port:
        store = c10d.TCPStore("127.0.0.1", int(port), size, rank == 0, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    try:
        train(rank, scheme, ready)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
        Path(folder, f"rank{rank}").write_text(told)
        raise


def free_port() -> int:
    """A port that nobody has at the moment."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def trial(seed: int, schemes: list[str]) -> dict[str, Any]:
    """One job, one kill; who survived, what they said, and after how many seconds."""
    draw = random.Random(seed)
    size, scheme = draw.choice((2, 3, 4)), schemes[seed % len(schemes)]
    dead, hosted = draw.randrange(size), bool(draw.randrange(2))
    wait = draw.uniform(0, EARLY if draw.randrange(2) else LATE)
    fork = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        if hosted:
            Path(folder, "port").write_text(str(free_port()))
        ready = [fork.Event() for _ in range(size)]
        ranks = [
            fork.Process(target=work, args=(r, size, folder, scheme, ready[r]))
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        for each in ready:  # torch's own beginning is not gradtide's
            each.wait(GROUP)
        time.sleep(wait)
        pid = ranks[dead].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed, ended = time.monotonic(), dict[int, float]()
        others = [r for r in range(size) if r != dead]
        while len(ended) < len(others) and time.monotonic() - killed < GROUP:
            time.sleep(0.02)
            for rank in others:
                if rank not in ended and not ranks[rank].is_alive():
                    ended[rank] = time.monotonic() - killed
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        told = {
            r: file.read_text()
            for r in others
            if (file := Path(folder, f"rank{r}")).exists()
        }
    names = re.compile(rf"\brank {dead} (is gone|does not respond)")
    wrong = [
        f"rank {r} after {ended.get(r, GROUP):.1f} s: {told.get(r, 'no word')}"
        for r in others
        if ended.get(r, GROUP) > LIMIT or not names.search(told.get(r, ""))
    ]
    return {
        "seed": seed,
        "scheme": scheme,
        "ranks": size,
        "killed": dead,
        "store in rank 0": hosted,
        "wait": round(wait, 3),
        "exit codes": codes,
        "seconds": round(max(ended.values(), default=GROUP), 2),
        "where": Counter(where(text) for text in told.values()).most_common(1),
        "wrong": wrong,
    }


def where(text: str) -> str:
    """What a survivor was at: the request that failed."""
    found = re.search(r"rank \d+: (\S+) failed|(waits in vain)|(connecting)", text)
    return "?" if found is None else next(filter(None, found.groups()))


def main(
    kills: Annotated[int, typer.Option(help="How many jobs, one kill each.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the first job.")] = 0,
    schemes: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(
        SCHEMES
    ),
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Kill a rank in so many jobs, and say which survivors were wrong."""
    begin, found = time.monotonic(), list[dict[str, Any]]()
    names = list(split_schemes(schemes))
    for name in names:  # before the fork, so that no job is about loading and compiling
        prepare([torch.zeros(1)], as_scheme(name))
    for number in range(seed, seed + kills):
        found.append(trial(number, names))
        for wrong in found[-1]["wrong"]:
            print(f"{ {**found[-1], 'wrong': wrong} }", flush=True)
    times = sorted(each["seconds"] for each in found)
    results = {
        "kills": len(found),
        "wrong": sum(bool(each["wrong"]) for each in found),
        "before the first step": sum(each["wait"] < EARLY for each in found),
        "median seconds": times[len(times) // 2],
        "longest seconds": times[-1],
        "took seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(results, indent=2))
    if out is not None:
        where = f"--kills {kills} --seed {seed} --out benchmarks/records/{out.name}"
        about: dict[str, Any] = {
            "command": f"python benchmarks/kills.py {where}",
            "commit": commit(),
        }
        about |= {"versions": versions(), "machine": machine()}
        record = {**about, "results": results, "trials": found}
        out.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    typer.run(main)
