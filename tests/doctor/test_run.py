"""The whole examination: by processes on loopback, and over a link that is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lab.emulated import needs_distance, needs_networks
from tests.ports import free_port
from typer.testing import CliRunner

from gradtide.cli import app
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.internet import Internet, Link
from gradtide.lab.internet import Path as Way
from gradtide.lab.launch import launch

pytestmark = pytest.mark.timeout(240)

DOCTOR = [sys.executable, "-m", "gradtide", "doctor"]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CLEAN = {k: v for k, v in os.environ.items() if k not in NAMES and "SLURM" not in k}


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    values = (rank, size, size, "127.0.0.1", port)
    return dict(zip(NAMES, map(str, values), strict=True))


def srun(rank: int, size: int, port: int) -> dict[str, str]:
    """What srun sets; the name of the host is this machine's."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_JOB_ID": "1",
        "MASTER_PORT": str(port),
    }


def doctors(*environments: dict[str, str], words: tuple[str, ...] = ()) -> list[Any]:
    """Exit code, output and errors of each process."""
    started = [
        subprocess.Popen(
            [*DOCTOR, *words],
            env={**CLEAN, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    told = [process.communicate(timeout=200) for process in started]
    return [
        (process.returncode, *texts)
        for process, texts in zip(started, told, strict=True)
    ]


@pytest.mark.product
@pytest.mark.alone  # it measures
@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_two_processes_on_one_host(launcher: Any, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "doctor.json"
    # What is measured is measured once.
    seconds = "1" if launcher is srun else "0"
    words = ("--seconds", seconds, "--model", "params=1M,step=100ms", "--json", out)
    first, second = doctors(
        *(launcher(rank, 2, port) for rank in (0, 1)), words=tuple(map(str, words))
    )
    assert first[0] == second[0] == 0, (first, second)
    assert f"as {launcher.__name__ if launcher is srun else 'its env'}" in first[1]
    assert "Training can start: 2 ranks" in first[1]
    assert second[1] == ""
    found = json.loads(out.read_text())
    assert not found["failed"]
    assert found["gloo"]["error"] is None
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1]]
    if launcher is srun:
        assert found["within_hosts"][0]["rate"] > 1e6
        assert found["gloo"]["network"]["inter"]["ring"]["beta"] > 0
        assert "a model of params=1M,step=100ms: use " in found["advice"]


@pytest.mark.slow
@pytest.mark.alone  # it measures
def test_far_links_have_the_rate_that_they_are_given(tmp_path: Path) -> None:
    needs_distance()
    net, out = Internet.alike(2, Link(1e8), Way(0.06)), tmp_path / "doctor.json"
    cluster = Cluster.emulating(2, 1, net.slowest, internet=net)
    words = [*DOCTOR, "--seconds", "1", "--json", str(out)]
    launch(cluster, words, on_line=lambda rank, line: None, timeout=200)
    found = json.loads(out.read_text())
    for link in found["links"]:
        assert link["rate"] == pytest.approx(1e8, rel=0.3)
    swap = found["gloo"]["network"]["inter"]["swap"]
    assert 5e7 < 8 / swap["beta"] < 2e8  # by so few requests


@pytest.mark.waits
def test_who_does_not_come_is_named_in_time() -> None:
    begin = time.monotonic()
    ((code, out, _),) = doctors(torchrun(0, 3, free_port()), words=("--wait", "1"))
    assert code == 1
    assert "rank 1, 2 did not come within 1 seconds" in out
    assert "Training would fail here: 1 failure" in out
    assert time.monotonic() - begin < 200


@pytest.mark.waits
def test_nobody_to_meet_is_told_by_each_rank() -> None:
    port = free_port()
    ((code, out, error),) = doctors(torchrun(1, 2, port), words=("--wait", "1"))
    assert (code, out) == (1, "")
    assert error.startswith(f"error: MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 1")
    assert "reached nobody there in 1 seconds" in error
    assert error.count("\n") == 1


@pytest.mark.waits
def test_a_broken_link_is_named_and_nobody_hangs() -> None:
    needs_networks(1e9)
    script = """
test $RANK != 1 || ip route add unreachable 10.99.0.3
exec "$@" --wait 10
"""
    lines: list[str] = []
    with pytest.raises(LabError, match="exit code 1"):
        launch(
            Cluster(3, rate=1e9),
            ["sh", "-c", script, "sh", *DOCTOR],
            env={"COLUMNS": "300"},
            on_line=lambda rank, line: lines.append(line),
            timeout=200,
        )
    told = [line for line in lines if line.startswith("failure: ")]
    assert len(told) == 2, lines
    assert "rank 1 on host 1" in told[0]
    assert "does not reach rank 2 on host 2" in told[0]
    assert "rank 2 on host 2" in told[1]
    assert "no answer in 5 seconds" in told[1]
    assert any("Gloo was not tried" in line for line in lines)


def call(
    monkeypatch: pytest.MonkeyPatch, *words: str, **environment: str
) -> tuple[int, str]:
    for name in [*NAMES, *(n for n in os.environ if n.startswith("SLURM"))]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.waits
def test_a_process_alone_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out = call(monkeypatch, "--json", str(tmp_path / "alone.json"))
    assert code == 0
    assert "no launcher has started this process" in out
    assert "torch 2" in out
    assert json.loads((tmp_path / "alone.json").read_text())["launcher"] is None


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {"RANK": "0"}, "RANK is set, but not WORLD_SIZE"),
        (["--wait", "0"], {}, "--wait 0.0: 1 to 3600 seconds"),
        (["--seconds", "nan"], {}, "--seconds nan"),
        (["--model", "big"], {}, "write it as params=25M,step=300ms"),
        (["--trace", "no.json"], {}, "cannot read the trace no.json"),
        (["--json", "/nowhere/x"], {}, "--json /nowhere/x cannot be written"),
        (
            ["--model", "params=1M,step=1s", "--trace", "x"],
            {},
            "--model and --trace say the same",
        ),
    ],
)
@pytest.mark.waits
def test_refused_in_a_sentence_before_anything_is_measured(
    words: list[str],
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out = call(monkeypatch, *words, **environment)
    assert code == 2
    assert out.startswith("error: ")
    assert message in out
    assert out.count("\n") == 1
