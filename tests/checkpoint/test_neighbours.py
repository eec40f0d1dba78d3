"""Who keeps whose copy, as arithmetic; and who is refused."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.runs import Run
from tests.ranks import run_ranks

import gradtide
from gradtide.checkpoint import Checkpointer
from gradtide.checkpoint.neighbours import keepers
from gradtide.transport.opening import Meeting

LAYOUTS = [
    [[0]],
    [[0, 1]],
    [[0], [1]],
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0], [1], [2]],
    [[0, 1, 2], [3]],
    [[0], [1, 2, 3], [4, 5]],
    [[2 * h, 2 * h + 1] for h in range(4)],
    [[h] for h in range(8)],
]


def test_the_next_host_the_same_place() -> None:
    assert keepers([[0, 1], [2, 3], [4, 5]], 1) == [[2], [3], [4], [5], [0], [1]]
    assert keepers([[0, 1], [2, 3], [4, 5]], 2)[3] == [5, 1]
    assert keepers([[0, 1, 2], [3]], 1) == [[3], [3], [3], [0]]
    assert keepers([[0, 2], [1, 3]], 5) == [[1], [0], [3], [2]]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("copies", range(4))
def test_as_many_hosts_may_be_lost_as_there_are_copies(
    hosts: list[list[int]], copies: int
) -> None:
    found = keepers(hosts, copies)
    of = {rank: number for number, host in enumerate(hosts) for rank in host}
    assert len(found) == len(of)
    for rank, own in enumerate(found):
        assert len(own) == min(copies, len(hosts) - 1)
        where = {of[rank], *(of[keeper] for keeper in own)}
        assert len(where) == len(own) + 1  # each on a host of its own
        for lost in combinations(range(len(hosts)), len(own)):
            assert where - {*lost}
    if len({len(host) for host in hosts}) == 1:  # each keeps as many as the others
        assert len({*Counter(k for own in found for k in own).values()}) <= 1


def test_one_host_alone_is_told_once_and_trains(tmp_path: Path) -> None:
    def trained() -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = Run(tmp_path, copies=2)
        run.go()
        run.end()
        return [str(one.message) for one in told if "copies" in str(one.message)]

    first, second = run_ranks(2, trained)
    assert len(first) == 1
    assert "copies=2 needs ranks on 3 hosts, and these are on 1" in first[0]
    assert second == []


def test_fewer_hosts_than_copies_keep_what_they_can(tmp_path: Path) -> None:
    def trained() -> list[str]:
        os.environ["GROUP_RANK"] = str(dist.get_rank())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = Run(tmp_path / str(dist.get_rank()), copies=2)
        run.go()
        run.end()
        return [str(one.message) for one in told if "copies" in str(one.message)]

    first, _ = run_ranks(2, trained)
    assert "these are on 2: copies of each rank's file: 1" in first[0]
    assert (tmp_path / "0" / "step-12" / "rank1.pt").exists()


@pytest.mark.parametrize("copies", [-1, 1.0, True, "1", None])
def test_a_number_of_copies_is_a_whole_one(copies: object, tmp_path: Path) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"copies=.*: a whole number"):
            Run(tmp_path, copies=copies)

    run_ranks(1, refused)


def test_a_folder_of_all_hosts_needs_no_copies() -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"one folder for all hosts.*copies=0"):
            Run("memory://runs", copies=1)

    run_ranks(1, refused)


def test_ranks_pass_the_same_number(tmp_path: Path) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match="copies differs between ranks"):
            Run(tmp_path, copies=dist.get_rank())

    run_ranks(2, refused)


def test_a_neighbour_that_is_not_reached_is_told_on_every_rank(tmp_path: Path) -> None:
    def refused() -> str:
        os.environ["GROUP_RANK"] = str(dist.get_rank())
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, optimizer)
        reach = Meeting._reach

        def unreachable(self: Meeting, door: object) -> None:
            raise OSError(113, "No route to host")

        Meeting._reach = unreachable  # type: ignore[assignment, method-assign]
        with pytest.raises(ValueError, match=r"no copies at rank .*No route") as error:
            Checkpointer(tmp_path, sync, model=model, optimizer=optimizer, copies=1)
        Meeting._reach = reach  # type: ignore[method-assign]
        return str(error.value)

    for message in run_ranks(3, refused):
        assert "GLOO_SOCKET_IFNAME" in message
