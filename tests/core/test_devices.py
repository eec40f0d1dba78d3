"""Numbers go to a device, and come back, without a wait for each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.waits import synchronised
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtide.core.devices import _unlike_there, on_device, sent, unlike

WAITS = {"aten._local_scalar_dense.default", "aten.equal.default"}


class Seen(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pairs", "differ"),
    [
        ([([1.0, 2.0], [1.0, 2.0]), ([], []), ([math.inf], [math.inf])], False),
        ([([1.0, 2.0], [1.0, 2.0]), ([3.0], [3.5])], True),
        ([([math.nan], [math.nan]), ([1.0], [1.0])], True),
        ([([0.0], [-0.0])], False),
    ],
)
def test_tensors_are_compared(pairs: list[Any], differ: bool) -> None:
    told = [(torch.tensor(x), torch.tensor(y)) for x, y in pairs]
    assert unlike(told) is differ
    with Seen() as seen:
        found = _unlike_there(told)
    assert not WAITS & set(seen.names)
    assert bool(found) == differ


def test_what_is_on_the_host_stays_there() -> None:
    own = torch.tensor([1.0, 2.0])
    assert sent(own, torch.device("cpu")) is own
    assert sent(own, torch.device("meta")).is_meta


@pytest.mark.gpu
def test_nothing_waits_on_a_gpu() -> None:
    device = torch.device("cuda")
    x = torch.ones(1000, device=device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers: Tensor = sent(torch.tensor([1.0, 2.0]), device)
        told = unlike([(x, x), (x, x + 1)])
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert numbers.tolist() == [1.0, 2.0]
    assert bool(told)


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
