"""The default process group of jobs that end when their answer is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

PROGRAM = """
import os
import torch, torch.distributed as dist
from gradtide.lab.group import begin
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

def threads():
    names = (f"/proc/self/task/{t}/comm" for t in os.listdir("/proc/self/task"))
    return sum("gloo" in open(name).read() for name in names)

begin()
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
import torch.distributed.nn.functional
dist.all_gather_object([None], 1)
during = threads()
dist.destroy_process_group()
print(during, threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told by /proc")
def test_its_threads_end_with_it() -> None:
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    during, after = map(int, done.stdout.split())
    assert during > 0
    assert after == 0
