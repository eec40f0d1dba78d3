"""DeMo: the largest frequencies of each tile, and what they leave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.collectives.test_tiled import SHAPES, payload_of

from gradtide.collectives import DeMo
from gradtide.collectives._tiles import Grid
from gradtide.collectives.contrib.demo import _cosines, _turned
from gradtide.collectives.levels import TwoLevel
from gradtide.core.ops import Group
from gradtide.core.payload import Payload
from gradtide.scheme import parse
from gradtide.testing import check_law, lockstep
from gradtide.wire import WIRES


@pytest.mark.product
@pytest.mark.pairs(wire=[None, *WIRES], size=[2, 3, 8], levels=[False, True])
def test_law_on_every_wire(wire: Any, size: int, levels: bool) -> None:
    if levels:
        check_law(TwoLevel(DeMo(64, wire), 2), 2 * size, numel=400 * size, steps=4)
    else:
        check_law(DeMo(64, wire), size, numel=3333 * size, steps=4)


@pytest.mark.parametrize("size", [2, 3])
def test_law_of_matrices(size: int) -> None:
    loads = [payload_of(SHAPES, seed) for seed in range(size)]
    begins, begin = [], 0
    for shape in SHAPES:
        begins.append(begin)
        begin += math.prod(shape) + 2
    for payload in loads:
        payload.flat = payload.flat.double()
        payload.parts = [
            payload.flat[b : b + math.prod(shape)].view(shape)
            for b, shape in zip(begins, SHAPES, strict=True)
        ]
    before = torch.stack([payload.flat for payload in loads])
    flows = [DeMo().reduce(p, Group(r, size)) for r, p in enumerate(loads)]
    mean = lockstep(flows)[0]
    after = torch.stack([payload.flat for payload in loads])
    torch.testing.assert_close(size * mean + after.sum(0), before.sum(0))
    assert (after.norm(dim=1) < before.norm(dim=1)).all()  # a projection, never longer
    assert mean.any()


def test_the_transform_is_the_published_one() -> None:
    for n in (1, 5, 64):
        matrix = _cosines(n, torch.float64, torch.device("cpu"))
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(n).double())
        rng = np.random.default_rng(n)
        x = rng.standard_normal(n)
        # By its definition: twice a sum of cosines, scaled to be orthonormal.
        at = np.arange(n)
        rows = [2 * sum(x * np.cos(np.pi * k * (2 * at + 1) / (2 * n))) for k in at]
        scale = [math.sqrt(1 / (4 * n)), *[math.sqrt(1 / (2 * n))] * (n - 1)]
        wanted = np.array(rows) * np.array(scale)
        np.testing.assert_allclose(matrix.numpy() @ x, wanted, atol=1e-12)
    grid = Grid(0, 64 * 64, 64)
    tile = torch.zeros(1, 4096, dtype=torch.float64)
    tile[0, 65 * 3] = 1.0  # the frequency (3, 3)
    wave = _turned(tile, grid, back=True)
    torch.testing.assert_close(_turned(wave, grid, back=False), tile)


def test_a_wave_travels_as_one_number() -> None:
    """What is smooth is few frequencies: all of it arrives in one step."""
    down = torch.cos(math.pi / 64 * (torch.arange(128) % 64 + 0.5) * 5)
    across = torch.cos(math.pi / 64 * (torch.arange(64) + 0.5) * 2)
    flat = torch.outer(down, across).double().flatten()
    loads = [Payload(x, [x.view(128, 64)]) for x in (flat.clone(), flat.clone())]
    flows = [DeMo(1).reduce(p, Group(r, 2)) for r, p in enumerate(loads)]
    mean = lockstep(flows)[0]
    torch.testing.assert_close(mean, flat, atol=1e-5, rtol=0)
    assert all(payload.flat.abs().max() < 1e-5 for payload in loads)
    assert loads[0].num_sent == 2


def test_a_tile_that_is_not_finite_is_told_of_and_the_others_travel() -> None:
    loads = [payload_of([(128, 64)], seed, gap=0) for seed in range(2)]
    kept = loads[1].flat.clone()
    loads[1].flat[5000] = math.inf
    flows = [DeMo().reduce(p, Group(r, 2)) for r, p in enumerate(loads)]
    mean = lockstep(flows)[0]
    assert [math.isnan(load.nonfinite) for load in loads] == [False, True]
    assert mean[:4096].isfinite().all()
    assert not mean[4096:].isfinite().any()
    kept[5000] = 0
    assert torch.equal(loads[1].flat[4096:], kept[4096:])


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (0, 4097):
        with pytest.raises(ValueError, match="DeMo"):
            DeMo(wrong)
    with pytest.raises(ValueError, match="selects nothing"):
        parse("demo(momentum_correction=True)")
