"""Running averages of packed factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradtide.kfac.config import KFAC
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.layers import KINDS, supported
from gradtide.kfac.packing import pack, unpack


def curvature_of_inputs() -> Curvature:
    return Curvature(supported(nn.Linear(3, 2))[0], KFAC("mpd", decay=0.9), ["A"])


def definite(seed: int) -> Tensor:
    x = torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(seed))
    return x.mT @ x


def average(curvature: Curvature, a: Tensor, trace: float | None = None) -> None:
    """One rank's A, and any G; `trace`: another one is told."""
    layer, numbers = curvature.layer, torch.zeros(4, dtype=torch.float64)
    sums = {kind: torch.empty(layer.numel(kind)) for kind in KINDS}
    curvature.take("A", a, sums["A"], numbers)
    curvature.take("G", torch.ones(1, 2, 2), sums["G"], numbers)
    if trace is not None:
        numbers[1] = trace
    curvature.average(numbers, sums, 1)


def test_running_average_decays_and_starts_with_the_first_factor() -> None:
    curvature = curvature_of_inputs()
    factors = [definite(seed) for seed in range(3)]
    for factor in factors:
        average(curvature, factor)
    expected = 0.9 * (0.9 * factors[0] + 0.1 * factors[1]) + 0.1 * factors[2]
    found = unpack(curvature.running["A"], torch.empty(1, 4, 4))
    torch.testing.assert_close(found, expected)
    trace = expected[0].trace()[None].double()
    torch.testing.assert_close(curvature.traces["A"], trace, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("trace", [None, 1.0])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_does_not_enter_the_average(
    bad: float, trace: float | None
) -> None:
    """Also where the traces of all ranks are finite, and the sum of factors is not."""
    curvature = curvature_of_inputs()
    good = definite(4)
    average(curvature, good)
    spoiled = definite(4)
    spoiled[0, 2, :] = spoiled[0, :, 2] = bad
    average(curvature, spoiled, trace)
    assert torch.equal(curvature.running["A"], pack(good, torch.empty(10)))


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_a_device_decides_as_the_host_does(
    bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    curvature, other = curvature_of_inputs(), curvature_of_inputs()
    for seed in range(3):
        factor = definite(seed)
        if seed == 1 and bad is not None:
            factor[0, 2, :] = factor[0, :, 2] = bad
        average(curvature, factor, 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "is_cpu", False)
            average(other, factor, 1.0)
    assert torch.equal(curvature.running["A"], other.running["A"])
