"""What lies between hosts: numbers only."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradtide.lab.cluster import Cluster
from gradtide.lab.internet import Internet, Link, Path


@pytest.mark.parametrize(
    ("delay", "jitter", "loss"),
    [(-1, 0, 0), (11, 0, 0), (0.01, 0.02, 0), (0.01, -1, 0), (0, 0, 0.6), (0, 0, -0.1)],
)
def test_an_impossible_path_is_refused_with_the_remedy(
    delay: float, jitter: float, loss: float
) -> None:
    with pytest.raises(ValueError, match="choose"):
        Path(delay, jitter, loss)


def test_a_path_is_what_both_ends_and_the_way_between_them_add_up_to() -> None:
    home = Link(1e8, 2e7, Path(0.02, 0.01, 0.1))
    site = Link(1e9, path=Path(0.001))
    far = Path(0.09, 0.0, 0.1)
    none = Path()
    net = Internet(
        (home, site, site),
        ((none, far, far), (far,) + (none,) * 2) * 1 + ((far, none, none),),
    )
    assert net.path(0, 1).delay == pytest.approx(0.111)
    assert net.path(0, 1) == net.path(1, 0)
    assert net.path(0, 1).jitter == 0.01
    assert net.path(0, 1).loss == pytest.approx(0.19)
    assert net.path(1, 2) == Path(0.002)
    assert len(net.paths()) == 6
    assert net.loses
    assert net.slowest == 2e7
    assert (home.sends, site.sends) == (2e7, 1e9)


def test_a_link_without_sense_is_refused_with_the_remedy() -> None:
    for link in (Link(1.0), Link(1e8, 1e12)):
        net = Internet.alike(2, link, Path(0.01))
        with pytest.raises(ValueError, match="choose"):
            Cluster(2, rate=net.slowest, internet=net)
    with pytest.raises(ValueError, match="queue"):
        Internet.alike(2, Link(1e8), Path(), queue=0.0)


def test_packets_are_as_large_as_they_are_on_such_a_network() -> None:
    net = Internet.alike(2, Link(1e8), Path(0.01))
    assert Cluster.emulating(2, 1, 1e8).mtu == 9000
    assert Cluster.emulating(2, 1, 1e8, internet=net).mtu == 1500
    assert Cluster.emulating(2, 1, 1e8, internet=net, mtu=9000).mtu == 9000


def test_it_is_told_in_words_and_to_records() -> None:
    net = Internet.alike(2, Link(1e8, 2e7), Path(0.04, 0.002, 0.005))
    assert net.words() == (
        "links of 100mbit (up 20mbit)/s; 40ms apart +- 2ms, 0.5% lost each way"
    )
    told = net.told()
    assert told["link"]["up"] == 2e7
    assert told["path"] == {"delay": 0.04, "jitter": 0.002, "loss": 0.005}
    assert told == json.loads(json.dumps(told))
    uneven = replace(net, links=(Link(1e8), Link(2e8)))
    assert uneven.words().startswith("links of 100mbit and 200mbit/s; ")
    assert [link["rate"] for link in uneven.told()["links"]] == [1e8, 2e8]
