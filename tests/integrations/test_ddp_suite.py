"""A few of torch's own tests of DistributedDataParallel, through gradtide's class.

`benchmarks/ddp_suite.py` runs all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "benchmarks" / "ddp_suite.py"
FEW = "test_DistributedDataParallelCPU", "test_grads_same_across_ranks_with_no_sync"


@pytest.mark.slow
def test_a_few() -> None:
    pytest.importorskip("expecttest")
    command = [sys.executable, str(SUITE), "--ranks", "2", "--schemes", "dear"]
    names = "^(" + "|".join(FEW) + ")$"
    done = subprocess.run(
        [*command, "--only", names], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout[done.stdout.index("\n{") :])["2 ranks"]
    assert found["torch"] == {"passed": len(FEW)}
    assert found["dear"] == {"passed": len(FEW), "of": len(FEW), "not passed": {}}
