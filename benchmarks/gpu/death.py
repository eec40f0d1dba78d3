"""A rank that is killed in training: the others name it, and end by themselves."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.model import TINY, Entrant, adamw, transformer
from gpu.ranks import joined, transports
from gpu.results import Bar, Book, right
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster, rank_environment

DEAD = 1
WITHIN = 30.0  # seconds until nobody is left
STEPS = 5  # before the kill
BEGIN = 60.0  # seconds that these may take
SIZES = {"nccl": 2, "gloo": 3}
TRIALS = {
    f"{transport} {scheme}": (transport, scheme)
    for scheme in ("wfbp", "dear")
    for transport in SIZES
}
BARS = tuple(
    bar
    for name in TRIALS
    for bar in (
        Bar(f"{name}: seconds until all have ended", name, "seconds", WITHIN),
        right(f"{name}: named by all that survive", name, "named"),
    )
)
START = "import json, sys; from gpu.death import train; train(*json.loads(sys.argv[1]))"


def measure(book: Book, setting: Setting) -> None:
    there = transports(setting)
    trials = {n: each for n, each in TRIALS.items() if each[0] in there}
    if setting.tiny:
        trials = dict(list(trials.items())[:1])
    book.measure({n: partial(kill, setting, *each) for n, each in trials.items()})
    lost = [name for name, (transport, _) in TRIALS.items() if transport not in there]
    book.skip(lost, "needs a CUDA device")


def kill(setting: Setting, transport: str, scheme: str) -> dict[str, Any]:
    """Seconds from the kill until all have ended, and whether they say who is gone."""
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder, "begun")
        arguments = setting.device, transport, scheme, str(begun)
        try:
            ranks.extend(start(SIZES[transport], arguments))
            end = time.monotonic() + BEGIN
            while not begun.exists() and time.monotonic() < end:
                if any(rank.poll() is not None for rank in ranks):
                    break
                time.sleep(0.05)
            assert begun.exists(), said(ranks)
            killed = time.monotonic()
            ranks[DEAD].kill()
            others = [rank for rank in ranks if rank is not ranks[DEAD]]
            words = []
            for rank in others:
                try:
                    left = killed + WITHIN + 10 - time.monotonic()
                    words.append(rank.communicate(timeout=max(left, 0.1))[0])
                except subprocess.TimeoutExpired:
                    words.append("it has not ended")
            seconds = time.monotonic() - killed
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    blamed = re.compile(rf"\brank {DEAD} (is gone|does not respond)")
    return {
        "seconds": seconds,
        "named": all(blamed.search(each) is not None for each in words),
        "said": [each.strip().rpartition("\n")[2][-300:] for each in words],
        "codes": [rank.returncode for rank in others],
    }


def start(size: int, arguments: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Ranks that nobody ends but they themselves: not the lab's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [
        subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(arguments)],
            env={**os.environ, **rank_environment(Cluster(size), rank, port), **paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def said(ranks: Sequence[subprocess.Popen[str]]) -> str:
    for rank in ranks:
        rank.kill()
    return " / ".join(rank.communicate()[0][-300:] for rank in ranks)


# - On every rank ----------------------------------------------------------------------


def train(device: str, transport: str, scheme: str, begun: str) -> None:
    """Until another rank has ended."""
    setting = Setting(device)
    with joined(setting, 60) as groups:
        model = transformer(setting, TINY)
        group = groups.of(transport)
        entrant = Entrant(scheme, model, adamw(setting, model), group)
        tokens = torch.randint(TINY.vocabulary, (2, 33)).to(device)
        for step in range(100_000):
            entrant.step(tokens)
            if step == STEPS and groups.rank == DEAD:
                Path(begun).touch()
