"""What is wrong follows from what the ranks know, and is said with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtide.core.grouped import grouped
from gradtide.doctor.checks import alone, reached, slow, together, ungoverned
from gradtide.doctor.facts import Facts, facts, hosts, parted
from gradtide.doctor.pairs import Heard

GOOD = replace(
    facts(None),
    local_size=1,
    address="10.0.0.1",
    interface="eth0",
    error="",
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1"},
    public={},
    cores=8,
    threads=1,
    files=65536,
    shared=1 << 33,
    governed=True,
    gpus=0,
    backend="gloo",
    variables={},
)


def ranks(
    placed: str = "ab", changes: dict[int, dict[str, Any]] | None = None
) -> list[Facts]:
    """A rank on each of the hosts that the letters name, with some things changed."""
    made = []
    for rank, host in enumerate(placed):
        address = f"10.0.0.{ord(host)}"
        own = replace(
            GOOD,
            rank=rank,
            size=len(placed),
            local_size=placed.count(host),
            host=host,
            network=host,
            machine=host,
            name=f"node-{host}",
            address=address,
            interfaces={**GOOD.interfaces, "eth0": address},
        )
        made.append(replace(own, **(changes or {}).get(rank, {})))
    return made


def versions(**changed: str) -> dict[str, Any]:
    return {"versions": {**GOOD.versions, **changed}}


@pytest.mark.parametrize("placed", ["a", "ab", "aabb", "aaaa"])
def test_nothing_is_wrong(placed: str) -> None:
    assert together(ranks(placed)) == []


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        (versions(torch="2.6.0"), "failure", "torch differs: "),
        (versions(gradtide="0.1"), "failure", "0.1 on rank 1: install the same"),
        (versions(numpy="1.26"), "warning", "numpy differs"),
        (versions(python="3.99.1"), "failure", "python differs"),
        ({"size": 3}, "failure", "WORLD_SIZE differs: 2 on rank 0; 3 on rank 1"),
        (
            {"address": "127.0.1.1", "interface": "lo"},
            "failure",
            "listens at 127.0.1.1",
        ),
        ({"error": "it names ib0"}, "failure", "host 1 (node-b): it names ib0"),
        ({"address": "10.0.0.97"}, "failure", "is the address of several hosts"),
        ({"files": 64}, "failure", "ulimit -n 65536"),
        ({"shared": 64 << 20}, "warning", "67 MB of /dev/shm"),
        ({"threads": 9}, "warning", "9 threads on 8 cores: export OMP_NUM_THREADS=8"),
        ({"gpus": 8, "backend": "nccl"}, "failure", "some ranks see GPUs"),
        ({"local_size": 2}, "warning", "LOCAL_WORLD_SIZE is 2 on rank 1"),
        ({"variables": {"NCCL_SOCKET_IFNAME": "x"}}, "warning", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_what_one_rank_has_is_found(
    changed: dict[str, Any], level: str, words: str
) -> None:
    found = together(ranks("ab", {1: changed}))
    assert [finding.level for finding in found] == [level]
    assert words in found[0].words


def test_the_remedy_for_the_loopback_names_another_interface() -> None:
    changed = {"address": "127.0.1.1", "interface": "lo"}
    (found,) = together(ranks("ab", {1: changed}))
    assert "export GLOO_SOCKET_IFNAME=eth0 (10.0.0.98)" in found.words
    (found,) = alone(ranks("a", {0: changed})[0])
    assert found.level == "warning"


OPEN = {"address": "8.8.4.4", "interface": "eth1", "public": {"8.8.4.4": "eth1"}}


def test_ranks_that_everybody_may_reach_are_told() -> None:
    (found,) = together(ranks("ab", {1: OPEN}))
    assert found.level == "warning"
    assert "ranks listen at 8.8.4.4 (eth1), of no private network" in found.words
    assert "Gloo's takes everybody in" in found.words
    assert "export GLOO_SOCKET_IFNAME=eth0 (10.0.0.98)" in found.words
    lonely = {**OPEN, "interfaces": {"eth1": "8.8.4.4", "lo": "127.0.0.1"}}
    (found,) = together(ranks("ab", {1: lonely}))
    assert "export GLOO_SOCKET_IFNAME=that of the tunnel (wg0)" in found.words


def test_a_store_that_everybody_may_reach_is_told() -> None:
    """It listens at all of its host's addresses, whichever Gloo takes."""
    changed = {"public": {"8.8.4.4": "eth1", "2600::1": "eth1"}}
    (found,) = together(ranks("ab", {0: changed}))
    assert found.level == "warning"
    assert "every address of host 0 (node-a)" in found.words
    assert "at 2600::1 (eth1), 8.8.4.4 (eth1), of no private network" in found.words
    assert together(ranks("ab", {1: changed})) == []
    both = alone(ranks("a", {0: {**OPEN, "size": 1}})[0])
    assert [each.words.split()[0] for each in both] == ["torch's", "ranks"]


def test_hosts_of_unlike_numbers_of_ranks() -> None:
    (found,) = together(ranks("aab"))
    assert "unlike numbers of ranks" in found.words
    assert together(ranks("abab")) == []


def test_pairs_that_do_not_reach_each_other_are_named() -> None:
    there = hosts(ranks("aabb"))
    heard = {
        0: {2: Heard("no answer in 5 seconds")},
        1: {0: Heard()},
        2: {0: Heard(clock=-3.0)},
        3: {2: Heard()},
    }
    failure, warning = reached(there, heard)
    assert failure.level == "failure"
    assert failure.words == (
        "rank 0 on host 0 (node-a) does not reach rank 2 on host 1 (node-b): no answer "
        "in 5 seconds"
    )
    assert "the clock of host 1 (node-b) is +3.0 s off" in warning.words
    assert warning.level == "warning"


def test_a_slow_link_stands_out() -> None:
    there = hosts(ranks("abc"))
    rates = {(0, 1): 1e9, (1, 2): 1e9, (2, 0): 4e8, (1, 0): 1e9}
    (found,) = slow(there, rates)
    assert "from host 2 (node-c) to host 0 (node-a) data takes 2.5 times" in found.words
    assert slow(there, {**rates, (2, 0): 6e8}) == []


def test_who_has_what_in_words() -> None:
    found = grouped(ranks("abaaaa"), lambda each: each.host)
    assert parted(found) == "a on ranks 0, 2-5; b on rank 1"


def test_far_hosts_without_bbr_are_told_how_to_have_it() -> None:
    trips = {(0, 1): 0.04, (1, 0): 0.03}
    everybody = ranks("ab", {1: {"governed": False}})
    (found,) = ungoverned(everybody, hosts(everybody), trips)
    assert found.level == "warning"
    assert "40 ms" in found.words
    assert "rank 1 may not have BBR" in found.words
    assert "tcp_allowed_congestion_control" in found.words
    near = dict.fromkeys(trips, 0.001)
    assert ungoverned(everybody, hosts(everybody), near) == []
    assert ungoverned(ranks("ab"), hosts(everybody), trips) == []
    assert ungoverned(everybody, hosts(everybody), {}) == []
