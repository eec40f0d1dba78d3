"""The plan of a cluster: no process and no network is started here."""

from __future__ import annotations

import ipaddress

import pytest

from gradtide.lab.cluster import Cluster, address, rank_environment
from gradtide.lab.wiring import setup_script, shape


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "rate", "mtu"),
    [
        (0, 1, 1e8, 9000),
        (251, 1, 1e8, 9000),
        (2, 0, 1e8, 9000),
        (2, 1, 1.0, 9000),
        (2, 1, 1e12, 9000),
        (2, 1, 1e8, 100),
        (2, 1, 1e8, 70000),
    ],
)
def test_an_impossible_cluster_is_refused_with_the_remedy(
    hosts: int, ranks_per_host: int, rate: float, mtu: int
) -> None:
    with pytest.raises(ValueError, match="choose"):
        Cluster(hosts, ranks_per_host, rate, mtu)


def test_every_host_has_an_address_of_its_own_in_the_lab_only() -> None:
    addresses = {ipaddress.ip_address(address(host)) for host in range(250)}
    assert len(addresses) == 250
    assert all(a in ipaddress.ip_network("10.99.0.0/24") for a in addresses)


def test_ranks_are_numbered_as_torchrun_numbers_them() -> None:
    cluster = Cluster(hosts=2, ranks_per_host=3, rate=1e8)
    ranks = [rank_environment(cluster, rank, 29500) for rank in range(cluster.size)]
    assert [r["RANK"] for r in ranks] == ["0", "1", "2", "3", "4", "5"]
    assert [r["ROLE_RANK"] for r in ranks] == [r["RANK"] for r in ranks]
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "2", "0", "1", "2"]
    assert [r["GROUP_RANK"] for r in ranks] == ["0", "0", "0", "1", "1", "1"]
    common = {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "GRADTIDE_LAB_RATE": "100000000",
        "GRADTIDE_LAB_INTERFACE": "eth0",
        "GRADTIDE_LAB_HOSTS": "2",
    }
    assert all(r.items() >= common.items() for r in ranks)


def test_without_a_rate_ranks_meet_on_loopback() -> None:
    values = rank_environment(Cluster(hosts=2), 1, 4711)
    assert values["MASTER_ADDR"] == "127.0.0.1"
    assert values["MASTER_PORT"] == "4711"
    assert values["GLOO_SOCKET_IFNAME"] == values["GRADTIDE_LAB_INTERFACE"] == "lo"
    assert values["GRADTIDE_LAB_RATE"] == ""


@pytest.mark.parametrize("rate", [1e5, 1e8, 2.5e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("mtu", [1280, 1500, 9000, 65000])
def test_a_bucket_holds_whole_packets_and_little_more(rate: float, mtu: int) -> None:
    link = shape(rate, mtu)
    assert mtu < link.segment <= 65536
    headers = 128 * (link.segment // 1000 + 1)  # each packet of a segment has its own
    assert link.burst >= link.segment + headers, "tbf would segment in software"
    assert link.burst <= max(rate / 8 / 1000, 4 * mtu, 2 * 65536)
    assert link.window >= link.segment


def test_each_link_is_shaped_both_ways() -> None:
    script = setup_script(Cluster(hosts=5, rate=2.5e8)).splitlines()
    shaped = [line for line in script if "tbf rate 250000000bit" in line]
    assert len(shaped) == 10
    assert sum("dev eth0 " in line for line in shaped) == 5
    assert {f"port{n}" for n in range(5)} <= {
        word for s in shaped for word in s.split()
    }


def test_what_a_hosts_ranks_send_each_other_is_shaped_if_asked() -> None:
    assert "dev lo" not in setup_script(Cluster(2, 2, 1e8))
    script = setup_script(Cluster(2, 2, 1e8, local_rate=1e9))
    assert script.count("qdisc add dev lo root tbf rate 1000000000bit") == 2
    with pytest.raises(ValueError, match="give both"):
        Cluster(2, 2, local_rate=1e9)
    with pytest.raises(ValueError, match="choose"):
        Cluster(2, 2, 1e8, local_rate=1.0)
