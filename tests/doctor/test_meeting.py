"""Where ranks meet before anything else works."""

from __future__ import annotations

import pytest
from tests.ports import free_port

from gradtide.doctor.meeting import Meeting, Unmet
from gradtide.lab.place import Place

TWICE = "two processes have RANK=1: give each a rank of its own"


def test_two_processes_of_one_rank_are_noticed() -> None:
    port = free_port()
    ranks = [Place(rank, 3, "127.0.0.1", port, "torchrun") for rank in range(3)]
    met = [Meeting(place, 20.0) for place in ranks]
    with pytest.raises(Unmet, match=TWICE):
        Meeting(ranks[1], 20.0)
    for rank, meeting in reversed([*enumerate(met)]):
        heard = meeting.gather(f"of {rank}")
    assert heard == {0: "of 0", 1: "of 1", 2: "of 2"}


def test_a_restart_of_the_launcher_has_ranks_of_its_own() -> None:
    port, kept = free_port(), list[Meeting]()
    for attempt in "01":
        hosted = attempt == "1"  # the store is there already
        where = Place(0, 1, "127.0.0.1", port, "torchrun", 1, hosted, attempt)
        kept.append(Meeting(where, 20.0))
        assert kept[-1].gather("here") == {0: "here"}
