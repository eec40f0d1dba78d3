"""Sums of factors and what is handed out, in lockstep against their definitions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.core.levels import levels_of
from gradtide.core.ops import Flow, Group
from gradtide.kfac.flows import Piece, Share, Sum
from gradtide.testing import lockstep

CPU = torch.device("cpu")


def inputs(size: int, numel: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(size)
    return [torch.randn(numel, generator=rng) for _ in range(size)]


def parts(size: int, numel: int) -> list[int]:
    """Uneven, and nothing for the second rank."""
    sizes = [numel // size] * size
    sizes[0] += numel - sum(sizes)
    if size > 2:
        sizes[2], sizes[1] = sizes[2] + sizes[1], 0
    return sizes


def summed(
    size: int,
    sizes: list[int] | None,
    wire: torch.dtype | None,
    numel: int = 103,
    local: int | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor, Counter[str]]:
    flats = inputs(size, numel)
    expected = torch.stack(flats).sum(0)
    numbers = [torch.full((3,), float(rank)) for rank in range(size)]
    traffic: Counter[str] = Counter()
    told: list[int] = []

    def flow(rank: int) -> Flow:
        algorithm = Sum(flats[rank], sizes, wire, numbers[rank], lambda: told.append(1))
        return by_levels(algorithm, rank, size, local)

    lockstep([flow(rank) for rank in range(size)], traffic)
    assert len(told) == size
    return flats, numbers, expected, traffic


def by_levels(flow: Sum | Share, rank: int, size: int, local: int | None) -> Flow:
    """A rank's flow as the engine would drive it where hosts have `local` ranks."""
    group = Group(rank, size)
    levels = levels_of(group, local)
    run = flow.run(group, levels)
    return run if levels is None else levels.carried(run)


RANKS = [(1, None), (2, None), (3, None), (4, None), (8, None), (4, 2), (6, 2), (6, 3)]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(("size", "local"), RANKS)
def test_everybody_gets_the_sum(
    size: int, local: int | None, wire: torch.dtype | None
) -> None:
    flats, numbers, expected, _ = summed(size, None, wire, 1003, local)
    for flat, number in zip(flats, numbers, strict=True):
        close = 0.02 * size if wire is not None and size > 1 else 1e-5
        torch.testing.assert_close(flat, expected, rtol=close, atol=close)
        assert torch.equal(flat, flats[0])
        assert number.tolist() == [size * (size - 1) / 2] * 3


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(("size", "local"), RANKS)
def test_owners_get_their_part_of_the_sum(
    size: int, local: int | None, wire: torch.dtype | None
) -> None:
    sizes = parts(size, 1003)
    flats, numbers, expected, _ = summed(size, sizes, wire, 1003, local)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for rank, flat in enumerate(flats):
        own = slice(ends[rank] - sizes[rank], ends[rank])
        close = 0.02 * size if wire is not None and size > 1 else 1e-5
        torch.testing.assert_close(flat[own], expected[own], rtol=close, atol=close)
        assert numbers[rank].tolist() == [size * (size - 1) / 2] * 3


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_for_owners_take_half_of_the_bytes(size: int) -> None:
    numel = 10_000
    all_of_it = sum(summed(size, None, None, numel)[3].values())
    owned = sum(summed(size, parts(size, numel), None, numel)[3].values())
    assert owned <= 0.55 * all_of_it
    half = sum(summed(size, None, torch.bfloat16, numel)[3].values())
    assert half <= 0.51 * all_of_it


@pytest.mark.parametrize("local", [2, 4])
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_link_carries_what_one_rank_would_send(
    wire: torch.dtype | None, owned: bool, local: int
) -> None:
    def crossed(local: int) -> float:
        size = 4 * local
        sizes = [8000 // size] * size if owned else None
        traffic = summed(size, sizes, wire, 8000, local)[3]
        traffic.pop("rounds")
        return sum(traffic.values()) / size

    assert crossed(local) == pytest.approx(crossed(1), rel=0.05)


PIECES = {
    "all": lambda size: [
        Piece(5 + i, i % 2, frozenset(range(size)) - {i % 2}) for i in range(5)
    ],
    "some": lambda size: [
        Piece(4, 0, frozenset({1})),
        Piece(7, 1, frozenset({0})),
        Piece(3, size - 1, frozenset({0, 1}) - {size - 1}),
        Piece(2, 0, frozenset({size - 1}) - {0}),
    ],
    "none": lambda size: [],
    "many": lambda size: [
        Piece(6 + i, i % size, frozenset(range(i, i + size - 1)) - {i % size, size})
        for i in range(3)
    ],
}


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize(("size", "local"), RANKS)
def test_pieces_arrive_where_they_are_needed(
    kind: str, size: int, local: int | None
) -> None:
    if size == 1 and kind != "none":
        pytest.skip("nobody to send to")
    pieces = PIECES[kind](size)
    shares: list[Share] = []
    order: list[str] = []

    def share(rank: int) -> Share:
        def make() -> None:
            order.append("make")
            for piece, view in shares[rank].views.items():
                if piece.source == rank:
                    view.fill_(pieces.index(piece) + 1)

        def take() -> None:
            order.append("take")

        return Share(pieces, Group(rank, size), CPU, make, take)

    shares += [share(rank) for rank in range(size)]
    flows = [by_levels(s, r, size, local) for r, s in enumerate(shares)]
    lockstep(flows)
    assert sorted(order) == ["make"] * size + ["take"] * size
    for rank, own in enumerate(shares):
        met = {p for p in pieces if rank == p.source or rank in p.receivers}
        assert set(own.views) == met
        for piece, view in own.views.items():
            assert view.tolist() == [pieces.index(piece) + 1] * piece.numel
