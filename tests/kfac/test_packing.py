"""Symmetric matrices survive the wire, and nothing but their upper half travels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradtide.kfac.packing import pack, packed_numel, traces, unpack

SIZES = [1, 2, 63, 64, 65, 128, 150]


def symmetric(groups: int, d: int) -> Tensor:
    x = torch.randn(groups, d, d, generator=torch.Generator().manual_seed(d))
    return x + x.mT


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("d", SIZES)
def test_unpack_undoes_pack(groups: int, d: int) -> None:
    full = symmetric(groups, d)
    flat = pack(full, torch.full((packed_numel(groups, d),), torch.nan))
    assert torch.equal(unpack(flat, torch.full_like(full, torch.nan)), full)


@pytest.mark.parametrize("d", SIZES)
def test_all_of_the_upper_half_travels_once(d: int) -> None:
    full = torch.arange(d * d, dtype=torch.float).view(1, d, d)
    rows, columns = torch.triu_indices(d, d)
    flat = pack(full, torch.empty(d * (d + 1) // 2))
    assert torch.equal(flat.sort().values, full[0, rows, columns].sort().values)


def test_the_lower_half_is_not_read() -> None:
    full = symmetric(2, 100)
    spoiled = full.triu() + torch.full_like(full, torch.nan).tril(-1).nan_to_num(7e7)
    assert torch.equal(
        pack(full, torch.empty(packed_numel(2, 100))),
        pack(spoiled, torch.empty(packed_numel(2, 100))),
    )


def test_packs_into_a_slice_of_another_type() -> None:
    full, wire = symmetric(1, 70), torch.zeros(packed_numel(1, 70) + 5).bfloat16()
    pack(full, wire[2:-3])
    expected = full.bfloat16().float()
    assert torch.equal(unpack(wire[2:-3], torch.empty_like(full)), expected)
    assert not wire[:2].any()
    assert not wire[-3:].any()


@pytest.mark.parametrize("d", SIZES)
def test_traces_of_packed_matrices(d: int) -> None:
    full = symmetric(3, d)
    flat = pack(full, torch.empty(packed_numel(3, d)))
    expected = full.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(traces(flat, 3, d), expected)
