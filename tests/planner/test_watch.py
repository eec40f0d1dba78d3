"""What hooks see of a training: orders and times, on a clock that the model moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradtide.planner import watch as watches
from gradtide.planner.trace import StepTrace
from gradtide.planner.watch import Clock, Watch


class Ticks:
    """A clock that stands still unless told; its moments are no numbers."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> tuple[float]:
        return (self.time,)

    def between(self, begin: tuple[float], end: tuple[float]) -> float:
        return end[0] - begin[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """What all watches go by."""
    ticks = Ticks()
    monkeypatch.setattr(watches, "Clock", lambda device: ticks)
    return ticks


class _Takes(torch.autograd.Function):
    """Through; the clock moves on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Ticks, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.clock.time += ctx.seconds
        return grad, None, None


class Layer(nn.Module):
    """`forward` and twice as many seconds of `backward`."""

    def __init__(self, clock: Ticks, seconds: float, bias: bool = True) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.weight = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(3)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        self.clock.time += self.seconds
        x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        # Before this layer's gradients, on the way back.
        out: Tensor = _Takes.apply(x, self.clock, 2 * self.seconds)  # type: ignore[no-untyped-call]
        return out


def watched(
    model: nn.Module,
    steps: int = 3,
    loss: Callable[[Tensor], Tensor] = torch.sum,
) -> StepTrace:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(trained, lr=0.0)
    watch = Watch(model, optimizer, steps, warmup=1)
    for _ in range(steps + 1):
        assert not watch.done
        loss(model(torch.ones(3))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert watch.done
    watch.remove()
    return watch.trace("model")


def test_orders_sizes_and_times(clock: Ticks) -> None:
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 10.0, bias=False))

    def loss(out: Tensor) -> Tensor:
        clock.time += 100.0
        return out.sum()

    trace = watched(model, loss=loss)
    names = [unit.name for unit in trace.units]
    assert names[0] == "1.weight"
    assert set(names[1:]) == {"0.weight", "0.bias"}
    assert [unit.numel for unit in trace.units] == [3, 3, 3]
    assert {unit.shape for unit in trace.units} == {(3,)}
    assert {unit.itemsize for unit in trace.units} == {4}
    assert [unit.backward for unit in trace.units] == [20.0, 2.0, 0.0]
    read = [names[i] for i in trace.forward_order]
    assert read == ["0.weight", "0.bias", "1.weight"]
    assert [trace.units[i].forward for i in trace.forward_order] == [0.0, 1.0, 10.0]
    assert (trace.forward, trace.loss, trace.backward) == (11.0, 100.0, 22.0)


def test_what_other_hooks_do_with_a_gradient_is_not_backward(clock: Ticks) -> None:
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 1.0))

    def take(_: Tensor) -> None:
        clock.time += 50.0

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(take)
    assert watched(model).backward == 4.0


class _Closing(SGD):
    """Its update takes 6 s, after so many calls of the closure."""

    def __init__(self, model: nn.Module, clock: Ticks, calls: int) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.clock, self.calls = clock, calls

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(self.calls):
            closure()
        self.clock.time += 6.0


@pytest.mark.parametrize("calls", [1, 3])
def test_a_closures_backward_is_no_time_of_the_optimizer(
    clock: Ticks, calls: int
) -> None:
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 10.0))
    optimizer = _Closing(model, clock, calls)
    watch = Watch(model, optimizer, 2, 0)
    for _ in range(2):
        optimizer.step(lambda: model(torch.ones(3)).sum().backward())
    trace = watch.trace("model")
    assert (trace.forward, trace.backward, trace.optimizer) == (11.0, 22.0, 6.0)
    assert watch.updates() == [6.0, 6.0]
    assert watch.passes() == [calls, calls]
    assert watch.earlier() == [33.0 * (calls - 1)] * 2


def test_passes_before_the_last_are_counted_and_timed(clock: Ticks) -> None:
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 10.0))
    optimizer = SGD(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 2, 0)
    for passes in (1, 4):
        for _ in range(passes):
            model(torch.ones(3)).sum().backward()
            clock.time += 5.0  # loading data
        optimizer.step()
    assert watch.passes() == [1, 4]
    assert watch.earlier() == [0.0, 3 * 38.0]
    trace = watch.trace("model")
    assert (trace.forward, trace.backward) == (11.0, 22.0)


def test_modules_that_nothing_in_common_calls_are_told_as_tops(clock: Ticks) -> None:
    first, second = Layer(clock, 1.0), Layer(clock, 10.0)
    model = nn.ModuleList([first, second])
    optimizer = SGD(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 1, 0, (first, second))
    for _ in range(2):
        out = second(first(torch.ones(3)))
        clock.time += 3.0
        out.sum().backward()
    optimizer.step()
    trace = watch.trace("model")
    assert (trace.forward, trace.loss, trace.backward) == (11.0, 3.0, 22.0)
    assert watch.passes() == [2]


def test_the_optimizers_time_is_shared_by_size(clock: Ticks) -> None:

    class Slow(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            clock.time += 6.0

    model = nn.ModuleDict({"a": nn.Linear(4, 1, bias=False)})
    model["b"] = nn.Linear(2, 1, bias=False)
    optimizer = Slow(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 1, 0)
    (model["a"](torch.ones(4)) + model["b"](torch.ones(2))).sum().backward()
    optimizer.step()
    trace = watch.trace("model")
    assert trace.optimizer == 6.0
    shares = {unit.name: unit.optimizer for unit in trace.units}
    assert shares == {"a.weight": 4.0, "b.weight": 2.0}


def test_tied_parameters_are_one_unit_that_is_read_first_and_ready_last(
    clock: Ticks,
) -> None:
    first, middle, last = (Layer(clock, 1.0, bias=False) for _ in range(3))
    last.weight = first.weight
    trace = watched(nn.Sequential(first, middle, last))
    assert [unit.name for unit in trace.units] == ["1.weight", "0.weight"]
    assert trace.forward_order == (1, 0)
    # The last layer's backward comes before the middle's gradient.
    assert [unit.backward for unit in trace.units] == [4.0, 2.0]
    assert [unit.forward for unit in trace.units] == [2.0, 1.0]


def test_a_module_called_twice_is_read_at_the_first_call(clock: Ticks) -> None:
    twice, other = Layer(clock, 1.0, bias=False), Layer(clock, 10.0, bias=False)
    trace = watched(nn.Sequential(twice, other, twice))
    assert [unit.name for unit in trace.units] == ["1.weight", "0.weight"]
    assert [unit.forward for unit in trace.units] == [11.0, 1.0]
    assert [unit.backward for unit in trace.units] == [22.0, 2.0]


def test_frozen_parameters_are_no_units_but_their_time_counts(clock: Ticks) -> None:
    first, frozen = Layer(clock, 1.0, bias=False), Layer(clock, 10.0)
    frozen.requires_grad_(False)
    trace = watched(nn.Sequential(first, frozen))
    assert [unit.name for unit in trace.units] == ["0.weight"]
    assert (trace.forward, trace.loss, trace.backward) == (1.0, 10.0, 22.0)


def test_unused_parameters_come_last(clock: Ticks) -> None:
    model = nn.Sequential(Layer(clock, 1.0, bias=False))
    model.register_parameter("nobody", nn.Parameter(torch.ones(5)))
    trace = watched(model)
    assert [unit.name for unit in trace.units] == ["0.weight", "nobody"]
    nobody = trace.units[1]
    assert (nobody.backward, nobody.optimizer) == (0.0, 0.0)
    assert sorted(trace.forward_order) == [0, 1]


def test_a_module_that_is_never_called_is_read_by_the_one_above() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 1)
    optimizer = SGD(attention.parameters(), lr=0.1)
    watch = Watch(attention, optimizer, 1, 0)
    x = torch.ones(2, 1, 4)
    attention(x, x, x)[0].sum().backward()
    optimizer.step()
    trace = watch.trace("attention")
    assert len(trace.units) == len(trace.forward_order) == 4
    assert trace.units[trace.forward_order[0]].name == "in_proj_weight"


def test_times_add_up_to_the_whole(clock: Ticks) -> None:
    """Steps of which each is slow in another layer."""
    layers = [Layer(clock, 1.0, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 3, 0)
    for step in range(3):
        for i, layer in enumerate(layers):
            layer.seconds = 10.0 if i == step else 1.0
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    trace = watch.trace("model")
    assert trace.forward == 12.0
    assert trace.backward == 24.0


def test_only_training_counts(clock: Ticks) -> None:
    model = Layer(clock, 1.0, bias=False)
    optimizer = SGD(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 1, 0)
    optimizer.step()  # no gradients: no step
    with torch.no_grad():
        clock.time += 5.0
        model(torch.ones(3))
    for _ in range(2):  # accumulates: the last pass counts
        model(torch.ones(3)).sum().backward()
        clock.time += 7.0
    assert not watch.done
    optimizer.step()
    trace = watch.trace("model")
    assert (trace.forward, trace.backward, trace.loss) == (1.0, 2.0, 0.0)


def test_hooks_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = SGD(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer)
    watch.remove()
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for p in model.parameters():
        assert not p._backward_hooks
        assert not p._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_copy_of_the_model_neither_copies_the_watch_nor_is_watched(
    clock: Ticks,
) -> None:
    model = nn.Sequential(Layer(clock, 1.0), Layer(clock, 1.0))
    optimizer = SGD(model.parameters(), lr=0.0)
    watch = Watch(model, optimizer, 1, 0)
    model(torch.ones(3)).sum().backward()
    copied = copy.deepcopy(model, memo := {})
    assert id(watch) not in memo
    assert b"gradtide" not in pickle.dumps(model)
    clock.time += 5.0
    copied(torch.ones(3)).sum().backward()
    optimizer.step()
    trace = watch.trace("model")
    assert (trace.forward, trace.backward, trace.loss) == (2.0, 4.0, 0.0)


def test_gradients_are_what_they_would_be() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    Watch(model, SGD(model.parameters(), lr=0.1))
    model(x).square().sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert grad is not None
        assert torch.equal(p.grad, grad)  # type: ignore[arg-type]


def test_errors() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="watch 1 or more"):
        Watch(model, optimizer, steps=0)
    with pytest.raises(ValueError, match=r"call backward\(\) and then step\(\)"):
        Watch(model, optimizer).trace("model")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        Watch(model, optimizer)


def test_hosts_have_clocks() -> None:
    clock = Clock(torch.device("cpu"))
    assert clock.between(clock.now(), clock.now()) >= 0


def test_devices_are_asked_after_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded on the current stream, and waited for at the end only."""
    waits: list[int] = []

    class Event:
        made = 0

        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self, stream: str) -> None:
            assert stream == "current"

        def synchronize(self) -> None:
            waits.append(self.number)

        def elapsed_time(self, end: Event) -> float:
            return float(end.number - self.number)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "current")
    monkeypatch.setattr(watches, "Clock", lambda _: Clock(torch.device("cuda")))
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer, 1, 0)
    model(torch.ones(2)).backward()
    optimizer.step()
    assert not waits
    trace = watch.trace("model")
    assert waits
    assert trace.forward == pytest.approx(1e-3)  # one event after the other
    assert trace.optimizer == pytest.approx(1e-3)
