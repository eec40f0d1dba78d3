"""The network of hosts that are far from each other: as a script, and as it is."""

from __future__ import annotations

import json
import sys

import pytest
from tests.lab.emulated import needs_distance

from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.internet import Internet, Link, Path
from gradtide.lab.launch import launch
from gradtide.lab.router import delays, needs_rules, queues, routed_script
from gradtide.lab.wiring import setup_script

PYTHON = [sys.executable, "-I", "-c"]


def alike(hosts: int, link: Link, path: Path) -> Cluster:
    net = Internet.alike(hosts, link, path)
    return Cluster.emulating(hosts, 1, net.slowest, internet=net)


def script(cluster: Cluster) -> str:
    assert cluster.internet is not None
    return routed_script(cluster, cluster.internet)


def apart(*delays: float, jitter: float = 0.0) -> Internet:
    """Three hosts, as far from each other as said: 0-1, 0-2, 1-2."""
    one, two, three = (Path(delay, jitter) for delay in delays)
    none = Path()
    rows = (none, one, two), (one, none, three), (two, three, none)
    return Internet((Link(1e8),) * 3, rows)


def test_each_direction_of_a_link_has_a_queue_of_its_own() -> None:
    lines = script(alike(3, Link(2e8, 2e7), Path())).splitlines()
    for device, rate, limit in (("port", 2e8, 1_250_000), ("up", 2e7, 125_000)):
        shaped = [line for line in lines if f"qdisc add dev {device}" in line]
        assert len(shaped) == 3
        assert all(f"tbf rate {rate:.0f}bit" in line for line in shaped)
        assert all(f"limit {limit}" in line for line in shaped)


def test_a_queue_has_room_for_bundles_of_packets() -> None:
    assert "limit 16384" in script(alike(2, Link(1e5), Path()))


def test_hosts_are_as_a_kernel_is_shipped() -> None:
    found = script(alike(2, Link(1e8), Path(0.04)))
    assert found.count("echo 4096 131072 6291456 > /proc/sys/net/ipv4/tcp_rmem") == 2
    assert found.count("route add 10.99.0.0/16 dev eth0 $control") == 2
    assert "tcp_rmem: 4096 131072" not in setup_script(Cluster(2, rate=1e8))


def test_pairs_that_are_as_far_from_each_other_share_a_queue() -> None:
    assert set(queues(apart(0.01, 0.01, 0.01)).values()) == {0}
    found = queues(apart(0.01, 0.02, 0.01))
    assert found[0, 1] == found[2, 1] != found[0, 2] == found[2, 0]
    assert (1, 2) not in queues(apart(0.01, 0.01, 0.0))
    varying = queues(apart(0.01, 0.01, 0.01, jitter=0.005))
    assert sorted(varying.values()) == list(range(6)), "none waits for another's"
    told = json.loads(delays(apart(0.01, 0.02, 0.01, jitter=0.004)))
    assert sorted(told.values()) == [[0.005, 0.002]] * 4 + [[0.01, 0.002]] * 2


def test_where_all_are_alike_there_is_one_rule_else_one_for_each_pair() -> None:
    rules = script(alike(4, Link(1e8), Path(0.01, loss=0.005)))
    assert rules.count("-j NFQUEUE") == rules.count("-j DROP") == 1
    assert "--probability 0.005000000 -j DROP" in rules
    net = apart(0.01, 0.02, 0.0)
    rules = routed_script(Cluster(3, rate=1e8, internet=net), net)
    assert rules.count("-j NFQUEUE") == 4
    assert "-A from0 -d 10.99.0.3 -j NFQUEUE --queue-num 1" in rules
    assert rules.index(":from2") < rules.index("-A PREROUTING")


def test_packets_travel_alone_where_they_are_lost() -> None:
    lossless, lossy = (
        script(alike(2, Link(1e8), Path(loss=loss))) for loss in (0.0, 0.01)
    )
    assert "gso_max_segs 1 " in lossy
    assert "gso_max_size 12500" in lossless
    assert "iptables" not in lossless
    assert not delays(Internet.alike(2, Link(1e8), Path(loss=0.1)))
    assert needs_rules(Internet.alike(2, Link(1e8), Path(loss=0.1)))


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"iptables-restore": None}
    monkeypatch.setattr("shutil.which", lambda tool, **_: found.get(tool, "/bin/x"))
    with pytest.raises(LabError, match="install iptables, or leave out --delay"):
        launch(alike(2, Link(1e8), Path(0.01)), ["sh"])


# One asks, the other answers; the fastest and the slowest answer of 21.
TALK = """
import os, socket, time
rank = int(os.environ["RANK"])
if rank == 0:
    end = socket.create_server(("10.99.0.1", 29500)).accept()[0]
else:
    while True:
        try:
            end = socket.create_connection(("10.99.0.1", 29500))
            break
        except OSError:
            time.sleep(.01)
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(21):
    start = time.monotonic()
    if rank == 0:
        end.sendall(b"!")
    end.recv(1)
    if rank:
        end.sendall(b"!")
    took.append(time.monotonic() - start)
if rank == 0:
    print(min(took), max(took))
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("delay", "jitter"),
    [(0.01, 0.0), pytest.param(0.2, 0.0, marks=pytest.mark.slow), (0.04, 0.02)],
)
def test_a_round_trip_takes_what_was_asked(delay: float, jitter: float) -> None:
    needs_distance()
    lines: list[str] = []
    cluster = alike(2, Link(1e9), Path(delay, jitter))
    launch(cluster, [*PYTHON, TALK], on_line=lambda _, line: lines.append(line))
    fastest, slowest = map(float, lines[-1].split())
    # Two clocks: that of the router's timer is coarser than that of the program.
    assert 0.99 * (delay - jitter) < fastest < delay + 0.002
    assert slowest > fastest + jitter / 4


# How many of 4000 small packets arrive.
LOSE = """
import os, socket, time
rank = int(os.environ["RANK"])
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("10.99.0.%d" % (rank + 1), 5000))
end.settimeout(3)
if rank == 0:
    seen = 0
    try:
        while True:
            end.recv(100)
            seen += 1
    except TimeoutError:
        print(seen)
else:
    time.sleep(.3)
    for _ in range(4000):
        end.sendto(b"!", ("10.99.0.1", 5000))
        time.sleep(1e-4)
"""


@pytest.mark.alone
def test_packets_are_lost_by_chance() -> None:
    needs_distance()
    lines: list[str] = []
    cluster = alike(2, Link(1e9), Path(0.002, loss=0.1))
    launch(cluster, [*PYTHON, LOSE], on_line=lambda _, line: lines.append(line))
    assert 3600 - 6 * 19 < int(lines[-1]) < 3600 + 6 * 19
