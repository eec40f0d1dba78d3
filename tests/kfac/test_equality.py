"""P ranks against one process on the whole batch, and against K-FAC's definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

import gradtide

BATCH = 24
STEPS = 6  # benchmarks/curvature.py takes more
EXACT = (
    "mpd_kfac",
    "spd_kfac",
    "pad_kfac",
    "pad_kfac(placement='measured', workers=1.0)",
    "pad_kfac(workers=0.3)",
)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 5, bias=False),
    )  # fmt: skip


def samples(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 48, generator=rng)
    return x, torch.randint(0, 5, (BATCH,), generator=rng)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(scheme: str, steps: int = STEPS) -> list[float]:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = gradtide.replicate(model, opt, scheme)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        x, y = (t.chunk(size)[rank] for t in samples(step))
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    sync.remove()
    return flat(model).tolist()


@cache
def alone(scheme: str) -> Tensor:
    return torch.tensor(run_ranks(1, train, scheme)[0])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_one_process(size: int) -> None:
    schemes = [*EXACT, "spd_kfac(schedule='dear')"]
    ranks = run_ranks(size, lambda: [train(scheme) for scheme in schemes])
    assert all(rank == ranks[0] for rank in ranks)
    one, found = alone("spd_kfac"), list(map(torch.tensor, ranks[0]))
    for scheme, weights in zip(schemes, found, strict=True):
        assert distance(weights, one) <= 1e-5, scheme
        assert distance(weights, found[0]) <= 1e-6, scheme


class Sometimes(nn.Module):
    """One layer is for all samples; another in odd steps for the first half alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(48, 5), nn.Linear(48, 5)

    def forward(self, x: Tensor, step: int) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        first = BATCH // 2 - rank * len(x)  # of these samples
        number = len(x) if step % 2 == 0 else min(max(first, 0), len(x))
        out: Tensor = self.always(x)
        assert size <= 2
        if not number:
            return out
        return torch.cat([out[:number] + self.sometimes(x[:number]), out[number:]])


@pytest.mark.parametrize("kind", ["mpd_kfac", "spd_kfac", "pad_kfac"])
def test_a_layer_that_a_rank_does_not_use_adds_nothing_of_earlier_steps(
    kind: str,
) -> None:
    def run() -> list[float]:
        model = Sometimes()
        opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        sync = gradtide.replicate(model, opt, kind)
        for step in range(STEPS):
            x, y = (
                t.chunk(dist.get_world_size())[dist.get_rank()] for t in samples(step)
            )
            cross_entropy(model(x, step), y).backward()
            opt.step()
            opt.zero_grad()
        sync.remove()
        return flat(model).tolist()

    (one,), ranks = run_ranks(1, run), run_ranks(2, run)
    assert ranks[0] == ranks[1]
    assert distance(torch.tensor(ranks[0]), torch.tensor(one)) <= 1e-5


def test_one_process_equals_the_definition() -> None:
    for scheme in ("mpd_kfac", "dp_kfac"):
        assert distance(alone(scheme), reference(lambda layer: slice(None))) <= 1e-4


def test_dp_is_the_same_maths_with_the_owners_samples() -> None:
    """Two layers' owners, found by their state: then the twin with their halves."""

    def owned() -> list[bool]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = gradtide.replicate(model, opt, "dp_kfac").kfac
        assert kfac is not None
        return [bool(kfac.curvatures[layer].running) for layer in kfac.layers]

    first, second = run_ranks(2, owned)
    assert [a != b for a, b in zip(first, second, strict=True)] == [True] * 3
    half = BATCH // 2
    ours = run_ranks(2, train, "dp_kfac")
    assert ours[0] == ours[1]

    def rows(layer: int) -> slice:
        return slice(0, half) if first[layer] else slice(half, BATCH)

    assert distance(torch.tensor(ours[0]), reference(rows)) <= 1e-4


def reference(rows: Callable[[int], slice], steps: int = STEPS) -> Tensor:
    """K-FAC as it is defined, in float64; layer i's factors from `rows(i)` alone."""
    damping, decay, kl_clip, lr = 0.003, 0.95, 0.001, 0.02
    model = network().double()
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    layers = [m for m in model if isinstance(m, nn.Linear | nn.Conv2d)]
    running: dict[tuple[int, str], Tensor] = {}
    for step in range(steps):
        x, y = samples(step)
        seen, out = [], x.double()
        for module in model:
            before, out = out, module(out)
            if module in layers:
                out.retain_grad()
                seen.append((before, out))
        cross_entropy(out, y).backward()
        made = []
        for i, (layer, (a, z)) in enumerate(zip(layers, seen, strict=True)):
            assert z.grad is not None
            a, g = a[rows(i)].detach(), BATCH * z.grad[rows(i)]
            n = len(a)
            if isinstance(layer, nn.Conv2d):
                a = unfold(a, 3, padding=1).transpose(1, 2).reshape(-1, 27)
                g = g.flatten(2).transpose(1, 2).reshape(-1, 8)
            if layer.bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            factors = {"A": a.T @ a / len(a), "G": g.T @ g / n}
            for kind, new in factors.items():
                old = running.get((i, kind), new)
                running[i, kind] = decay * old + (1 - decay) * new
            made.append(_precondition(layer, running[i, "A"], running[i, "G"], damping))
        total = sum(float((p * v).sum()) for v, p in made) * lr**2
        nu = min(1.0, math.sqrt(kl_clip / abs(total)))
        for layer, (_, p) in zip(layers, made, strict=True):
            assert layer.weight.grad is not None
            width = layer.weight[0].numel()
            layer.weight.grad.copy_(nu * p[:, :width].view_as(layer.weight))
            if layer.bias is not None:
                assert layer.bias.grad is not None
                layer.bias.grad.copy_(nu * p[:, -1])
        opt.step()
        opt.zero_grad()
    return flat(model).float()


def _precondition(
    layer: nn.Linear | nn.Conv2d, a: Tensor, g: Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    """The gradient as a matrix, and (G + ..)^-1 gradient (A + ..)^-1."""
    assert layer.weight.grad is not None
    v = layer.weight.grad.flatten(1)
    if layer.bias is not None:
        assert layer.bias.grad is not None
        v = torch.cat([v, layer.bias.grad[:, None]], 1)
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    root = math.sqrt(damping)
    a = a + pi * root * torch.eye(len(a), dtype=a.dtype)
    g = g + root / pi * torch.eye(len(g), dtype=g.dtype)
    return v, torch.linalg.solve(g, v) @ torch.linalg.inv(a)
