"""ARC-Top-K: all send the rows whose sum is long, by a sketch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradtide.collectives import ARCTopK
from gradtide.collectives.contrib.arctopk import longest, pays
from gradtide.core.ops import Group, payload_bytes
from gradtide.core.payload import Payload
from gradtide.planner.rehearsal import rehearsal
from gradtide.testing import check_law, lockstep
from gradtide.wire import codec_of

N = 3 * (128 * 40 + 30)  # of rows of 128, and something behind the last


def loads_of(size: int, numel: int) -> list[Payload]:
    rng = torch.Generator().manual_seed(1)
    flats = [torch.randn(numel, generator=rng) for _ in range(size)]
    return [Payload(flat, [flat]) for flat in flats]


def test_rows_that_are_long_in_the_sum_travel_from_every_rank() -> None:
    size, long = 3, torch.tensor([3, 17, 40, 99])
    loads = loads_of(size, N)
    for rank, payload in enumerate(loads):
        rows = payload.flat[: N // 128 * 128].view(-1, 128)
        rows[long] += 5
        rows[60] += 100 * (rank - 1)  # large on ranks 0 and 2, and nothing together
    before = torch.stack([payload.flat for payload in loads])
    collective = ARCTopK(density=4 / (N // 128))
    flows = [collective.reduce(p, Group(r, size)) for r, p in enumerate(loads)]
    mean = lockstep(flows)[0]
    expected = torch.zeros(N)
    where = (long[:, None] * 128 + torch.arange(128)).flatten()
    where = torch.cat([where, torch.arange(N // 128 * 128, N)])
    expected[where] = before.mean(0)[where]
    torch.testing.assert_close(mean, expected)
    before[:, where] = 0
    assert torch.equal(torch.stack([payload.flat for payload in loads]), before)


def test_of_equal_rows_the_first_and_what_is_not_finite_is_longest() -> None:
    sketch = torch.zeros(9, 2)
    sketch[2:5] = torch.tensor([3.0, 4.0])
    sketch[7] = torch.tensor([5.0, 0.0])
    assert longest(sketch, 2).tolist() == [2, 3]
    sketch[8, 1], sketch[5, 0] = torch.nan, -torch.inf
    assert longest(sketch, 3).tolist() == [2, 5, 8]


@pytest.mark.parametrize(("wire", "nbytes"), [(None, 4.0), ("int8", 1 + 4 / 256)])
def test_bytes_are_as_promised_and_planned(wire: Any, nbytes: float) -> None:
    size, n = 4, 4 * 128 * 320
    traffic = check_law(
        ARCTopK(wire=wire), size, numel=n, steps=1, dtype=torch.float32,
        tolerance=1e-5, scales=(),
    )  # fmt: skip
    traffic.pop("rounds")
    sent = sum(traffic.values()) / size
    assert sent == pytest.approx(2 * 3 / 4 * n * (4 * 4 / 128 + 0.2 * nbytes), rel=1e-3)
    found = rehearsal.scripts(ARCTopK(wire=wire), n, torch.float32, (), size)
    asked = [op for act in found[1].acts for op in act.asked]
    assert sum(payload_bytes(op, Group(0, size)) for op in asked) == sent


def test_what_does_not_pay_is_dense() -> None:
    floats = codec_of(None, torch.float32)
    assert pays(1000, 900, 99, 2, floats)
    assert not pays(1000, 900, 101, 2, floats)
    assert "AllReduce" not in check_law(ARCTopK(1.0), 3)
    assert "AllReduce" not in check_law(ARCTopK(), 3, numel=99)  # not one row


@pytest.mark.parametrize("wrong", [{"density": 2.0}, {"columns": 0}, {"rank": 0}])
def test_what_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="ARCTopK"):
        ARCTopK(**wrong)
