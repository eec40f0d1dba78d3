"""A program may end right behind its last step, and a failed one ends at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

# As in the README: nothing is called at the end but what DDP wants, too.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import gradtide

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sync = gradtide.replicate(model, optimizer, sys.argv[1])
for step in range(3):
    if step == 2 and rank == int(sys.argv[2]):
        raise ArithmeticError("no such luck")
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def started(scheme: str, failing: int, tmp_path: Path) -> list[subprocess.Popen[str]]:
    """The program on two ranks, one of which may fail."""
    port = 20000 + os.getpid() % 20000
    (tmp_path / "program.py").write_text(PROGRAM)
    return [
        subprocess.Popen(
            [sys.executable, "program.py", scheme, str(failing)],
            cwd=tmp_path,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_a_program_ends_well_behind_its_last_step(tmp_path: Path) -> None:
    for process in started("topka2a(0.1, schedule='dear')", -1, tmp_path):
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said


@pytest.mark.slow
def test_a_rank_that_failed_waits_for_nobody(tmp_path: Path) -> None:
    other, failed = started("dear", 1, tmp_path)
    _, said = failed.communicate(timeout=100)
    ended = time.monotonic()
    assert "no such luck" in said
    assert failed.returncode != 0
    _, said = other.communicate(timeout=100)
    assert "Error" in said  # it ends behind its last step, but not in silence
    assert time.monotonic() - ended < 50
