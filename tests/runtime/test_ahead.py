"""No step imports or compiles anything that could have been before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradtide.collectives import COLLECTIVES
from gradtide.core.payload import traits
from gradtide.selectors import kernels
from gradtide.testing import check_law

# Trains by every scheme of argv on two ranks, forked from a fresh interpreter; before a
# colon stands whether the optimizer is "passed" or "found". Prints what rank 0's steps
# loaded, and what numba compiled in them.
PROGRAM = """
import json, os, sys, tempfile
import torch, torch.distributed as dist
import gradtide
from numba.core import event  # not ours: every rank would take seconds for it

def train(scheme, rank, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    model, optimizer = made()
    found, _, text = scheme.partition(": ")
    replica = gradtide.replicate(model, optimizer if found == "passed" else None, text)
    compiled = event.RecordingListener()
    event.register("numba:compile", compiled)
    before = set(sys.modules)
    for _ in range(9):
        step(model, optimizer)
    now = sorted(set(sys.modules) - before)
    now += [str(data.data) for _, data in compiled.buffer]
    replica.remove()
    return now

def made():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer):
    model(torch.randn(4, 64)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

torch.set_num_threads(1)
step(*made())  # what every training loads
for scheme in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                found = train(scheme, rank, f"{folder}/store")
                if rank == 0:
                    print(json.dumps([scheme, found]), flush=True)
                os._exit(0)
        for pid in ranks:
            assert os.waitpid(pid, 0)[1] == 0, scheme
"""


def first_in_steps(*schemes: str, **environment: str) -> dict[str, list[str]]:
    """What the steps of each scheme load, and compile, for the first time."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *schemes],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_of_recipes_load_and_compile_nothing() -> None:
    pytest.importorskip("numba")
    passed = [
        "dear(wire='int8')",
        "topka2a(0.02, schedule='local', warmup=6, wire='e3m0')",
        "oktopk(0.02, schedule='local', warmup=6)",
        "exdyna(0.02, warmup=6, momentum_correction=True)",
        "powersgd(4)",
        "streaming_diloco(every=9)",
    ]
    found = ["dear", "diloco(every=2)", "pad_kfac"]
    auto = "passed: auto(steps=4)"
    schemes = [f"passed: {s}" for s in passed] + [f"found: {s}" for s in found]
    loaded = first_in_steps(*schemes, auto)
    # Its decision is one step, in which the planner is loaded.
    assert not [name for name in loaded.pop(auto) if "numba" in name]
    ours = {
        scheme: [name for name in names if not name.startswith("torch.")]
        for scheme, names in loaded.items()
    }
    assert ours == {scheme: [] for scheme in schemes}


@pytest.mark.slow
@pytest.mark.alone  # compiles for longer than all other tests of this file take
@pytest.mark.timeout(300)
def test_with_an_empty_cache_steps_compile_nothing(tmp_path: Path) -> None:
    """Steps call nothing with arguments that were not prepared."""
    pytest.importorskip("numba")
    schemes = [
        "passed: topka2a(0.02, schedule='local', warmup=6, wire='e3m0')",
        "passed: exdyna(0.02, warmup=6, momentum_correction=True, wire='sign')",
        "passed: dear(wire='int8')",
    ]
    found = first_in_steps(*schemes, NUMBA_CACHE_DIR=str(tmp_path))
    assert found == {scheme: [] for scheme in schemes}


@pytest.mark.product
@pytest.mark.parametrize("kind", [k for k in COLLECTIVES if k.__name__ != "Dense"])
def test_collectives_say_whether_they_scan(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a collective says of itself decides what is prepared for it."""
    asked = []
    find = kernels._scan
    monkeypatch.setattr(kernels, "_scan", lambda *args: asked.append(1) or find(*args))
    for size in (2, 3):
        check_law(
            kind(),
            size,
            numel=20_000 * size,
            steps=4,
            dtype=torch.float32,
            tolerance=1e-4,
        )
    assert bool(asked) == traits(kind()).scans
