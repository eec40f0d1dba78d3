"""What is noted of few numbers and one rank, all ranks ask at full size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from gradtide.collectives import (
    ACPSGD,
    ByNorm,
    CLTk,
    Dense,
    Dynamic,
    GTopK,
    MomentumCorrection,
    OkTopk,
    PartitionedTopK,
    PowerSGD,
    TopK,
    TopKA2A,
    TopkDSA,
    Warmup,
)
from gradtide.core.ops import (
    AllGather,
    AllReduce,
    Flow,
    Group,
    Mean,
    Swap,
    payload_bytes,
)
from gradtide.core.payload import Collective, Payload, settled
from gradtide.planner.clock.symbolic_requests import widened
from gradtide.planner.rehearsal import flows, rehearsal
from gradtide.planner.rehearsal.rehearsal import Script, script_of, scripts

SPARSE = (
    TopK(0.02),
    GTopK(0.02),
    TopKA2A(0.02),
    TopKA2A(0.02, wire="bf16"),
    TopkDSA(0.02),
    OkTopk(0.02),
    PartitionedTopK(0.02),
    PartitionedTopK(0.02, partition=Dynamic()),
    PartitionedTopK(0.02, partition=ByNorm()),
    CLTk(0.02),
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    scripts.cache_clear()
    flows._by_numbers.cache_clear()


def sent(script: Script, size: int) -> int:
    """Bytes of all requests; a broadcast's by its source."""
    return sum(payload_bytes(op, Group(0, size)) for a in script.acts for op in a.asked)


def kinds(script: Script) -> list[str]:
    return [type(op).__name__ for act in script.acts for op in act.asked]


def done(script: Script, kind: str) -> float:
    """Elements of all work of a kind."""
    return sum(
        getattr(work, kind) for work in (*(a.work for a in script.acts), script.work)
    )


def played(collective: Collective, numel: int, size: int) -> Script:
    return script_of(scripts(settled(collective), numel, torch.float32, (), size), 1)


@pytest.mark.parametrize("size", [2, 3, 8, 100])
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_a_dense_exchange_is_noted_exactly(size: int, wire: str | None) -> None:
    n = size * 12345
    script = played(Dense(wire), n, size)  # type: ignore[arg-type]
    assert sent(script, size) == 2 * (size - 1) * 12345 * (2 if wire else 4)
    assert kinds(script) == (["AllToAll", "Cut", "AllGather"] if wire else ["Mean"])
    moved = [*(act.work.moved for act in script.acts), script.work.moved]
    share = n / size  # is divided by the number of ranks
    assert moved == ([n, n + share, share, n] if wire else [0, share])


@pytest.mark.parametrize("collective", SPARSE, ids=repr)
def test_reflections_stand_for_the_other_ranks(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 1 << 15
    real = played(collective, n, 8)
    scripts.cache_clear()
    flows._by_numbers.cache_clear()
    for module in (flows, rehearsal):
        monkeypatch.setattr(module, "LOCKSTEP", 1)
    alone = played(collective, n, 8)
    assert kinds(alone) == kinds(real)
    assert sent(alone, 8) == pytest.approx(sent(real, 8), rel=0.05)


@pytest.mark.product(each=12)
@pytest.mark.parametrize(
    "collective",
    [OkTopk(0.02), PartitionedTopK(0.02, partition=Dynamic()), PartitionedTopK(0.02)],
    ids=repr,
)
def test_few_ranks_stand_for_many(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as much for each: of flows that cannot read what is made up."""
    size = 48
    n = size * 1600
    real = played(collective, n, size)
    scripts.cache_clear()
    monkeypatch.setattr(flows, "CROWD", 24)
    few = played(collective, n, size)
    assert kinds(few) == kinds(real)
    assert few != real, "not all of them have run"
    assert sent(few, size) == pytest.approx(sent(real, size), rel=0.03)
    for kind in ("moved", "entries", "calls"):
        assert done(few, kind) == pytest.approx(done(real, kind), rel=0.1), kind


def test_trees_get_deeper() -> None:
    swap = Swap(torch.empty(8, device="meta"), 1)
    with pytest.raises(ValueError, match="is deeper"):
        widened(swap, swap, 2.0, 128)


@pytest.mark.product
@pytest.mark.parametrize("collective", SPARSE, ids=repr)
@pytest.mark.parametrize("size", [12, 48])
def test_any_number_of_ranks_is_rehearsed(size: int, collective: Collective) -> None:
    """Also where what is made up is none of its messages: all flows run then."""
    assert sent(played(collective, 1 << 20, size), size) > 0


@pytest.mark.parametrize("collective", SPARSE, ids=repr)
def test_sizes_continue_in_a_straight_line(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 3 << 18
    monkeypatch.setattr(rehearsal, "MOST", 1 << 24)
    monkeypatch.setattr(rehearsal, "FIRST", n)
    real = played(collective, n, 4)
    scripts.cache_clear()
    monkeypatch.setattr(rehearsal, "FIRST", 64)
    monkeypatch.setattr(rehearsal, "MOST", 1 << 17)
    continued = played(collective, n, 4)
    assert kinds(continued) == kinds(real)
    assert sent(continued, 4) == pytest.approx(sent(real, 4), rel=0.03)
    for kind in ("moved", "entries", "ordered"):
        assert done(continued, kind) == pytest.approx(done(real, kind), rel=0.3)


def test_selection_and_entries_are_counted() -> None:
    n, size = 1 << 16, 4
    script = played(TopK(0.01), n, size)
    assert script.selector == "Threshold"
    assert script.acts[0].work.scanned == n
    assert script.work.ordered == pytest.approx(size * 0.01 * n, rel=0.02)
    # Every entry is added; the union of all is written, and that of the last is erased.
    assert script.work.nearby == pytest.approx(size * 0.01 * n, rel=0.02)
    assert 1.5 * size * 0.01 * n < script.work.entries < 3 * size * 0.01 * n
    assert played(PartitionedTopK(0.01), n, size).acts[0].work.scanned == n / size
    assert played(CLTk(0.9), 64, 2).acts[0].work.scanned == 0  # travels densely


@pytest.mark.product(each=6)
@pytest.mark.timeout(400)  # of 256 ranks, where many others run
@pytest.mark.parametrize("size", [4, 64, 256])
def test_who_delivers_nothing_of_its_own_has_selected(size: int) -> None:
    """Of many ranks of `oktopk`, some have nothing among the largest of a region."""
    numel = 6_400_000
    for density, scanned in ((0.01, numel), (1.0, 0)):
        played = scripts(OkTopk(density), numel, torch.float32, (), size)
        assert [script.acts[0].work.scanned for script in played] == [scanned] * 2


def test_what_comes_before_selection_and_warm_up_are_left_out() -> None:
    wrapped = Warmup(MomentumCorrection(TopK(0.01)), 10, (0.5,))
    assert played(wrapped, 1 << 12, 4) == played(TopK(0.01), 1 << 12, 4)


@pytest.mark.parametrize(("collective", "factors"), [(PowerSGD(2), 2), (ACPSGD(2), 1)])
def test_low_rank_depends_on_shapes(collective: Collective, factors: int) -> None:
    shapes = ((64, 32), (64,))
    both = scripts(collective, 64 * 32 + 64, torch.float32, shapes, 4)
    numbers = [
        op.tensor.numel()
        for script in both[1:]
        for act in script.acts
        for op in act.asked
        if isinstance(op, AllReduce | Mean)
    ]
    if factors == 2:
        assert numbers == [128, 64 + 64, 128, 64 + 64]
    else:  # the factors in turn
        assert sorted(numbers) == [64 + 64, 128 + 64]


@dataclass(frozen=True)
class Own:
    """A user's collective."""

    def reduce(self, payload: Payload, group: Group) -> Flow:
        everybody = yield AllGather(payload.flat[:2])
        assert everybody.shape == (group.size, 2)
        total: torch.Tensor = yield AllReduce(payload.flat)
        return total.div_(group.size)


@pytest.mark.parametrize("size", [4, 64])
def test_a_collective_of_the_users_own(size: int) -> None:
    script = played(Own(), 1 << 16, size)
    gathered, reduced = (op for act in script.acts for op in act.asked)
    assert isinstance(gathered, AllGather)
    assert gathered.tensor.numel() == 2
    assert isinstance(reduced, AllReduce)
    assert reduced.tensor.numel() == 1 << 16


@dataclass(frozen=True)
class Picky:
    """One that only real peers satisfy."""

    def reduce(self, payload: Payload, group: Group) -> Flow:
        rows = yield AllGather(torch.tensor([group.rank]))
        if len(rows.unique()) < group.size:
            raise RuntimeError("who are you?")
        return payload.flat


@pytest.mark.parametrize("size", [4, 64])
def test_what_cannot_be_made_up_is_run_by_all_ranks(size: int) -> None:
    assert played(Picky(), 100 * size, size).acts


def test_ranks_that_do_not_fit_into_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flows, "ROOM", 1000)
    with pytest.raises(ValueError, match="simulate it among fewer"):
        played(Picky(), 6400, 64)
