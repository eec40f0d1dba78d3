"""Which files a run goes on from, as arithmetic; and who has what, in the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest

from gradtide.checkpoint.generations import (
    Generation,
    Held,
    Listing,
    choose,
    held,
    name_of,
    spoken,
)

OLD, NEW = "00001", "00002"  # runs


def of(step: int, size: int, *names: str, run: str = OLD) -> list[Held]:
    return [Held(Generation(step, run, size), f"{name}.pt") for name in names]


def all_of(step: int, size: int, run: str = OLD) -> list[Held]:
    return of(step, size, "common0", *(f"rank{r}" for r in range(size)), run=run)


def there(*files: Sequence[Held], known: bool = True) -> Listing:
    whole = list(chain.from_iterable(files))
    return Listing(whole, not whole, known)


NOTHING = Listing([], empty=True, known=False)


def test_nothing_anywhere_begins_anew() -> None:
    assert choose([NOTHING, NOTHING], [], False) is None


def test_the_newest_that_all_have() -> None:
    told = [
        there(of(4, 2, "rank0", "common0"), of(6, 2, "rank0", "common0")),
        there(of(4, 2, "rank1")),
    ]
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.generation == (4, OLD, 2)
    assert plan.needs(0, 2, False) == ["common0.pt", "rank0.pt"]
    assert plan.needs(1, 2, False) == ["common0.pt", "rank1.pt"]
    assert plan.source("common0.pt", 1) == 0
    assert plan.source("rank1.pt", 1) == 1


def test_one_folder_has_all() -> None:
    told = [there(all_of(4, 3), all_of(6, 3))] * 3
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.generation.step == 6
    names = [name for rank in range(3) for name in plan.needs(rank, 3, False)]
    assert all(plan.source(name, rank) == rank for name in names for rank in range(3))


def test_ranks_that_changed_places_read_where_files_are() -> None:
    told = [there(of(4, 2, "rank1")), there(of(4, 2, "rank0", "common0"))]
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.source("rank0.pt", 0) == 1
    assert plan.source("rank1.pt", 1) == 0


def test_runs_are_not_mixed() -> None:
    """A newer run has saved 6 anew on one rank alone: see [Note: runs]."""
    told = [
        there(of(4, 2, "rank0", "common0"), of(6, 2, "rank0", "common0", run=NEW)),
        there(of(4, 2, "rank1"), of(6, 2, "rank1")),
    ]
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.generation == (4, OLD, 2)


def test_of_two_runs_that_saved_a_step_the_later_one() -> None:
    told = [there(all_of(6, 1), all_of(6, 1, run=NEW))]
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.generation.run == NEW


def test_a_torn_file_counts_for_nobody_who_has_it_so() -> None:
    told = [there(all_of(4, 2), all_of(6, 2))] * 2
    odd = of(6, 2, "rank1")[0]
    whole = choose(told, [(1, odd)], False)  # the other rank has read it
    assert whole is not None
    assert whole.generation.step == 6
    assert whole.source("rank1.pt", 1) == 0
    plan = choose(told, [(0, odd), (1, odd)], False)
    assert plan is not None
    assert plan.generation.step == 4


@pytest.mark.parametrize(("then", "now"), [(4, 2), (4, 3), (2, 3), (1, 4)])
def test_other_numbers_of_ranks_share_the_files(then: int, now: int) -> None:
    plan = choose([there(all_of(4, then))] * now, [], False)
    assert plan is not None
    read = [plan.needs(rank, now, False) for rank in range(now)]
    assert all(names[0] == "common0.pt" for names in read)
    ranks = sorted(name for names in read for name in names[1:])
    assert ranks == sorted(name_of("rank", r) for r in range(then))
    assert len(plan.needs(0, now, True)) == 1 + then  # K-FAC's factors


def test_a_replaced_disk_loses_its_residual() -> None:
    told = [there(of(6, 2, "rank0", "common0"), of(4, 2, "rank0", "common0")), NOTHING]
    plan = choose(told, [], False)
    assert plan is not None
    assert plan.generation.step == 6
    assert plan.lost == [1]
    assert plan.needs(1, 2, False) == ["common0.pt"]


@pytest.mark.parametrize(
    "told",
    [
        # The other rank has something, of whatever step: its disk is the old one.
        [there(of(6, 2, "rank0", "common0")), there(of(8, 2, "rank1"))],
        # One folder for all, and a file was removed.
        [there(of(6, 2, "rank0", "common0"))] * 2,
        # Fewer ranks than then.
        [there(of(6, 3, "rank0", "rank1", "common0"))] * 2,
        [there(of(6, 3, "rank0", "common0")), NOTHING],
    ],
)
def test_what_is_missing_is_said_and_may_be_given_up(told: list[Listing]) -> None:
    with pytest.raises(ValueError, match=r"rank 0 of 6.*lossy=True") as error:
        choose(told, [], False)
    assert "missing: of step" in str(error.value)
    plan = choose(told, [], True)
    assert plan is not None
    assert plan.generation.step == 6


def test_all_is_gone() -> None:
    marked = Listing([], empty=True, known=True)
    with pytest.raises(ValueError, match=r"all are gone.*rank 0 of none; rank 1"):
        choose([marked, NOTHING], [], True)
    with pytest.raises(ValueError, match="Copy the files") as error:
        choose([marked, NOTHING], [], False)
    assert "lossy" not in str(error.value)


@pytest.mark.parametrize("lossy", [False, True])
def test_without_the_model_nothing_can_be_given_up(lossy: bool) -> None:
    """Ranks' files alone are no run, so `lossy` is no remedy."""
    with pytest.raises(ValueError, match=r"rank 0, 2 and model and optim") as error:
        choose([there(of(6, 3, "rank1")), NOTHING], [], lossy)
    assert "lossy" not in str(error.value)


def test_a_first_save_that_was_interrupted_is_begun_anew() -> None:
    told = [there(of(4, 2, "rank0", "common0"), known=False), NOTHING]
    assert choose(told, [], False) is None
    assert choose(told, [], True) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 0}, "not in its place"),
        ({"step": 5}, "not in its place"),
        ({"kind": "common"}, "not in its place"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1"),
        ({"step": -4}, "step -4"),
        ({"step": "4"}, "which step"),
        ({"size": True}, "which step"),
        ({"rank": None}, "which step"),
        ({"run": 3}, "which run"),
        ({"kind": "other"}, "which run"),
    ],
)
def test_a_file_in_another_place_is_none(
    changed: dict[str, object], message: str
) -> None:
    about = {"run": OLD, "step": 4, "size": 2, "rank": 1, "kind": "rank"}
    assert held(about, 4, "rank1.pt") == of(4, 2, "rank1")[0]
    with pytest.raises(ValueError, match=message):
        held({**about, **changed}, 4, "rank1.pt")


@pytest.mark.parametrize("about", [None, 3, [], {}, "run"])
def test_what_says_nothing_of_itself_is_no_file(about: object) -> None:
    with pytest.raises(ValueError, match="does not say"):
        spoken(about)
