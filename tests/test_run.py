"""`gradtide run`, and GRADTIDE_SCHEME: a program that names torch's class alone."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from gradtide import installing, parallel, run, startup
from gradtide.startup import sitecustomize

# Makes torch's class on two ranks, in the way that argv says.
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Framework(DDP): ...

def main(rank=None):
    if rank is None:
        dist.init_process_group("gloo")
    else:
        store = f"file://{sys.argv[2]}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for kind in (DDP, Framework):
        model = kind(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ours = "gradtide" in sys.modules and model.replica.scheme.schedule.update
        told = ["typer" in sys.modules, isinstance(model, DDP)]
        told = [dist.get_rank(), kind.__name__, ours, *told]
        # In one go: ranks share the pipe, and print() may write word by word.
        os.write(1, (" ".join(map(str, told)) + "\\n").encode())
    del model
    dist.destroy_process_group()

if __name__ == "__main__" and sys.argv[1] == "spawn":
    torch.multiprocessing.spawn(main, nprocs=2)
elif __name__ == "__main__":
    main()
"""
ALONE = "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_PORT='0')\n"
ALONE += "os.environ['MASTER_ADDR'] = '127.0.0.1'\n"


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def started(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.waits
@pytest.mark.parametrize(
    "how",
    [
        "outside",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("inside", "spawn")),
    ],
)
def test_a_program_is_reached_whoever_starts_its_ranks(program: str, how: str) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["gradtide", "run", "--scheme", "dear", "--"]
    found = {
        "outside": lambda: started(*ours, "-m", *torchrun, program, "x"),
        "inside": lambda: started(*torchrun, "-m", *ours, program, "x"),
        "spawn": lambda: started(*ours, program, "spawn", f"{program}.store"),
    }[how]()
    assert found.returncode == 0, found.stderr
    names = ("DistributedDataParallel", "Framework")
    expected = [f"{r} {name} forward False True" for r in range(2) for name in names]
    assert sorted(found.stdout.splitlines()) == sorted(expected)
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_the_environment_is_enough_for_an_installed_package(tmp_path: Path) -> None:
    line = Path(startup.__path__[0]).parents[1] / "gradtide_startup.pth"
    begin = f"import os\nexec({line.read_text()!r})\n"
    (tmp_path / "train.py").write_text(begin + ALONE + PROGRAM)
    command = [sys.executable, str(tmp_path / "train.py"), "x"]
    environment = {k: v for k, v in os.environ.items() if k != "GRADTIDE_SCHEME"}

    def told(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=100,
        )

    assert "Parallel forward False True" in told(GRADTIDE_SCHEME="dear").stdout
    assert "Parallel False False True" in told().stdout
    wrong = told(GRADTIDE_SCHEME="daer")
    assert wrong.returncode == 1
    assert "GRADTIDE_SCHEME='daer'" in wrong.stderr
    assert "did you mean 'dear'" in wrong.stderr


def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = 1\n")
    code = "import sys; print(sys.theirs, [type(f).__name__ for f in sys.meta_path][0])"
    code += "; print('gradtide' in sys.modules or 'torch' in sys.modules)"
    environment = run.environment("dear")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "Hook", "False"], done.stderr


def test_what_is_installed_is_undone_when_it_is_closed() -> None:
    def found() -> tuple[object, ...]:
        torchs, ours = installing.Torchs, parallel.DistributedDataParallel
        there = nn.parallel.DistributedDataParallel
        return there, torchs.__init__, ours.default_scheme

    before = found()
    with installing.install("dear"):
        during = found()
    assert not any(map(operator.is_, before, during))
    assert all(map(operator.is_, before, found()))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--scheme", "daer", "--", "train.py"], "did you mean 'dear'"),
        (["--scheme", "dear"], "say what to run"),
        (["--", "nowhere.py"], "there is no file nowhere.py"),
        (["--", "no-such-program"], "there is no program no-such-program"),
        (["train.py", "--lr", "1"], "after --, as in: -- train.py --lr 1"),
        (["--shceme", "dear", "--", "train.py"], "unrecognized arguments: --shceme"),
    ],
)
def test_wrong_words_are_answered(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err


def test_what_is_run_and_in_which_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    python, folder = sys.executable, startup.__path__[0]
    assert run.command_of(["train.py", "a"]) == [python, "train.py", "a"]
    assert run.command_of(["-m", "package"]) == [python, "-m", "package"]
    assert run.command_of(["torchrun", "a.py"]) == ["torchrun", "a.py"]
    monkeypatch.setenv("PYTHONPATH", "mine")
    environment = run.environment("dear")
    assert environment["GRADTIDE_SCHEME"] == "dear"
    assert environment["PYTHONPATH"] == f"{folder}{os.pathsep}mine"
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    assert run.environment("wfbp")["PYTHONPATH"] == environment["PYTHONPATH"]


def test_a_class_is_armed_once_and_says_where_gradtide_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Torchs:
        def __init__(self) -> None:
            self.plain = True

    monkeypatch.setenv("GRADTIDE_SCHEME", "dear")
    monkeypatch.setitem(sys.modules, "gradtide.installing", None)
    sitecustomize.arm(Torchs)
    for _ in range(2):  # never a plain one without a word
        with pytest.raises(RuntimeError, match="cannot be imported here"):
            Torchs()
    monkeypatch.delenv("GRADTIDE_SCHEME")
    assert Torchs().plain
