"""Networks that change while `auto` trains: when it decides anew, and its worth.

    python benchmarks/changes.py all --out benchmarks/records/changes_202611.json

Four hosts train the lab's small language model. In the middle all links become slower,
or faster, by a factor of twenty. Counted are the steps from there to the new decision,
which may be to stay, and what a step takes after it, beside `wfbp` and beside what was
decided at first, through the same change. One run follows the other.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import gradtide
from gradtide.lab.cluster import Cluster
from gradtide.lab.events import Event, Slowed
from gradtide.lab.internet import Internet, Link
from gradtide.lab.internet import Path as Way
from gradtide.lab.launch import launch
from gradtide.lab.rate import parse_rate
from gradtide.lab.record import origin
from gradtide.lab.workloads import build

HOSTS = 4
CHANGES = (("1gbit", "50mbit"), ("50mbit", "1gbit"))
ASKED = ("auto", "auto(lossy=True)")
LAST = 20  # steps at the end, by which schemes are compared

LOG = logging.getLogger("gradtide")
app = typer.Typer(pretty_exceptions_enable=False)


@app.command("rank")
def train(workload: str, scheme: str, seconds: float) -> None:
    """Train for so long, and tell of each step when it was over, and by what."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, begin, words = dist.get_rank(), time.monotonic(), ""
    work = build(workload, rank, dist.get_world_size())
    sync = gradtide.replicate(work.model, work.optimizer, scheme)
    step = 0
    if rank == 0:
        LOG.addHandler(Decisions(logging.INFO))
        LOG.setLevel(logging.INFO)
    while not sync.stopping:
        work.loss(work.model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.optimizer.zero_grad()
        step, before, words = step + 1, words, repr(sync.scheme)
        if rank == 0:
            print("step", time.monotonic(), "" if before == words else words)
            if time.monotonic() - begin > seconds:
                sync.stop()
    sync.end_round()
    sync.remove()
    dist.destroy_process_group()


class Decisions(logging.Handler):
    """Tells when there was a decision."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("auto: "):
            print("decided", record.getMessage(), flush=True)


class Stamped(StringIO):
    """What the lab says of a change, with the moment at which it did."""

    moment: float | None = None

    def write(self, text: str) -> int:
        if text.startswith("lab, at") and self.moment is None:
            self.moment = time.monotonic()
        return sys.__stderr__.write(text) if sys.__stderr__ else 0


def run(
    workload: str, scheme: str, before: str, after: str, half: float
) -> dict[str, Any]:
    """One training: what it was trained with, and seconds of steps."""
    first, then = (parse_rate(rate) or 0.0 for rate in (before, after))
    events = tuple(Event(half, Slowed(h, then, then)) for h in range(HOSTS))
    internet = Internet.alike(HOSTS, Link(first, first, Way()), Way())
    internet = replace(internet, events=events)
    cluster = Cluster.emulating(HOSTS, 1, first, internet=internet)
    moments: list[float] = []
    chosen: list[tuple[int, str]] = []
    decided: list[tuple[int, str]] = []

    def note(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("decided "):
            decided.append((len(moments) + 1, line.removeprefix("decided ")))
        if rank == 0 and line.startswith("step "):
            _, moment, *words = line.strip().split(" ", 2)
            moments.append(float(moment))
            chosen.extend((len(moments), each) for each in words)

    command = [sys.executable, __file__, "rank", workload, scheme, str(2 * half)]
    with redirect_stderr(Stamped()) as told:
        launch(cluster, command, on_line=note, timeout=4 * half + 120)
    assert told.moment is not None, "the link never changed"
    change = sum(moment < told.moment for moment in moments)
    late = [step for step, _ in decided if step > change]
    seconds = [b - a for a, b in pairwise(moments)]
    settled = seconds[max([change + LAST, *late]) :] or seconds[-1:]
    return {
        "asked": scheme,
        "rates": [before, after],
        "steps": len(moments),
        "change after step": change,
        "chosen": [{"after step": step, "scheme": words} for step, words in chosen],
        "decided": [{"after step": step, "words": words} for step, words in decided],
        "steps to the decision": late[0] - change if late else None,
        "seconds before": median(seconds[:change][-LAST:]),
        "seconds after": median(settled[:LAST]),
        "pause": max(seconds[late[0] - 2 : late[0] + 1]) if late else None,
    }


def runs(workload: str, half: float, first: str) -> Iterator[dict[str, Any]]:
    """Of what is asked for, of what it decided at first, and of `wfbp`."""
    for before, after in [one for one in CHANGES if first in ("", one[0])]:
        seen = {"wfbp"}
        yield run(workload, "wfbp", before, after, half)
        for asked in ASKED:
            own = run(workload, asked, before, after, half)
            yield own
            decided = [one["scheme"] for one in own["chosen"]]
            known = re.sub(r", levels=1", "", decided[1]) if len(decided) > 1 else ""
            if known and known not in seen:
                seen.add(known)
                yield run(workload, known, before, after, half)


@app.command("all")
def main(
    out: Annotated[Path, typer.Option(help="Where the record is written.")],
    half: Annotated[float, typer.Option(help="Seconds before the change.")] = 60.0,
    workload: str = "gpt",
    first: Annotated[str, typer.Option(help="Only the change from this rate.")] = "",
) -> None:
    """Run all changes with all schemes, and write the record."""
    record: dict[str, Any] = {**origin(sys.argv), "workload": workload, "runs": []}
    for found in runs(workload, half, first):
        record["runs"].append(found)
        print(json.dumps(found, indent=1), flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()
