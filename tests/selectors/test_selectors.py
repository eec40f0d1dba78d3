"""All selectors: about k of the largest, whatever scale, trend or oddity."""

from __future__ import annotations

import copy
import math
from statistics import mean

import pytest
import torch

from gradtide.selectors import (
    SELECTORS,
    Exact,
    Threshold,
    follow,
)

INF, NAN = float("inf"), float("nan")
ALL = [*(make() for make in SELECTORS)]
WINDOW = 20  # calls

selectors = pytest.mark.parametrize("select", ALL, ids=repr)


def gradient(kind: str, n: int, rng: torch.Generator, step: int) -> torch.Tensor:
    x = torch.randn(n, generator=rng)
    if kind == "pareto":  # P(|x| > t) falls like 1 / t^2
        return x / torch.empty(n).exponential_(generator=rng).sqrt()
    if kind == "layers":  # scales that differ by orders of magnitude, and stay
        return x * torch.linspace(-5, 5, n).exp()
    if kind == "fading":
        return x * math.exp(-step / 30)
    if kind == "bursts":
        return x * math.exp(0.5 * torch.randn((), generator=rng))
    return x


def densities(select, kind, n, k, *, feedback, scale=lambda step: 1.0, steps=60):
    """Realised over asked density, call by call, with or without error feedback."""
    rng, flat, state = torch.Generator().manual_seed(1), torch.zeros(n), {}
    found = []
    for step in range(steps):
        fresh = gradient(kind, n, rng, step) * scale(step)
        flat = flat + fresh if feedback else fresh
        where = select(flat, k, state)
        flat[where] = 0
        found.append(len(where) / k)
    return found


def windows(found: list[float]) -> list[float]:
    return [mean(found[i : i + WINDOW]) for i in range(len(found) - WINDOW + 1)]


def check_form(where: torch.Tensor, n: int) -> None:
    assert where.dtype == torch.int32
    assert where.dim() == 1
    assert len(where) >= 1
    assert (where[1:] > where[:-1]).all()
    assert int(where[0]) >= 0
    assert int(where[-1]) < n


@selectors
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("kind", ["normal", "pareto", "layers", "fading", "bursts"])
def test_density_holds_over_every_window(select, kind, feedback) -> None:
    found = densities(select, kind, 20_000, 200, feedback=feedback)
    assert max(found) <= 1.5
    assert all(abs(density - 1) < 0.1 for density in windows(found))


@selectors
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_scale_does_not_matter(select, scale) -> None:
    found = densities(
        select, "pareto", 20_000, 200, feedback=True, scale=lambda _: scale, steps=25
    )
    assert all(abs(density - 1) < 0.1 for density in windows(found))


@selectors
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_sudden_change_of_scale(select, factor, feedback) -> None:
    found = densities(
        select,
        "pareto",
        20_000,
        200,
        feedback=feedback,
        scale=lambda step: factor if step >= 20 else 1.0,
    )
    assert max(found) <= 1.5
    assert all(abs(density - 1) < 0.1 for density in windows(found))


@selectors
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_selects_what_is_above_some_threshold(select, dtype, density) -> None:
    rng, state, n = torch.Generator().manual_seed(0), {}, 30_000
    for _ in range(3):
        x = gradient("pareto", n, rng, 0).to(dtype)
        where = select(x, round(density * n), state)
        check_form(where, n)
        magnitudes = x.abs()
        rest = torch.ones(n, dtype=torch.bool)
        rest[where] = False
        assert magnitudes[rest].max() <= magnitudes[where].min()
        assert 0.7 < len(where) / (density * n) < 1.4


@selectors
@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("k", [0, 1, 2, 6, 7, 40, 1000])
def test_tiny(select, n, k) -> None:
    x, state = torch.randn(n, generator=torch.Generator().manual_seed(n)), {}
    for _ in range(4):
        where = select(x, k, state)
        check_form(where, n)
        if k >= n:
            assert len(where) == n
        else:
            assert len(where) <= max(k + 1, 1.25 * k)


@selectors
def test_all_zero_has_one_index(select) -> None:
    if isinstance(select, Exact):
        pytest.skip("always exactly k")
    state: dict[str, torch.Tensor] = {}
    for _ in range(3):
        assert select(torch.zeros(1000), 20, state).tolist() == [0]


@selectors
@pytest.mark.parametrize("value", [1.0, -1e-30, 3e38, INF, NAN])
@pytest.mark.parametrize("n", [1000, 100_000])
def test_ties_are_cut(select, value, n) -> None:
    x, state = torch.full((n,), value), {}
    for _ in range(3):
        where = select(x, 20, state)
        check_form(where, n)
        assert 10 <= len(where) <= 40


@selectors
def test_mostly_zero_sends_what_there_is(select) -> None:
    x, state = torch.zeros(10_000), {}
    x[::1000] = torch.arange(1.0, 11.0)
    for _ in range(3):
        where = set(select(x, 100, state).tolist())
        assert where >= set(range(0, 10_000, 1000))
        assert len(where) == 10 or isinstance(select, Exact)


@selectors
@pytest.mark.parametrize("special", [INF, -INF, NAN])
def test_what_is_not_finite_is_selected(select, special) -> None:
    rng, state = torch.Generator().manual_seed(0), {}
    for step in range(6):
        x = torch.randn(10_000, generator=rng)
        if step >= 2:
            x[[5, 5000]] = special
        where = select(x, 100, state).tolist()
        assert step < 2 or {5, 5000} <= set(where)
        assert 50 <= len(where) <= 150


@selectors
@pytest.mark.parametrize("special", [INF, -INF, NAN])
@pytest.mark.parametrize("count", [1, 12, 900])
@pytest.mark.parametrize("kind", ["ties", "few", "heavy"])
def test_what_is_not_finite_goes_first(select, special, count, kind) -> None:
    rng = torch.Generator().manual_seed(0)
    for k in (1, 10, 300):
        state: dict[str, torch.Tensor] = {}
        for step in range(3):
            x = torch.randn(1000, generator=rng).pow(9)
            if kind == "ties":
                x.fill_(5.0)
            elif kind == "few":
                x[: 1000 - 2 * k].zero_()
            if step > 0:
                x[1000 - count :] = special
            taken = x[select(x, k, state).long()]
            assert step == 0 or len(taken) - taken.isfinite().sum() >= min(count, k) / 2


@selectors
def test_recovers_from_a_step_that_was_not_finite(select) -> None:
    rng, state, found = torch.Generator().manual_seed(0), {}, []
    for step in range(40):
        x = torch.randn(10_000, generator=rng)
        if step == 10:
            x *= NAN
        found.append(len(select(x, 100, state)) / 100)
    assert all(abs(density - 1) < 0.1 for density in windows(found))


@selectors
def test_same_input_and_state_give_the_same(select) -> None:
    rng, state = torch.Generator().manual_seed(0), {}
    rows = [torch.randn(20_000, generator=rng) * 100 ** (i // 8) for i in range(12)]
    for x in rows[:6]:
        select(x, 2000, state)
    copied, before = copy.deepcopy(state), torch.get_rng_state()
    for x in rows[6:]:
        assert torch.equal(select(x, 2000, state), select(x, 2000, copied))
    assert torch.equal(torch.get_rng_state(), before)


@selectors
def test_state_is_float64_on_the_cpu_and_x_is_left_alone(select) -> None:
    x, state = torch.randn(5000, generator=torch.Generator().manual_seed(0)), {}
    kept = x.clone()
    select(x, 50, state)
    assert torch.equal(x, kept)
    assert all(t.dtype == torch.float64 for t in state.values())
    assert all(t.device.type == "cpu" for t in state.values())


@pytest.mark.parametrize("rate", [-0.01, 0.01])
def test_does_not_lag_behind_a_trend(rate) -> None:
    found = densities(
        Threshold(),
        "normal",
        50_000,
        5000,
        feedback=False,
        scale=lambda step: math.exp(rate * step),
    )
    assert mean(found[20:]) == pytest.approx(1, abs=0.01)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The lengths of what is searched, pass by pass."""
    found, above = [], follow.above
    spy = lambda x, *rest: found.append(x.numel()) or above(x, *rest)  # noqa: E731
    monkeypatch.setattr(follow, "above", spy)
    return found


def test_one_pass_is_the_rule(passes) -> None:
    densities(Threshold(), "pareto", 20_000, 200, feedback=True, steps=60)
    assert passes.count(20_000) <= 1.1 * 60


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_growth_is_followed_from_the_third_call_on(passes, power) -> None:
    """What error feedback leaves grows like this: to look twice is the exception."""
    rng, state = torch.Generator().manual_seed(1), {}
    for step in range(1, 13):
        x = torch.randn(50_000, generator=rng) * step**power
        Threshold()(x, 500, state)
    assert passes.count(50_000) <= 12 + 2


@pytest.mark.parametrize("k", [20, 2000])
@pytest.mark.parametrize("hits", [64, 256])
def test_estimate_from_a_sample(k, hits) -> None:
    n, rng = 100_003, torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=rng) * torch.linspace(1, 3, n)
    found = [follow.estimate(x, k, hits, seed) for seed in range(20)]
    counts = [int((x.abs() > threshold).sum()) / k for threshold, _ in found]
    assert mean(counts) == pytest.approx(1, abs=0.1)
    assert max(abs(count - 1) for count in counts) < 4 / math.sqrt(hits)
    assert (len(set(found)) > 1) == (k > hits)
    assert follow.estimate(x, k, hits, seed=3) == found[3]


@pytest.mark.parametrize("odd", [INF, NAN])
def test_behind_the_limit_is_nothing_infinite(odd: float) -> None:
    """Where a sample has met the small ones alone, and nearly all is large."""
    n, k, stride = 100_000, 1600, 100
    rng = torch.Generator().manual_seed(0)  # as of a first call
    met = torch.randint(stride, (n // stride,), generator=rng, dtype=torch.int32)
    met += torch.arange(0, n, stride)
    x = torch.rand(n) + 1
    x[met] = 0.01 * torch.rand(len(met))
    x[-1] = odd
    assert n - 1 not in met
    assert n - 1 in Threshold(sample=16)(x, k, {})


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Threshold(gain=0), "0 < gain"),
        (lambda: Threshold(gain=1.5), "gain <= 1"),
        (lambda: Threshold(sample=2), "at least 16"),
    ],
)
def test_hyper_parameters_are_checked(make, remedy) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()
