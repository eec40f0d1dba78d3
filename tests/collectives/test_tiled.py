"""Tiles: what each gives, places in 12 bits, bytes, and what is planned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.waits import Waits
from torch import Tensor

from gradtide.collectives import TiledTopK
from gradtide.collectives._tiles import (
    Places,
    grids_of,
    length,
    pack,
    places_of,
    unpack,
)
from gradtide.collectives.dense import pays
from gradtide.core.ops import Group, payload_bytes
from gradtide.core.payload import Payload
from gradtide.planner.rehearsal import rehearsal
from gradtide.testing import lockstep
from gradtide.wire import WIRES, codec_of

# Of parts that end within tiles, with gaps between them; longer and narrower ones.
SHAPES = [(130, 70), (300,), (5, 3, 3, 200), (2, 64), (5000,), (64, 128), (90, 2)]


def payload_of(shapes: Any, seed: int = 0, gap: int = 2) -> Payload:
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(lengths) + gap * len(lengths))
    parts, begin = [], 0
    rng = torch.Generator().manual_seed(seed)
    for shape, n in zip(shapes, lengths, strict=True):
        part = flat[begin : begin + n]
        part.copy_(torch.randn(n, generator=rng).pow(3))
        parts.append(part.view(shape))
        begin += n + gap
    return Payload(flat, parts)


def test_places_are_found_without_waiting_for_a_device() -> None:
    flat = torch.randn(70 * 130 + 5000, generator=torch.Generator().manual_seed(0))
    payload = Payload(flat, [flat[: 70 * 130].view(70, 130), flat[70 * 130 :]])
    grids = grids_of(payload)
    chosen = places_of(grids, 1 / 64)
    assert places_of(grids_of(payload), 1 / 64) is chosen
    with Waits() as waits:
        places = chosen.largest([grid.cut(flat.abs(), fill=-1.0) for grid in grids])
        where = chosen.in_bucket(places, len(flat))
        tiles = torch.cat([grid.cut(flat).flatten() for grid in grids])
        assert torch.equal(tiles.index_select(0, chosen.in_tiles(places)), flat[where])
    assert not waits
    assert len(where.unique()) == len(chosen)


def test_a_bucket_is_all_in_tiles_and_back() -> None:
    payload = payload_of(SHAPES)
    grids = grids_of(payload)
    assert [g.begin for g in grids] == sorted(g.begin for g in grids)
    joined = torch.cat([grid.joined(grid.cut(payload.flat)) for grid in grids])
    assert torch.equal(joined, payload.flat)
    for grid in grids:
        whole = grid.kept(1.0)
        assert int(whole.sum()) == grid.length
        assert torch.equal((grid.cut(payload.flat.abs(), -1.0) >= 0).sum(1), whole)
    assert [g.columns for g in grids if g.columns != 64] == [70, 1800, 128, 2]


def largest_by_hand(x: Tensor, density: float) -> Tensor:
    """What a matrix gives, as a matrix; the definition."""
    given = torch.zeros_like(x)
    for r in range(0, x.shape[0], 64):
        for c in range(0, x.shape[1], 64):
            tile = x[r : r + 64, c : c + 64]
            k = max(1, round(density * tile.numel()))
            least = tile.abs().flatten().topk(k).values[-1]
            given[r : r + 64, c : c + 64] = tile.where(tile.abs() >= least, 0)
    return given


@pytest.mark.parametrize("size", [2, 3])
def test_every_tile_gives_its_largest(size: int) -> None:
    loads = [payload_of([(130, 70), (5000,), (64, 64)], seed) for seed in range(size)]
    expected = torch.zeros(130, 70)
    for payload in loads:
        expected += largest_by_hand(payload.parts[0], 1 / 64)
    chosen = Places(grids_of(loads[0]), 1 / 64)
    flows = [
        TiledTopK().reduce(payload, Group(rank, size))
        for rank, payload in enumerate(loads)
    ]
    mean = lockstep(flows)[0]
    found = mean[: 130 * 70].view(130, 70)
    torch.testing.assert_close(found, expected / size)
    run = mean[130 * 70 + 2 :][:5000]
    assert 64 <= int(run.count_nonzero()) <= size * (64 + 15)
    assert all(payload.num_sent == len(chosen) for payload in loads)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1001])
@pytest.mark.parametrize("wire", [None, *WIRES])
def test_places_take_12_bits(wire: Any, count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    codec = codec_of(wire, torch.float32)
    places = torch.randint(4096, (count,), generator=rng, dtype=torch.int32)
    places[0] = 4095
    values = torch.randn(count, generator=rng)
    before = values.clone()
    message = pack(places, values, codec)
    assert len(message) <= codec.nbytes(count) + 1.5 * count + 9
    told, heard = unpack(message[None], count, codec, torch.float32)
    assert torch.equal(told[0], places)
    torch.testing.assert_close(heard[0] + values, before)


def traffic_of(collective: TiledTopK, size: int, shapes: Any) -> int:
    """Bytes that a rank sends in a step."""
    loads = [payload_of(shapes, seed, gap=0) for seed in range(size)]
    traffic = Counter[str]()
    lockstep(
        [collective.reduce(p, Group(r, size)) for r, p in enumerate(loads)], traffic
    )
    traffic.pop("rounds")
    return sum(traffic.values()) // size


@pytest.mark.parametrize(("wire", "bits"), [(None, 44), ("bf16", 28), ("2bit", 14.25)])
def test_bytes_are_the_published_ones_and_planned(wire: Any, bits: float) -> None:
    size, n = 3, 64 * 64 * 30
    collective = TiledTopK(wire=wire)
    sent = traffic_of(collective, size, [(64 * 30, 64)])
    assert sent == pytest.approx((size - 1) * n / 64 * bits / 8, abs=8 * (size - 1))
    found = rehearsal.scripts(collective, n, torch.float32, ((64 * 30, 64),), size)
    asked = [op for act in found[1].acts for op in act.asked]
    assert sum(payload_bytes(op, Group(0, size)) for op in asked) == sent
    # A rehearsal knows runs alone; edges of matrices make little difference.
    sent = traffic_of(collective, size, [(1000, 30), (300, 300)])
    found = rehearsal.scripts(collective, 120_000, torch.float32, (), size)
    asked = [op for act in found[1].acts for op in act.asked]
    assert sum(payload_bytes(op, Group(0, size)) for op in asked) == pytest.approx(
        sent, rel=0.03
    )


def test_it_says_where_it_pays() -> None:
    for wire in (None, "bf16", "2bit"):
        codec = codec_of(wire, torch.float32)
        for size in (2, 4, 8):
            bound = TiledTopK(wire=wire).pays_below(size)
            n = 1 << 20
            for share, shorter in ((0.99, True), (1.01, False)):
                sent = (size - 1) * length(int(share * bound * n), codec)
                assert pays(sent, n, size, codec) is shorter


@pytest.mark.parametrize("wrong", [{"density": 0.0}, {"wire": "int7"}])
def test_what_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="TiledTopK"):
        TiledTopK(**wrong)
