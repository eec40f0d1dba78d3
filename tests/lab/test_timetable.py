"""What happens to links and ranks while a cluster is used."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tests.lab.emulated import needs_distance

from gradtide.lab.atlas import events
from gradtide.lab.cluster import Cluster, LabError
from gradtide.lab.events import Cut, Event, Killed, Slowed, Started
from gradtide.lab.internet import Internet, Link, Path
from gradtide.lab.launch import launch
from gradtide.lab.router import changed, needs_rules
from gradtide.lab.timetable import Timetable
from gradtide.lab.wiring import shape

PYTHON = [sys.executable, "-u", "-I", "-c"]


def happening(*happens: Event, hosts: int = 2) -> Cluster:
    net = replace(Internet.alike(hosts, Link(1e9, 1e8), Path()), events=happens)
    return Cluster.emulating(hosts, 1, net.slowest, internet=net)


class Noted:
    """Ranks that are none."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def kill(self, rank: int) -> bool:
        self.told.append(f"kill {rank}")
        return True

    def start(self, rank: int) -> bool:
        self.told.append(f"start {rank}")
        return False


def test_what_is_due_happens_in_its_order_and_the_rest_waits() -> None:
    happens = Event(0.0, Killed(1)), Event(0.0, Started(1)), Event(60.0, Killed(0))
    ranks, said = Noted(), list[str]()
    table = Timetable(happening(*happens), lambda host: [], ranks, said.append)
    assert table.starts
    table.go()
    assert ranks.told == ["kill 1", "start 1"]
    assert said == ["lab, at 0ms: rank 1 is killed", "lab, at 0ms: rank 1 runs still"]
    assert not table.starts
    assert table.wait is not None
    assert 50 < table.wait <= 60


def test_links_change_by_lines_for_a_shell() -> None:
    cluster = happening(Event(1.0, Cut(1, True)))
    assert cluster.internet is not None
    assert needs_rules(cluster.internet), "a link that is cut needs iptables"
    down, up = (changed(cluster, cluster.internet, Cut(1, d)) for d in (True, False))
    assert "iptables -w -t mangle -I PREROUTING -i port1 -j DROP" in down
    assert [line.replace("-I ", "-D ") for line in down] == up
    slow = changed(cluster, cluster.internet, Slowed(1, 2e7, 1e6))
    assert [line.split(" burst")[0] for line in slow] == [
        "tc qdisc change dev port1 root tbf rate 20000000bit",
        "tc qdisc change dev up1 root tbf rate 1000000bit",
    ]
    # What waits in front of a bucket fits into it, or nothing ever passes again.
    bundled = shape(cluster.internet.links[0].sends, cluster.mtu).segment
    for line in slow:
        assert int(line.split(" burst ")[1].split()[0]) > 1.5 * bundled


def test_a_link_that_cannot_be_changed_is_an_error() -> None:
    cluster = happening(Event(0.0, Slowed(0, 1e6, 1e6)))
    fails = ["sh", "-c", "echo no such luck >&2; exit 3"]
    table = Timetable(cluster, lambda host: fails, Noted(), print)
    with pytest.raises(LabError, match="could not be changed: no such luck"):
        table.go()


LINKS = (Link(1e8, 2e7), Link(1e9))


def test_a_timetable_is_read_in_the_order_of_time() -> None:
    found = events(
        [
            {"at": "9s", "start": 1},
            {"at": "1s", "host": 0, "link": "down"},
            {"at": "2s", "host": 0, "link": "up"},
            {"at": "3s", "host": 0, "rate": "5%"},
            {"at": "4s", "host": 1, "rate": "20mbit"},
            {"at": "5s", "host": 1, "rate": "100%", "up": "5mbit"},
            {"at": "8s", "kill": 1},
        ],
        LINKS,
    )
    assert [event.at for event in found] == [1, 2, 3, 4, 5, 8, 9]
    assert [event.change for event in found] == [
        *(Cut(0, True), Cut(0, False), Slowed(0, 5e6, 1e6), Slowed(1, 2e7, 2e7)),
        *(Slowed(1, 1e9, 5e6), Killed(1), Started(1)),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"kill": 1}, "event 1 has no time"),
        ({"at": "1", "kill": 1}, "event 1: at '1' is no time"),
        ({"at": "1s"}, 'event 1: write one of "kill"'),
        ({"at": "1s", "kill": 1, "start": 1}, 'event 1: write one of "kill"'),
        ({"at": "1s", "host": 1}, 'event 1: write one of "kill"'),
        ({"at": "1s", "kill": "me"}, "kill is a number, from 0 on, not 'me'"),
        ({"at": "1s", "host": 2, "link": "down"}, "there are hosts 0 to 1, not 2"),
        ({"at": "1s", "host": 0, "link": "off"}, "a link is down or up, not 'off'"),
        ({"at": "1s", "host": 0, "link": "up"}, "host 0's link is up already then"),
        ({"at": "1s", "host": 0, "rate": "0%"}, "rate is 0 bits/s: choose 100kbit"),
        ({"at": "1s", "host": 0, "rate": "none"}, "a link has a limit"),
        ({"at": "1s", "server": 0}, "'server' is none of at, host"),
    ],
)
def test_what_is_wrong_is_said_by_name(row: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        events([row], LINKS)


def test_who_is_not_there_cannot_be_killed() -> None:
    with pytest.raises(ValueError, match="an event is of rank 2: choose 0 to 1"):
        happening(Event(1.0, Killed(2)))


# Rank 0 asks rank 1 every tenth of a second and tells each change of the answer.
ASK = """
import os, socket, time
rank = int(os.environ["RANK"])
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("10.99.0.%d" % (rank + 1), 5000))
end.settimeout(.1)
print("up", flush=True)
last, until = None, time.monotonic() + SECONDS
while time.monotonic() < until:
    try:
        if rank:
            end.sendto(*end.recvfrom(100))
            continue
        end.sendto(b"!", ("10.99.0.2", 5000))
        now = bool(end.recv(100))
        time.sleep(.05)
    except TimeoutError:
        now = False
    except ConnectionRefusedError:
        now = "refused"
    if not rank and now != last:
        print(now, flush=True)
        last = now
"""


@pytest.mark.alone
def test_a_link_goes_down_silently_and_comes_back() -> None:
    needs_distance()
    lines: list[tuple[int, str]] = []
    cluster = happening(Event(2.0, Cut(1, True)), Event(3.5, Cut(1, False)))
    launch(
        cluster,
        [*PYTHON, ASK.replace("SECONDS", "5.5")],
        on_line=lambda *line: lines.append(line),
        timeout=60,
    )
    told = [line for rank, line in lines if rank == 0]
    assert told[-3:] == ["True", "False", "True"]


@pytest.mark.slow
@pytest.mark.alone
def test_a_rank_that_is_killed_is_no_failure_and_can_be_started_anew() -> None:
    needs_distance()
    lines: list[tuple[int, str]] = []
    cluster = happening(Event(1.5, Killed(1)), Event(2.0, Started(1)))
    launch(
        cluster,
        [*PYTHON, 'import time; print("up", flush=True); time.sleep(3)'],
        on_line=lambda *line: lines.append(line),
        timeout=60,
    )
    assert lines.count((0, "up")) == 1
    assert lines.count((1, "up")) == 2


@pytest.mark.alone
def test_other_failures_stay_failures() -> None:
    needs_distance()
    cluster = happening(Event(0.5, Killed(1)))
    script = "import os, time; time.sleep(1.5 + 9 * int(os.environ['RANK'])); exit(3)"
    with pytest.raises(LabError, match="rank 0 failed with exit code 3"):
        launch(cluster, [*PYTHON, script], timeout=60)
