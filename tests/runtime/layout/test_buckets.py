"""What is put into a bucket of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

from gradtide import Replica, replicate
from gradtide.collectives import Dense
from gradtide.runtime.layout.buckets import LARGE, GradientBucket, copied_at_once
from gradtide.runtime.layout.slots import Slot


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


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "dear(wire='int8')", "topka2a(.1)"])
def test_gradients_that_are_kept_stay_what_they_were(scheme: str) -> None:
    run_ranks(2, _two_tasks, scheme)


def _two_tasks(scheme: str) -> None:
    warnings.simplefilter("ignore")  # dear warns of what is read before step()
    ours, torchs = _trained(scheme), _trained(None)
    assert not torch.equal(torchs, _network().state_dict()["0.weight"])
    if scheme in ("wfbp", "dear"):
        assert torch.equal(ours, torchs)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    wide = LARGE // 64
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, wide), nn.Linear(wide, 1))


def _trained(scheme: str | None) -> Tensor:
    """A parameter after steps that add up what two backward passes made.

    As methods for several tasks do it: the first pass's gradients are kept, not copied.
    """
    net = _network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    model: nn.Module = net
    if scheme is None:
        model = nn.parallel.DistributedDataParallel(net)
    else:
        sync = replicate(net, optimizer, scheme)
    data = torch.Generator().manual_seed(dist.get_rank())
    kept: list[tuple[Tensor | None, Tensor]] = []
    for _ in range(6):
        x = torch.randn(4, 8, generator=data)
        tasks = []
        for power in (1, 2):
            optimizer.zero_grad()
            model(x).abs().pow(power).mean().backward()
            grads = [p.grad for p in net.parameters()]
            tasks.append(grads)
            kept += [(g, g.detach().clone()) for g in grads if g is not None]
        for p, first, second in zip(net.parameters(), *tasks, strict=True):
            assert first is not None
            assert second is not None
            p.grad = first + second
        for grad, copy in kept:  # of earlier steps, too
            assert grad is not None
            assert torch.equal(grad + 0, copy)
        optimizer.step()
    if scheme is not None:
        sync.flush()
        sync.remove()
    return net[0].weight.detach()


@pytest.mark.parametrize("schedule", ["WFBP", "DEAR"])
def test_gradients_are_kept_that_nobody_reads_before_the_next_backward(
    schedule: str,
) -> None:
    run_ranks(2, _unread, f"Scheme(schedule={schedule}, fusion=PerTensor())")


def _unread(scheme: str) -> None:
    ours, torchs = list(_steps(scheme)), list(_steps(None))
    assert len(ours) == len(torchs) > 4
    for own, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


class _Sometimes(nn.Module):
    """A layer that every other call leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 2 else x  # type: ignore[no-any-return]


def _steps(scheme: str | None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each step a parameter, and the last step's gradients with a norm of theirs.

    Every other forward leaves a module out, whose update stays due.
    """
    net = _network()
    net.append(_Sometimes())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    model: nn.Module = net
    if scheme is None:
        model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    else:
        sync = replicate(net, optimizer, scheme)
    data = torch.Generator().manual_seed(dist.get_rank())
    kept: list[Tensor | None] = []
    for step in range(10):
        if step == 6 and scheme is not None:  # buckets are cut anew, on the same memory
            sync.adopt(scheme)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=data)).abs().mean().backward()
        if kept:
            used = -1 if step % 2 else 0  # where the last step had them all
            first, some = kept[0], kept[used]
            assert first is not None
            assert some is not None
            yield net[0].weight.detach().clone(), first + 0, some + 0, first.norm()
        kept = [p.grad for p in net.parameters()]
        optimizer.step()
    if scheme is not None:
        sync.flush()
        sync.remove()


def test_only_a_cpu_copies_large_gradients_at_once() -> None:
    for device, expected in (("cpu", True), ("meta", False)):
        assert copied_at_once(torch.empty(LARGE, device=device)) is expected
    assert not copied_at_once(torch.empty(LARGE - 1))


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["wfbp(wire='sign')", "demo(schedule='wfbp')", "gtopk(0.3, wire='2bit')"]
)
def test_nothing_is_left_between_slots_that_a_state_would_not_have(scheme: str) -> None:
    run_ranks(3, _resumed, scheme)


def _resumed(scheme: str) -> None:
    """Slots are padded here; a wire of one bit has something for each element."""
    model, optimizer, sync = _started(scheme)
    _train(model, optimizer, 0)
    states = model.state_dict(), optimizer.state_dict(), sync.state_dict()
    saved = deepcopy(states)
    _train(model, optimizer, 3)
    expected = [p.detach().clone() for p in model.parameters()]
    sync.remove()
    model, optimizer, sync = _started(scheme)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    sync.load_state_dict(saved[2])
    _train(model, optimizer, 3)
    assert all(map(torch.equal, model.parameters(), expected))
    sync.remove()


def _started(scheme: str) -> tuple[nn.Module, torch.optim.Optimizer, Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, replicate(model, optimizer, scheme)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int) -> None:
    for step in range(begin, begin + 3):
        rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=rng)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
