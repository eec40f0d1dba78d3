"""However a run ends, nothing of it is left. See [Note: Nothing is left behind]."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from tests.lab.emulated import needs_distance, needs_networks, processes_with

import gradtide
from gradtide.lab.cluster import Cluster
from gradtide.lab.namespaces import networks

pytestmark = pytest.mark.alone

# The command line without the package's own imports: torch takes seconds to start.
MAIN = f"""
import sys, types
sys.modules["gradtide"] = package = types.ModuleType("gradtide")
package.__path__ = {list(gradtide.__path__)!r}
from gradtide.lab.cli import app
app()
"""
GRADTIDE = [sys.executable, "-c", MAIN]


def gone(word: str, seconds: float) -> list[str]:
    """Who is left with the word in their command line; waits for nobody to be."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("network", ["none", "1gbit", "1gbit DELAY"])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_launcher_ends_everything(
    network: str, number: signal.Signals, code: int
) -> None:
    needs_networks(None if network == "none" else 1e9)
    if "DELAY" in network:
        needs_distance()
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"the tests were started with {number.name} ignored")
    nap = f"6000.{random.SystemRandom().randrange(10**9):09d}"
    script = f"sleep {nap} & echo up; sleep {nap}"
    delay = random.SystemRandom().randrange(10**5)
    network = network.replace("DELAY", f"--delay 20.{delay:05d}ms")
    held = f"[{(0.02 + delay * 1e-8) / 2:.9g}, 0.0]"  # in the delayer's command line
    words = ["run", "--hosts", "2", "--rate", *network.split(), "--", "sh", "-c"]
    with subprocess.Popen(
        [*GRADTIDE, *words, script],
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        up = sorted(launcher.stdout.readline() for _ in range(2))
        assert up == ["[rank 0] up\n", "[rank 1] up\n"]
        assert processes_with(nap)
        assert bool(processes_with(held)) == ("--delay" in network)
        launcher.send_signal(number)
        assert launcher.wait(20) == code
        assert not gone(nap, 5)
        assert not gone(held, 5)


def test_in_networks_not_even_a_daemon_is_left() -> None:
    needs_networks(1e9)
    nap = f"6000.{random.SystemRandom().randrange(10**9):09d}"
    script = f"setsid sh -c 'trap : TERM; sleep {nap}' > /dev/null 2>&1 & sleep 0.1"
    command = ["sh", "-c", script]
    subprocess.run(
        [*GRADTIDE, "run", "--hosts", "1", "--rate", "1gbit", "--", *command],
        check=True,
        timeout=60,
    )
    assert not gone(nap, 5)


def test_an_ordinary_user_has_networks_too() -> None:
    needs_networks(1e9)
    words: list[str] = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("setpriv is missing: this test cannot become an ordinary user")
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for needed in (
            [*GRADTIDE, "--help"],
            ["unshare", "--user", "--map-root-user", "true"],
        ):
            tried = subprocess.run([*words, *needed], capture_output=True, text=True)
            if tried.returncode:
                pytest.skip(f"user 65534 may not run {needed}: {tried.stderr}")
    script = 'echo $RANK $(ls /sys/class/net); test "$RANK" = 0 || exit 7'
    command = ["run", "--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", script]
    ended = subprocess.run(
        [*words, *GRADTIDE, *command], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "[rank 1] 1 eth0 lo" in ended.stdout
    assert "rank 1 failed with exit code 7" in ended.stderr


def test_nothing_that_runs_in_the_networks_outlives_them() -> None:
    needs_networks(1e9)
    cluster = Cluster.emulating(1, 1, 1e9)
    with networks(cluster) as enter:
        command = [*enter(0), "sh", "-c", "echo there; exec sleep 60"]
        sleeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == b"there\n"
    try:
        assert sleeper.wait(10) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.stdout.close()
        sleeper.wait()
