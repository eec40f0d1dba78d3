"""Jobs: their process group ends with its threads, and their answers come back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.job import gathered, joined, on_every_rank, passed_on

PROGRAM = """
import os
import torch, torch.distributed as dist
from gradtide.lab.job import joined
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

def threads():
    names = (f"/proc/self/task/{t}/comm" for t in os.listdir("/proc/self/task"))
    return sum("gloo" in open(name).read() for name in names)

with joined():
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    import torch.distributed.nn.functional
    dist.all_gather_object([None], 1)
    during = threads()
print(during, threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are told by /proc")
def test_its_threads_end_with_it() -> None:
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    during, after = map(int, done.stdout.split())
    assert during > 0
    assert after == 0


def _work(words: str) -> list[str] | None:
    with joined() as (rank, size):
        if rank == 0:
            passed_on(words)
            print("seen", flush=True)
        dist.barrier()
        return gathered(f"{rank} of {size}")


def _fail(words: str) -> None:
    passed_on(words)
    raise KeyError("the cause")


def test_the_answer_of_rank_0_comes_back() -> None:
    told: list[str] = []
    seen: list[tuple[int, str]] = []
    answer = on_every_rank(
        Cluster(2),
        _work,
        "Swap of 1 MB",
        tell=told.append,
        show=lambda rank, line: seen.append((rank, line)),
    )
    assert answer == ["0 of 2", "1 of 2"]
    assert told == ["Swap of 1 MB"]
    assert seen == [(0, "seen")]


def _path() -> list[str]:
    return sys.path


def test_modules_in_the_current_folder_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sklearn", "numpy", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module')")
    monkeypatch.chdir(tmp_path)
    path = on_every_rank(Cluster(1), _path, show=lambda rank, line: None)
    assert not {"", ".", str(tmp_path)} & set(path)


def test_progress_is_kept_out_of_failures() -> None:
    with pytest.raises(LabError, match="exit code 1") as raised:
        on_every_rank(Cluster(1), _fail, "Swap", show=lambda rank, line: None)
    assert raised.value.lines[0].startswith("Traceback")
    assert raised.value.lines[-1] == "KeyError: 'the cause'"
    assert "progress" not in str(raised.value)
