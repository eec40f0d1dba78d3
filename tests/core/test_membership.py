"""Who is the furthest, and whether ranks have to meet anew."""

from __future__ import annotations

from dataclasses import replace

from gradtide.core.membership import Member, Roster, Standing


def roster(*progress: int) -> Roster:
    standing = [Standing(each) for each in progress]
    members = [Member(f"r{i}", f"host {i}", one) for i, one in enumerate(standing)]
    return Roster("1", members)


def test_the_first_of_the_furthest_is_the_source() -> None:
    assert roster(3, 5, 5, -1).source == 1
    assert roster(-1, -1).source == 0


def test_equal_processes_of_which_none_is_lost_go_on() -> None:
    before = roster(3, 3)
    assert not replace(roster(4, 4), number="2").differs(before)
    assert not roster(4, 5).differs(before)  # told when others had yet to hear


def test_another_process_or_a_lost_rank_is_another_group() -> None:
    before = roster(3, 3)
    again = replace(before.members[1], store="host 9")
    lost = replace(before.members[1], standing=Standing(3, lost=True))
    for other in (again, lost):
        assert replace(before, members=[before.members[0], other]).differs(before)
    assert roster(3).differs(before)
    assert roster(3, 3, -1).differs(before)


def test_ranks_of_which_one_was_missing_meanwhile_meet() -> None:
    before = replace(roster(3, 3), since="2")
    assert not replace(roster(4, 4), since="2").differs(before)
    assert replace(roster(4, 3), since="4").differs(before)  # 3 was without r1


def test_a_standing_is_told_in_plain_values() -> None:
    told = {"progress": 7, "lost": True, "run": "3.1"}
    assert Standing(7, lost=True, run="3.1").tell() == told


def test_of_two_runs_that_are_as_far_more_ranks_keep_theirs() -> None:
    runs = [(4, "a"), (4, "b"), (-1, ""), (4, "b"), (3, "b"), (0, "c")]
    members = [
        Member(f"r{i}", f"host {i}", Standing(progress, run=run))
        for i, (progress, run) in enumerate(runs)
    ]
    there = Roster("9", members)
    assert there.source == 1
    assert there.late == [True, False, True, False, True, True]
    assert there.apart == ["r0", "r5"]
    assert Roster("9", members[:2]).source == 0  # as many: the first
    assert Roster("9", members[:2]).apart == ["r1"]
    further = [Member("r9", "host 9", Standing(5, run="c")), *members]
    assert Roster("9", further).source == 0
    assert Roster("9", further).late == [False, *[True] * 6]
