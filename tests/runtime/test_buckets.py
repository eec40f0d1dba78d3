"""What is put into a bucket of gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gradtide.collectives import Dense
from gradtide.runtime.buckets import LARGE, GradientBucket, Slot


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_large_gradient_is_copied_as_it_is(
    threads: int, last: bool, dtype: torch.dtype
) -> None:
    shape = (LARGE // 64, 16, 2, 2)
    form = torch.channels_last if last else torch.contiguous_format
    p = nn.Parameter(torch.zeros(shape, dtype=dtype).to(memory_format=form))
    slot = Slot("p", p, 0)
    bucket = GradientBucket([slot], torch.full((p.numel(),), 9, dtype=dtype), Dense())
    values = torch.randn(shape).to(dtype, memory_format=form)
    # As under create_graph=True: one that is part of a graph, and of odd values.
    values[0, 0] = torch.tensor([[torch.inf, torch.nan], [-0.0, 1e-40]])
    p.grad = values.clone().requires_grad_()
    version = bucket.payload.flat._version
    bucket.copy_in_one(slot)
    assert bucket.payload.flat._version > version  # graphs that saved it will notice
    assert p.grad is None
    assert slot.copied
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(bucket.views[0].view(bits), values.view(bits))
    p.grad = torch.ones_like(values)
    bucket.copy_in_one(slot)  # a second gradient is added
    assert torch.equal(bucket.views[0][1:], values[1:] + 1)


def test_what_was_handed_out_may_be_given_other_memory() -> None:
    sizes = LARGE, 3
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    slots = [Slot(f"p{i}", p, i) for i, p in enumerate(params)]
    slots[1].begin = LARGE
    bucket = GradientBucket(slots, torch.zeros(sum(sizes)), Dense())
    for step in 1.0, 2.0, 3.0:
        for slot, p in zip(slots, params, strict=True):
            p.grad, slot.arrived = torch.full_like(p, step), True
        bucket.copy_in_one(slots[0])
        bucket.copy_in()
        bucket.mean = bucket.payload.flat
        assert bool((bucket.mean == step).all())
        bucket.expose()
        for p in params:
            assert p.grad is not None
            assert bool((p.grad == step).all())
            p.grad.data = p.grad.data * 2  # as under DDP, this is the program's own
        assert bool((bucket.mean == step).all())
        bucket.rearm()
