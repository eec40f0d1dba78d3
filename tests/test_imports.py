"""`import gradtide` loads what training needs; the rest, whoever asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib

MOST = 100  # modules of ours, the heads of rooms among them
# Of what import torch takes: 1.6 s of a processor that does nothing else.
SHARE = 1 / 12

# A collection of torch's objects, which takes twice as long as all of ours, falls into
# our import or behind it by chance: it is left out.
IMPORT = """
import gc, json, sys, time
start = time.process_time()
import torch
gc.disable()
begin, before = time.process_time(), set(sys.modules)
import gradtide
share = (time.process_time() - begin) / (begin - start)
print(json.dumps({"share": share, "loaded": sorted(set(sys.modules) - before)}))
"""

# Some steps on one rank, by each of the schemes in argv, in processes that have loaded
# no more than the two lines say. Prints what was loaded then, by schemes.
TRAIN = """
import json, os, sys
import torch, gradtide
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

def train(scheme):
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, optimizer, scheme)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.remove()
    torch.distributed.destroy_process_group()

found = {}
for scheme in sys.argv[1:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        train(scheme)
        with open(writing, "w") as file:
            json.dump(sorted(sys.modules), file)
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        found[scheme] = json.load(file)
print(json.dumps(found))
"""


def fresh(program: str, *words: str) -> Any:
    """What a program prints last, as JSON, in an interpreter of its own.

    It keeps what it compiles, as interpreters do unless they are told not to.
    """
    unlike = ("PYTHONDONTWRITEBYTECODE",)
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={name: value for name, value in os.environ.items() if name not in unlike},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ours(loaded: list[str], *rooms: str) -> list[str]:
    """The modules of gradtide; of some rooms, if they are named."""
    prefixes = tuple(f"gradtide.{room}" for room in rooms) or ("gradtide",)
    return [m for m in loaded if m.startswith(prefixes)]


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    found: dict[str, Any] = fresh(IMPORT)
    return found


@pytest.fixture
def loaded(imported: dict[str, Any]) -> list[str]:
    return list(imported["loaded"])


def test_few_modules(loaded: list[str]) -> None:
    assert "gradtide.replica" in loaded
    assert len(ours(loaded)) <= MOST, ours(loaded)


def test_what_no_plain_training_needs_is_not_loaded(loaded: list[str]) -> None:
    assert not ours(loaded, "planner", "lab", "optim", "profile", "simulate", "testing")
    assert not ours(loaded, "collectives.contrib", "collectives.tiled")
    assert ours(loaded, "kfac") == ["gradtide.kfac", "gradtide.kfac.config"]
    extras = ("numba", "llvmlite", "triton", "typer", "rich", "matplotlib", "psutil")
    assert not [m for m in loaded if m.partition(".")[0] in (*extras, "sklearn")]


def test_import_is_quick(imported: dict[str, Any]) -> None:
    """By the processor's time, beside torch's: others may use the machine, too."""
    shares = [imported["share"]]
    while min(shares) > SHARE and len(shares) < 3:
        shares.append(fresh(IMPORT)["share"])
    assert min(shares) <= SHARE, shares


@pytest.mark.timeout(300)  # three trainings, with all that they load
def test_a_scheme_loads_what_it_asks_for() -> None:
    loaded = fresh(TRAIN, "dear", "spd_kfac", "auto")
    for scheme, planner, kfac in (
        ("dear", False, False),
        ("spd_kfac", False, True),
        ("auto", True, False),
    ):
        found = loaded[scheme]
        assert bool(ours(found, "planner.auto")) == planner, scheme
        assert bool(ours(found, "planner")) == planner, scheme
        # The planner knows K-FAC, too: it predicts it.
        expected = kfac or planner
        assert ("gradtide.kfac.preconditioner" in found) == expected, scheme


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_torch_and_numpy_are_enough() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    names = [line.partition(">")[0] for line in project["dependencies"]]
    assert sorted(names) == ["numpy", "torch"]
    assert "gradtide[cli]" in project["optional-dependencies"]["lab"]
