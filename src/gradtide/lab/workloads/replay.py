"""Networks too large for the lab: the real tensors, with a wait in place of compute.

Every unit (a layer with its own parameters) is a module whose forward waits its share
and hands a small carrier on, and whose backward waits its share and then gives each
parameter a gradient. Hooks fire where, and in the order in which, the real network
would fire them.

[Note: What a wait stands for] A wait is an accelerator at work while its host is idle.
A unit's wait begins when its predecessor's ended and the hooks between them returned:
time that the host spends in hooks, casts or copies is real and adds to the step. What
only the replay costs counts as waited: its bookkeeping, writing the gradients (a pass
over memory, and the page faults of allocating it), and oversleeping (timer granularity,
a busy CPU), as an accelerator would have gone on. Waits below MIN_WAIT are put together
with the next. So steps on average take what was asked, unless writing the gradients
takes longer. (Guarded by test_waits_sum_to_what_was_asked.)

[Note: Replayed gradients] Element j of a gradient is shared[j] * own[j]^2 * SCALE with
`shared` the same normal noise on all ranks and `own` the rank's: heavy-tailed like the
cube of a normal variable, and correlated 1/3 between two ranks, so that the ranks'
largest entries overlap somewhat. Both live in one pool; a gradient is a copy of a slice
of it, which autograd takes over without a second copy, and the slice moves on with each
step. (Guarded by test_gradients_are_the_callers_own.)

Not replayed: activations, buffers such as running means, and any learning: the loss is
the sum of the carrier, always 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import SGD

from gradtide.lab.workloads.shapes import Unit, units
from gradtide.lab.workloads.timing import by_work, from_trace
from gradtide.lab.workloads.workload import NOISE, Batch, Timing, Workload, stream
from gradtide.planner.steps.training import MAX_CREDIT as MAX_CREDIT

# Milliseconds of a step unless told: round numbers of the order of a data-centre GPU of
# 2018 with some tens of samples, no measurement. Give `step_ms` or a trace for yours.
STEP_MS = {
    "resnet50": 200.0,
    "resnet152": 500.0,
    "densenet201": 400.0,
    "bert-base": 250.0,
    "bert-large": 600.0,
    "bert-base-pretraining": 300.0,
    "bert-large-pretraining": 650.0,
    "gpt2": 400.0,
    "gpt-30m": 30.0,
}
MIN_WAIT = 1e-3  # seconds; sleeping overshoots by about 60 us, 6 % of it
SCALE = 1e-3  # of a gradient's elements
SPARE = 1 << 23  # pool elements beyond the largest tensor: 32 MB; more: rarer repeats
STRIDE = 16 * 7919  # elements a step; multiples of 16 keep slices on cache lines
LEARNING_RATE = 1e-6  # parameters stay near 0, whatever the number of steps


class Pace:
    """Waits that add up; see [Note: What a wait stands for]."""

    def __init__(self) -> None:
        self.owed = 0.0  # seconds still to wait; negative: waited in advance

    def wait(self, seconds: float) -> None:
        """Owe `seconds` more, and sleep once MIN_WAIT is owed."""
        self.owed += seconds
        if self.owed >= MIN_WAIT:
            with self.counted():
                time.sleep(self.owed)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The time spent inside counts as waited."""
        begin = time.perf_counter()
        yield
        passed = time.perf_counter() - begin
        self.owed = max(self.owed - passed, -MAX_CREDIT)


class Pool:
    """Read-only noise from which gradients are cut; see [Note: Replayed gradients]."""

    def __init__(self, largest: int, seed: int, rank: int) -> None:
        size = largest + SPARE
        own = _normal(size, seed, 1 + rank)
        self.noise = own.square_().mul_(_normal(size, seed, 0)).mul_(SCALE)

    def cut(self, shape: tuple[int, ...], position: int, step: int) -> Tensor:
        """The gradient at `step` of the tensor that begins at element `position`."""
        count = math.prod(shape)
        start = (position + step * STRIDE) % (len(self.noise) - count)
        return self.noise.narrow(0, start - start % 16, count).view(shape)


def _normal(size: int, seed: int, who: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(int(stream(NOISE, seed, who).integers(2**63)))
    return torch.empty(size).normal_(generator=generator)


class Layer(nn.Module):
    """One unit: its parameters, its times and its gradients."""

    def __init__(
        self, unit: Unit, timing: Timing, position: int, pool: Pool, pace: Pace
    ) -> None:
        super().__init__()
        self.timing, self.position, self.pool, self.pace = timing, position, pool, pace
        for name, shape in unit.shapes:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, carrier: Tensor) -> Tensor:
        with self.pace.counted():
            given = partial(self.gradients, int(carrier[0]))
            out: Tensor = Given.apply(given, carrier, *self.parameters())  # type: ignore[no-untyped-call]
        self.pace.wait(self.timing.forward)
        return out

    def gradients(self, step: int) -> list[Tensor]:
        """The backward: a wait, and a fresh gradient per parameter, in order."""
        position, gradients = self.position, []
        with self.pace.counted():
            for parameter in self.parameters():
                noise = self.pool.cut(tuple(parameter.shape), position, step)
                gradients.append(noise.clone())
                position += parameter.numel()
        self.pace.wait(self.timing.backward)
        return gradients


class Given(torch.autograd.Function):
    """The carrier through; on the way back, the gradients that a call gives."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[[], list[Tensor]],
        carrier: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.gradients = gradients
        return carrier.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient, *ctx.gradients()


class Replay(nn.Module):
    """The units under their dotted names, executed in order."""

    def __init__(
        self, units: Sequence[Unit], times: Sequence[Timing], seed: int, rank: int
    ) -> None:
        super().__init__()
        counts = [[math.prod(shape) for _, shape in unit.shapes] for unit in units]
        pool, pace = Pool(max(max(c, default=0) for c in counts), seed, rank), Pace()
        layers, position = [], 0
        for unit, timing, count in zip(units, times, counts, strict=True):
            layers.append(Layer(unit, timing, position, pool, pace))
            position += sum(count)
            module: nn.Module = self
            *path, leaf = unit.name.split(".")
            for part in path:  # empty modules on the way
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.add_module(leaf, layers[-1])
        self.order = tuple(layers)  # a tuple is not registered a second time

    def forward(self, carrier: Tensor) -> Tensor:
        for layer in self.order:
            carrier = layer(carrier)
        return carrier


def carrier(step: int) -> Batch:
    """The step's number and its opposite: the gradients' slices depend on the step."""
    return torch.tensor([float(step), -float(step)]), torch.zeros(())


def timings(name: str, step_ms: float | None, trace: Path | None) -> list[Timing]:
    """The times of the units of `replay:ARCHITECTURE`, in order."""
    if step_ms is not None and trace is not None:
        raise ValueError("step_ms and trace both say how long a step is: give one")
    architecture = name.removeprefix("replay:")
    parts = units(architecture)
    if trace is not None:
        return from_trace(parts, trace)
    return by_work(parts, STEP_MS[architecture] if step_ms is None else step_ms)


def build(
    name: str, rank: int, seed: int, step_ms: float | None, trace: Path | None
) -> Workload:
    times = timings(name, step_ms, trace)
    model = Replay(units(name.removeprefix("replay:")), times, seed, rank)
    forward, backward = zip(*times, strict=True)
    return Workload(
        name=name,
        model=model,
        # The cheapest real update: it stands for an accelerator's.
        optimizer=SGD(model.parameters(), lr=LEARNING_RATE, foreach=True),
        batch=carrier,
        loss=lambda model, batch: model(batch[0]).sum(),
        waits=Timing(sum(forward), sum(backward)),
    )
