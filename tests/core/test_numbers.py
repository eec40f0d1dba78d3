"""Numbers get to a device as they are, and nobody waits for them."""

from __future__ import annotations

import pytest
import torch
from tests.waits import synchronised

from gradtide.core.numbers import on_device

KINDS = ((torch.int32, [1, 2**31 - 1]), (torch.int64, [2**40]), (torch.float32, [0.1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_arrive(device: str) -> None:
    for dtype, numbers in (*KINDS, (torch.int64, [])):
        found = on_device(numbers, dtype, torch.device(device))
        assert found.device.type == device
        assert torch.equal(found.cpu(), torch.tensor(numbers, dtype=dtype))


@pytest.mark.gpu
def test_nobody_waits_for_them() -> None:
    device = torch.device("cuda")
    torch.empty(0, device=device)
    with synchronised() as waits:
        on_device(range(100_000), torch.int64, device)
    assert not waits
