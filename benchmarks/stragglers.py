"""Steps that vary among ranks: what they cost, against what a plan says.

    python benchmarks/stragglers.py all --out benchmarks/records/stragglers_202611.json

Four ranks on one machine wait for 60 ms in every forward, or for so long on average: a
normal number with a deviation of 0, 10 and 30 %, other ones on every rank. Counted is
by how much longer a step takes than without deviation, where ranks wait for each other
after every step (`wfbp`, and `topka2a` of steps) and in rounds of ten. Beside it stands
what `Network.slowest` says.

    python benchmarks/stragglers.py grace --out benchmarks/records/grace_202611.json

Four ranks train the model of `elastic.py` in rounds of ten steps of 20 ms (`--every`),
and one of them needs four times as long for a step. With a grace the others do not wait
for all of its steps. Counted are rounds a second, the longest step of a rank that is
not slow, and the loss on held-out data when as many seconds are over, and as many
rounds. Beside it stand the same run without a slow rank, and one of the three others
alone.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import elastic
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import gradtide
from gradtide.elastic import Lighthouse
from gradtide.lab.record import origin
from gradtide.planner.network import Network
from gradtide.scheme import parse

RANKS, WAIT, STEPS, ROUNDS = 4, 0.06, 200, 3
SCHEMES = ("wfbp", "topka2a(0.1, schedule='local')", "diloco(every=10)")
SHARES = (0.0, 0.1, 0.3)

STEP, TIMES, SLOW = 0.02, 4, "d"  # of the runs with a grace
# What is told of a run, the ranks, the slow one, and the grace.
RUNS: tuple[tuple[str, str, str, float | None], ...] = (
    ("no rank is slow", "abcd", "", None),
    ("all wait for the slow one", "abcd", SLOW, None),
    ("grace=0.3", "abcd", SLOW, 0.3),
    ("grace=0.1", "abcd", SLOW, 0.1),
    ("the three others alone", "abc", "", None),
)

app = typer.Typer(pretty_exceptions_enable=False)


def build() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A small model, which takes no time beside the wait."""
    model = nn.Linear(200, 50)
    example = torch.ones(1, 200)
    return (
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        lambda: model(example).sum(),
    )


@app.command("rank")
def train(scheme: str, share: float, seed: int) -> None:
    """Train, and tell what a step took on average."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, loss = build()
    sync = gradtide.replicate(model, optimizer, scheme)
    rng = random.Random(1000 * seed + dist.get_rank())
    begin = 0.0
    for step in range(STEPS + 20):
        if step == 20:
            begin = time.monotonic()
        time.sleep(max(rng.gauss(WAIT, share * WAIT), 0.0))
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("seconds", (time.monotonic() - begin) / STEPS)
    sync.remove()
    dist.destroy_process_group()


def run(scheme: str, share: float, seed: int) -> float:
    """Seconds of a step."""
    command = ["torchrun", "--nproc-per-node", str(RANKS), __file__, "rank"]
    done = subprocess.run(
        [*command, scheme, str(share), str(seed)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("seconds "))
    return float(line.split()[1])


@app.command("all")
def main(
    out: Annotated[Path, typer.Option(help="Where the record is written.")],
) -> None:
    """Run all, one after the other, and write the record."""
    record: dict[str, Any] = {**origin(sys.argv), "rows": []}
    for scheme in SCHEMES:
        taken = {
            share: [run(scheme, share, i) for i in range(ROUNDS)] for share in SHARES
        }
        still = median(taken[0.0])
        for share in SHARES[1:]:
            there = replace(Network.ideal(RANKS, 1, 1e10), stragglers=share)
            factor = there.slowest(parse(scheme).schedule.every)
            told = 1 + (factor - 1) * WAIT / still
            row = {
                "scheme": scheme,
                "share": share,
                "step": median(taken[share]),
                "measured": median(taken[share]) / still,
                "predicted": told,
            }
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


# - With a grace -----------------------------------------------------------------------


def rank(name: str, address: str, how: tuple[Any, ...], seconds: float) -> Any:
    """Train for so many seconds; what came of it, on the first rank of every round."""
    every, ranks, slow, grace, seed = how
    model, optimizer = elastic.build(seed)
    members = Lighthouse(address, name=name, timeout=30, patience=60, grace=grace)
    scheme = f"diloco(every={every})"
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members)
    generator = torch.Generator().manual_seed(100 * seed + ord(name))
    pause = STEP * (TIMES if name == slow else 1)
    rounds: list[tuple[float, float]] = []  # seconds since the first one, and the loss
    longest, began = 0.0, time.monotonic()
    while not sync.stopping:
        sync.meet()
        begin = time.monotonic()
        x, y = elastic.batch(generator)
        (model(x) - y).square().mean().backward()
        time.sleep(pause)  # a larger model's backward
        optimizer.step()
        optimizer.zero_grad()
        longest = max(longest, time.monotonic() - begin)
        if name == ranks[0] and sync.metrics()["step"] % every == 0:
            with sync.shared_parameters():
                rounds.append((time.monotonic() - began, elastic.held_out(model)))
            if rounds[-1][0] > seconds:
                sync.stop()
    sync.end_round()
    told = sync.metrics()
    return {
        "digest": elastic.digest(model),
        "rounds": rounds,
        "longest": longest,
        "left out": told["left_out_steps"],
        "steps": told["step"],
    }


def process(name: str, address: str, how: Any, seconds: float, pipe: Any) -> None:
    """A rank's process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what torch has to say of a store that is gone
    try:
        pipe.send(rank(name, address, how, seconds))
        time.sleep(1)  # others may still have to hear of the end
    finally:
        os._exit(0)


def trial(how: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """What each rank has to tell of one run; RuntimeError if one fails or hangs."""
    fork, (house, address) = mp.get_context("fork"), elastic.lighthouse(len(how[1]))
    found, processes, open_ = dict[str, Any](), [], dict[Any, str]()
    try:
        for name in how[1]:
            own, others = fork.Pipe(duplex=False)
            args = name, address, how, seconds, others
            processes.append(fork.Process(target=process, args=args, daemon=True))
            processes[-1].start()
            others.close()
            open_[own] = name
        limit = time.monotonic() + 4 * seconds + 120
        while open_:
            ready = wait(list(open_), max(limit - time.monotonic(), 0.0))
            if not ready:
                raise RuntimeError(f"ranks {sorted(open_.values())} hang")
            for pipe in ready:
                told: Any = pipe
                try:
                    found[open_.pop(pipe)] = told.recv()
                except EOFError as error:
                    raise RuntimeError(f"a rank of {how} has failed") from error
    finally:
        for one in processes:
            one.kill()
        house.kill()
    return found


def summed_up(
    ranks: str, slow: str, runs: Sequence[Mapping[str, Any]], seconds: float, least: int
) -> dict[str, Any]:
    """A row of the table: of runs with several seeds."""
    firsts = [run[ranks[0]]["rounds"] for run in runs]
    fast = [run[name]["longest"] for run in runs for name in ranks if name != slow]
    shares = [run[slow]["left out"] / run[slow]["steps"] for run in runs if slow]
    in_time = [[x for x in rounds if x[0] <= seconds] for rounds in firsts]
    return {
        "rounds a second": round(mean(len(x) for x in in_time) / seconds, 3),
        "loss after these seconds": [round(x[-1][1], 4) for x in in_time],
        f"loss after {least} rounds": [round(x[least - 1][1], 4) for x in firsts],
        "longest step of another": round(max(fast), 3),
        "left out, of its steps": round(mean(shares), 3) if shares else 0.0,
        "alike": all(len({x["digest"] for x in run.values()}) == 1 for run in runs),
    }


@app.command("grace")
def graces(
    out: Annotated[Path, typer.Option(help="Where the record is written.")],
    every: Annotated[int, typer.Option(help="Steps of a round.")] = 10,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 40.0,
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
) -> None:
    """Train with a slow rank, and write the record."""
    record: dict[str, Any] = {**origin(sys.argv, "torchft"), "every": every}
    record |= {"seconds": seconds, "rows": []}
    record["command"] = f"python {shlex.join(sys.argv)}"
    loads = [os.getloadavg()[0]]
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):  # in turn, where the machine may be busy for a while
        for name, ranks, slow, grace in RUNS:
            one = trial((every, ranks, slow, grace, seed), seconds)
            found.setdefault(name, []).append(one)
            loads.append(os.getloadavg()[0])
            print(name, len(one[ranks[0]]["rounds"]), flush=True)
    kinds = {name: (ranks, slow) for name, ranks, slow, _ in RUNS}
    lengths = {
        len(run[kinds[name][0][0]]["rounds"])
        for name, runs in found.items()
        for run in runs
    }
    # Of the machine, on which others may run.
    record["load"] = {"least": round(min(loads), 1), "most": round(max(loads), 1)}
    record["rows"] = [
        {"run": name, **summed_up(*kinds[name], runs, seconds, min(lengths))}
        for name, runs in found.items()
    ]
    for row in record["rows"]:
        print(json.dumps(row))
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()
