from __future__ import annotations

import sys
import time
from collections import defaultdict

import pytest
from tests.lab.emulated import needs_networks

from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.launch import launch

pytestmark = pytest.mark.alone

RATES = pytest.mark.parametrize("rate", [None, 1e9], ids=["loopback", "networks"])
PYTHON = [sys.executable, "-I", "-c"]


def lines_of(
    cluster: Cluster, command: list[str], env: dict[str, str] | None = None
) -> dict[int, list[str]]:
    needs_networks(cluster.rate)
    lines: dict[int, list[str]] = defaultdict(list)
    launch(
        cluster,
        command,
        env=env or {},
        on_line=lambda rank, line: lines[rank].append(line),
        timeout=60,
    )
    return dict(lines)


@RATES
def test_every_rank_runs_with_its_environment(
    rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RANK", "77")
    lines = lines_of(
        Cluster(2, 2, rate),
        ["sh", "-c", "echo $RANK $LOCAL_RANK $OMP_NUM_THREADS $MINE; pwd >&2"],
        {"MINE": "yes"},
    )
    here = lines[0][1]
    assert lines == {rank: [f"{rank} {rank % 2} 1 yes", here] for rank in range(4)}, (
        "stdout and stderr come back together"
    )


def test_threads_that_the_user_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert lines_of(Cluster(1), ["sh", "-c", "echo $OMP_NUM_THREADS"]) == {0: ["5"]}


def test_a_host_sees_its_own_link_only_and_knows_the_names_of_all() -> None:
    script = """
import os, socket
print(*sorted(os.listdir("/sys/class/net")))
print(int(open("/sys/class/net/eth0/statistics/tx_bytes").read()) < 10000)
print(socket.gethostbyaddr("10.99.0.2")[0])
print(os.path.samefile("/proc/self", f"/proc/{os.getpid()}"))
"""
    lines = lines_of(Cluster(2, rate=1e9), [*PYTHON, script])
    expected = ["eth0 lo", "True", "lab-host1", "True"]
    assert lines == {0: expected, 1: expected}


@RATES
def test_the_first_rank_to_fail_ends_the_run_and_its_traceback_is_shown(
    rate: float | None,
) -> None:
    script = """
import os, time
if os.environ["RANK"] == "2":
    raise KeyError("the cause")
time.sleep(100)
"""
    start = time.monotonic()
    with pytest.raises(LabError, match="rank 2 failed with exit code 1") as caught:
        lines_of(Cluster(3, rate=rate), [*PYTHON, script])
    assert time.monotonic() - start < 10
    assert (caught.value.rank, caught.value.code) == (2, 1)
    assert caught.value.lines[0].startswith("Traceback")
    assert caught.value.lines[-1] == "KeyError: 'the cause'"
    assert "KeyError: 'the cause'" in str(caught.value)


@RATES
def test_a_killed_rank_is_a_failed_rank(rate: float | None) -> None:
    with pytest.raises(LabError, match="rank 0 was killed by SIGSEGV") as caught:
        lines_of(Cluster(1, rate=rate), ["sh", "-c", "echo last; kill -SEGV $$"])
    assert (caught.value.code, caught.value.lines) == (-11, ("last",))


@pytest.mark.product
@RATES
def test_others_may_end_politely_when_one_fails(rate: float | None) -> None:
    script = """
import os, signal, sys, time
def leave(*_): time.sleep(0.3); print("saved", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(1.0 if os.environ["RANK"] == "0" else 100)
sys.exit(3)
"""
    needs_networks(rate)
    lines: list[tuple[int, str]] = []
    with pytest.raises(LabError, match="rank 0 failed with exit code 3"):
        launch(
            Cluster(2, rate=rate),
            [*PYTHON, script],
            on_line=lambda rank, line: lines.append((rank, line)),
        )
    assert (1, "saved") in lines


@RATES
def test_a_run_that_takes_too_long_is_ended(rate: float | None) -> None:
    needs_networks(rate)
    with pytest.raises(LabError, match=r"within 0\.5 seconds"):
        launch(Cluster(2, rate=rate), ["sleep", "100"], timeout=0.5)


@pytest.mark.parametrize("command", [[], ["no-such-command"]])
def test_what_is_no_command_is_refused_with_the_remedy(command: list[str]) -> None:
    with pytest.raises(ValueError, match="put one after --"):
        launch(Cluster(1), command)


def test_without_the_tools_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match=r"install iproute2 .* or use --rate none"):
        launch(Cluster(2, rate=1e8), [sys.executable, "--version"])


def test_lines_are_shown_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    launch(Cluster(2), ["sh", "-c", 'echo "[$RANK] and a [bracket]"'])
    shown = sorted(capsys.readouterr().out.splitlines())
    assert shown == [f"[rank {n}] [{n}] and a [bracket]" for n in range(2)]
