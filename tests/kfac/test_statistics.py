"""Factors of a step against autograd, and a whole step against a textbook."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtide.kfac.config import KFAC
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.invert import kl_part, kl_scale, write_back
from gradtide.kfac.layers import KINDS, Kind, Layer, supported
from gradtide.kfac.samples import batch, tokens
from gradtide.kfac.statistics import Statistics


class Log:
    """Collects what gets ready, as full matrices, and in which order."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.layers = supported(model)
        self.statistics = Statistics(model, self.layers, self, **options)
        self.factors: dict[tuple[str, Kind], Tensor] = {}
        self.order: list[tuple[str, Kind]] = []

    def __call__(self, layer: Layer, kind: Kind, factor: Tensor) -> None:
        assert factor.dtype is torch.float32
        upper = factor.triu()
        self.factors[layer.name, kind] = upper + factor.triu(1).mT
        self.order.append((layer.name, kind))

    def step(self, *backwards: Callable[[], Tensor]) -> list[tuple[Layer, Kind]]:
        """One armed step; all backwards but the last are quiet."""
        self.factors, self.order = {}, []
        self.statistics.arm()
        for i, loss in enumerate(backwards):
            self.statistics.quiet = i < len(backwards) - 1
            loss().backward()
        return self.statistics.finish()


def expected(
    rows_a: list[Tensor], rows_g: list[Tensor], samples: int, bias: bool = True
) -> tuple[Tensor, Tensor]:
    """A and G of one group from all inputs and all gradients, in float64."""
    a, g = torch.cat(rows_a).double(), torch.cat(rows_g).double()
    if bias:
        a = torch.cat([a, torch.ones(len(a), 1)], 1)
    return (a.T @ a / len(a)).float()[None], (samples * g.T @ g).float()[None]


def close(actual: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().max()
    torch.testing.assert_close(actual / scale, wanted / scale, rtol=1e-5, atol=1e-6)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


def loss_of(
    model: nn.Module, x: Tensor, y: Tensor, share: float = 1
) -> Callable[[], Tensor]:
    return lambda: share * F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def data(n: int, *positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *positions, 4, generator=random)
    return x, torch.randint(3, (n, *positions), generator=random)


def by_hand(model: nn.Sequential, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(inputs, gradients of the mean loss) of both Linears, as rows, by autograd."""
    hidden = model[0](x)
    active = hidden.relu()
    out = model[2](active)
    loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
    g_hidden, g_out = torch.autograd.grad(loss, (hidden, out))
    pairs = [(x, g_hidden), (active.detach(), g_out)]
    return [(a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])) for a, g in pairs]


# - Scale ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_factors_of_a_batch(steps: int) -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    for _ in range(steps):  # in the first step nothing is known about numbers of calls
        assert log.step(loss_of(model, x, y)) == []
        for name, (a, g) in zip("02", by_hand(model, x, y), strict=True):
            wanted = expected([a], [g], 8)
            close(log.factors[name, "A"], wanted[0])
            close(log.factors[name, "G"], wanted[1])


def test_g_is_the_mean_of_outer_products_of_samples_gradients() -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    log.step(loss_of(model, x, y))
    samples = [by_hand(model, x[i : i + 1], y[i : i + 1])[1][1] for i in range(8)]
    wanted = torch.stack([g.T @ g for g in samples]).mean(0)
    close(log.factors["2", "G"], wanted[None])


@pytest.mark.parametrize(("samples", "number"), [(batch, 6), (tokens, 30)])
def test_positions_are_rows_and_samples_what_the_loss_averages(
    samples: Any, number: int
) -> None:
    model, (x, y) = net(), data(6, 5)
    log = Log(model, samples=samples)
    log.step(loss_of(model, x, y))
    for name, (a, g) in zip("02", by_hand(model, x, y), strict=True):
        wanted = expected([a], [g], number)
        close(log.factors[name, "A"], wanted[0])
        close(log.factors[name, "G"], wanted[1])


@pytest.mark.parametrize("steps", [1, 2])
def test_micro_batches_equal_one_batch(steps: int) -> None:
    model, (x, y) = net(), data(12)
    whole, parts = Log(model), Log(model)
    for _ in range(steps):
        whole.step(loss_of(model, x, y))
        cuts = ((0, 4), (4, 6), (6, 12))
        parts.step(*[loss_of(model, x[i:j], y[i:j], (j - i) / 12) for i, j in cuts])
        for key, factor in whole.factors.items():
            close(parts.factors[key], factor)


def test_mean_over_ranks_equals_the_whole_batch() -> None:
    model, (x, y) = net(), data(12)
    whole, ranks = Log(model), [Log(model) for _ in range(3)]
    whole.step(loss_of(model, x, y))
    for i, rank in enumerate(ranks):
        rank.step(loss_of(model, x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]))
    for key, factor in whole.factors.items():
        close(torch.stack([rank.factors[key] for rank in ranks]).mean(0), factor)


def test_the_loss_scale_is_divided_out() -> None:
    model, (x, y) = net(), data(8)
    plain, scaled = Log(model), Log(model, scale=lambda: 1024.0)
    plain.step(loss_of(model, x, y))
    scaled.step(loss_of(model, x, y, 1024))
    for key, factor in plain.factors.items():
        close(scaled.factors[key], factor)


def test_autocast_does_not_round_the_products() -> None:
    model, (x, y) = net(), data(512)
    log = Log(model)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    for _ in range(2):
        log.step(loss)
        close(log.factors["0", "A"], expected([x], [x], 1)[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_convolutions(grouped: bool) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2 if grouped else 1)
    x = torch.randn(5, 4, 8, 8)
    log = Log(module)
    ys: list[Tensor] = []

    def loss() -> Tensor:
        ys.append(module(x))
        ys[-1].retain_grad()
        return ys[-1].square().sum() / 5

    for _ in range(2):
        log.step(loss)
    (layer,) = log.layers
    a = F.unfold(x, 3, stride=2, padding=1).view(5, layer.groups, -1, 16)
    g = ys[-1].grad.view(5, layer.groups, -1, 16)
    for i in range(layer.groups):
        rows = [t[:, i].transpose(1, 2).flatten(0, 1) for t in (a, g)]
        wanted = expected([rows[0]], [rows[1]], 5)
        close(log.factors["", "A"][i : i + 1], wanted[0])
        close(log.factors["", "G"][i : i + 1], wanted[1])


def test_wide_layers_are_computed_in_blocks() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(600, 2), torch.randn(7, 600)
    log = Log(model)
    log.step(lambda: model(x).sum())
    close(log.factors["", "A"], expected([x], [x], 1)[0])


# - When and what is counted -----------------------------------------------------------


def test_factors_get_ready_in_forward_and_in_backward() -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    log.step(loss_of(model, x, y))
    log.order = []
    log.statistics.arm()
    loss = loss_of(model, x, y)()
    assert log.order == [("0", "A"), ("2", "A")]
    loss.backward()
    assert log.order[2:] == [("2", "G"), ("0", "G")]
    assert log.statistics.finish() == []
    assert len(log.order) == 4


@pytest.mark.parametrize("number", [1, 3])
def test_only_the_last_micro_batch_completes_a_factor(number: int) -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    loss = loss_of(model, x, y)
    log.step(loss, loss)
    log.order = []
    log.statistics.arm()
    for i in range(number):
        assert log.order == []
        log.statistics.quiet = i < number - 1
        last = loss()
        assert bool(log.order) == (i == number - 1)
        last.backward()
    assert log.order == [("0", "A"), ("2", "A"), ("2", "G"), ("0", "G")]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_layer_that_is_called_twice(steps: int) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 4), torch.randn(6, 4)
    model = nn.Sequential(module, nn.Tanh(), module)
    log = Log(model)
    for _ in range(steps):
        log.step(lambda: model(x).square().sum() / 6)
    first = module(x)
    second_in = first.tanh()
    second = module(second_in)
    grads = torch.autograd.grad(second.square().sum() / 6, (first, second))
    wanted = expected([x, second_in.detach()], list(grads), 6)
    close(log.factors["0", "A"], wanted[0])
    close(log.factors["0", "G"], wanted[1])
    assert log.order == [("0", "A"), ("0", "G")]


def test_a_call_more_than_expected_is_left_out_once() -> None:
    module, x = nn.Linear(4, 4), torch.randn(6, 4)
    log = Log(module)
    for _ in range(2):
        log.step(lambda: module(x).sum())
    log.step(lambda: module(module(x)).sum())
    close(log.factors["", "A"], expected([x], [x], 1)[0])
    log.step(lambda: module(module(x)).sum())
    close(log.factors["", "A"], expected([x, module(x).detach()], [x], 1)[0])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, left: bool = True, cut: bool = False) -> Tensor:
        if cut:
            self.right(x)  # its output gets no gradient
        return self.left(x) if left else self.right(x)  # type: ignore[no-any-return]


def test_unused_layers_are_reported() -> None:
    model, (x, _) = Branches(), data(6)
    log = Log(model)
    for left in (True, False, True):
        missing = log.step(lambda left=left: model(x, left).sum())  # type: ignore[misc]
        used, unused = ("left", "right") if left else ("right", "left")
        assert [(layer.name, kind) for layer, kind in missing] == [
            (unused, "A"),
            (unused, "G"),
        ]
        assert {name for name, _ in log.factors} == {used}
    missing = log.step(lambda: model(x, cut=True).sum())
    assert [(layer.name, kind) for layer, kind in missing] == [("right", "G")]


def test_forwards_without_gradients_and_in_eval_mode_do_not_count() -> None:
    model, (x, y) = net(), data(8)
    log, bare = Log(model), Log(model)

    def loss() -> Tensor:
        with torch.no_grad():
            model(x + 1)
        model.eval()
        model(x - 1)
        model.train()
        return loss_of(model, x, y)()

    for _ in range(2):
        log.step(loss)
        bare.step(loss_of(model, x, y))
        for key, factor in bare.factors.items():
            assert torch.equal(log.factors[key], factor)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_once(reentrant: bool) -> None:
    model, (x, y) = net(), data(8)
    log, bare = Log(model), Log(model)

    def loss() -> Tensor:
        parts = [nn.Sequential(model[0], model[1]), model[2]]
        h = x.clone().requires_grad_()
        for part in parts:
            h = checkpoint(part, h, use_reentrant=reentrant)
        return F.cross_entropy(h, y)

    for _ in range(2):
        log.step(loss)
        bare.step(loss_of(model, x, y))
        for key, factor in bare.factors.items():
            close(log.factors[key], factor)


def test_submodules_that_are_called_directly_count_samples() -> None:
    model, (x, y) = net(), data(8)
    log, bare = Log(model), Log(model)
    halves = [(x[:4], y[:4]), (x[4:], y[4:])]
    log.step(
        *[
            lambda x=x, y=y: F.cross_entropy(model[2](model[1](model[0](x))), y) / 2
            for x, y in halves
        ]
    )
    bare.step(loss_of(model, x, y))
    for key, factor in bare.factors.items():
        close(log.factors[key], factor)


def test_an_empty_batch_contributes_nothing() -> None:
    model = nn.Linear(4, 3)
    log = Log(model)
    missing = log.step(lambda: model(torch.empty(0, 4)).sum())
    assert {kind for _, kind in missing} == {"A", "G"}


def test_nothing_is_left_when_not_armed() -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    log.step(loss_of(model, x, y))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    log.order = []
    loss_of(model, x, y)().backward()
    assert log.order == []


def test_no_activation_outlives_the_step() -> None:
    model, (x, y) = net(), data(8)
    log = Log(model)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda *a: seen.append(weakref.ref(a[-1])))
    for _ in range(2):
        log.step(loss_of(model, x, y))
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


def test_copies_of_an_armed_model_do_not_count() -> None:
    model, (x, y) = net(), data(8)
    log, bare = Log(model), Log(model)

    def loss() -> Tensor:
        twin = copy.deepcopy(model)
        loss_of(twin, x - 1, y)().backward()
        return loss_of(model, x, y)()

    for _ in range(2):
        log.step(loss)
        bare.step(loss_of(model, x, y))
        for key, factor in bare.factors.items():
            assert torch.equal(log.factors[key], factor)


def test_arming_anew_drops_an_abandoned_forward() -> None:
    model, (x, y) = net(), data(8)
    log, bare = Log(model), Log(model)
    for each in (log, bare):
        each.step(loss_of(model, x, y))
    log.statistics.arm()
    loss_of(model, x + 5, y)()
    log.step(loss_of(model, x, y))
    bare.step(loss_of(model, x, y))
    for key, factor in bare.factors.items():
        assert torch.equal(log.factors[key], factor)


# - A whole step -----------------------------------------------------------------------


def textbook(
    model: nn.Sequential,
    x: Tensor,
    y: Tensor,
    damping: float,
    kl_clip: float,
    lr: float,
) -> list[Tensor]:
    """One step's preconditioned gradients by explicit Kronecker products, float64."""
    pairs, solved = by_hand(model, x, y), []
    for a, g in pairs:
        big_a, big_g = (t[0].double() for t in expected([a], [g], len(x)))
        ones = torch.cat([a.double(), torch.ones(len(a), 1)], 1)
        v = g.double().T @ ones
        pi = ((big_a.trace() / len(big_a)) / (big_g.trace() / len(big_g))).sqrt()
        big_a = big_a + pi * damping**0.5 * torch.eye(len(big_a))
        big_g = big_g + damping**0.5 / pi * torch.eye(len(big_g))
        p = torch.linalg.solve(torch.kron(big_g, big_a), v.flatten()).view_as(v)
        solved.append((v, p))
    nu = min(
        1.0,
        (kl_clip / abs(sum(float((v * p).sum()) for v, p in solved) * lr**2)) ** 0.5,
    )
    return [nu * p for _, p in solved]


@pytest.mark.parametrize("kl_clip", [1e-4, 1e9])
def test_a_step_equals_the_textbook(kl_clip: float) -> None:
    model, (x, y) = net().train(), data(9)
    damping, lr = 0.01, 0.1
    layers, config = supported(model), KFAC("mpd", damping=damping)
    curvatures = {layer: Curvature(layer, config, KINDS) for layer in layers}
    packed = {
        (la, kind): torch.empty(la.numel(kind)) for la in layers for kind in KINDS
    }
    numbers = {la: torch.zeros(la.numbers, dtype=torch.float64) for la in layers}

    def ready(layer: Layer, kind: Kind, factor: Tensor) -> None:
        curvatures[layer].take(kind, factor, packed[layer, kind], numbers[layer])

    statistics = Statistics(model, layers, ready)
    statistics.arm()
    loss_of(model, x, y)().backward()
    assert statistics.finish() == []
    wanted = textbook(model, x, y, damping, kl_clip, lr)
    results = []
    for layer in layers:
        curvature = curvatures[layer]
        sums = {kind: packed[layer, kind] for kind in KINDS}
        curvature.average(numbers[layer], sums, 1)
        curvature.invert()
        curvature.complete()
        curvature.adopt()
        gradient = layer.matrix(layer.weight.grad, layer.bias.grad)
        results.append((gradient, curvature.precondition(gradient)))
    nu = kl_scale([kl_part(v, p, lr) for v, p in results], kl_clip)
    for layer, (_, p), expect in zip(layers, results, wanted, strict=True):
        write_back(layer, p, [layer.weight.grad, layer.bias.grad], nu)
        actual = layer.matrix(layer.weight.grad, layer.bias.grad)[0]
        error = (actual.double() - expect).norm() / expect.norm()
        assert error < 1e-5


def test_times_are_in_the_order_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3))
    log = Log(model)
    log.statistics.arm()
    model[1](model[0](torch.ones(2, 4))).sum().backward()  # the third is not used
    times = log.statistics.times()
    first, second, unused = log.layers
    order = [(first, "A"), (second, "A"), (second, "G"), (first, "G")]
    found = [times[key] for key in order]  # type: ignore[index]
    assert found == sorted(found)
    assert found[0] == 0.0
    assert times[unused, "A"] == times[unused, "G"] == found[-1]
