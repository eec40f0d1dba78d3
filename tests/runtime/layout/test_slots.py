"""Where a parameter's elements lie in a flat tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradtide.runtime.layout.slots import Slot

SHAPES = [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 2, 2)]
LAST = [((2, 3, 4, 5), torch.channels_last), ((2, 3, 2, 2, 2), torch.channels_last_3d)]


def _slot(param: Tensor, begin: int) -> tuple[Slot, Tensor]:
    flat = torch.arange(float(param.numel() + 10))
    return Slot("p", nn.Parameter(param), 0, begin), flat


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_has_the_parameters_shape(shape: tuple[int, ...]) -> None:
    slot, flat = _slot(torch.zeros(shape), 4)
    part = slot.of(flat)
    assert part.shape == shape
    assert part.data_ptr() == flat[4:].data_ptr()  # a view, no copy
    assert torch.equal(part.flatten(), flat[4 : 4 + part.numel()])


@pytest.mark.parametrize(("shape", "form"), LAST)
def test_a_part_has_the_parameters_order_in_memory(
    shape: tuple[int, ...], form: torch.memory_format
) -> None:
    param = torch.zeros(shape).to(memory_format=form)
    slot, flat = _slot(param, 4)
    part = slot.of(flat)
    assert part.stride() == param.stride()
    assert part.data_ptr() == flat[4:].data_ptr()
    # In the order of memory it is the flat tensor's own.
    dims = sorted(range(part.dim()), key=part.stride, reverse=True)
    assert torch.equal(part.permute(dims).flatten(), flat[4 : 4 + part.numel()])


def test_a_gradient_is_the_parameters() -> None:
    slot, _ = _slot(torch.zeros(3), 0)
    assert slot.grad is None
    slot.grad = own = torch.ones(3)
    assert slot.param.grad is own
    assert slot.grad is own
    slot.grad = None
    assert slot.param.grad is None
