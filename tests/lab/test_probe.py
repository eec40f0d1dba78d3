from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.lab.emulated import needs_distance, needs_networks

from gradtide.lab.cluster import Cluster
from gradtide.lab.internet import Internet, Link, Path
from gradtide.lab.probe import asked, pairs, probe, survey, table

pytestmark = pytest.mark.alone


@pytest.mark.product
@pytest.mark.parametrize("rate", [5e7, 2.5e8])
def test_links_deliver_what_was_asked_and_no_more(rate: float) -> None:
    needs_networks(rate)
    found = probe(Cluster(hosts=3, rate=rate), seconds=0.5)
    for name in ("one way", "both ways", "all to one", "each to the next"):
        assert 0.85 * rate < found[name] < 1.03 * rate, name
    assert found["idle"] < 0.01
    assert found["full"] < 0.15, "the queue is as long as a switch's"


def test_the_probe_runs_on_loopback_and_shows_a_table() -> None:
    cluster = Cluster(hosts=2)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(table(cluster, probe(cluster, seconds=0.1)))
    shown = console.export_text()
    assert "2 hosts, none" in shown
    assert "each to the next" in shown


def test_a_single_host_cannot_be_probed() -> None:
    with pytest.raises(ValueError, match="2 hosts or more"):
        probe(Cluster(hosts=1, rate=1e8))


@pytest.mark.slow
def test_what_lies_between_each_two_hosts_is_measured() -> None:
    needs_distance()
    far, near, none = Path(0.03, loss=0.2), Path(0.004), Path()
    rows = (none, near, far), (near, none, far), (far, far, none)
    net = Internet((Link(2e7), Link(2e7), Link(2e7, 5e6)), rows)
    cluster = Cluster.emulating(3, 1, net.slowest, internet=net)
    ways = survey(cluster, seconds=0.4)
    assert len(ways) == 6
    for way in ways:
        wanted = asked(net, way.sender, way.receiver)
        assert wanted.round_trip < way.round_trip < wanted.round_trip + 0.02
        # What is lost does not arrive.
        assert 0.6 * wanted.rate < way.rate < 1.1 * wanted.rate
        assert abs(way.loss - wanted.loss) < 0.1
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(pairs(cluster, ways))
    shown = console.export_text()
    assert "/ 30ms" in shown
    assert "/ 20%" in shown
    assert "/ 5mbit" in shown
