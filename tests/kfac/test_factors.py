"""Running averages of packed factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradtide.kfac.factors import RunningFactor
from gradtide.kfac.layers import supported
from gradtide.kfac.packing import pack


def running_factor() -> RunningFactor:
    return RunningFactor(supported(nn.Linear(3, 2))[0], "A")


def definite(seed: int) -> Tensor:
    x = torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(seed))
    return x.mT @ x


def test_running_average_decays_and_starts_with_the_first_factor() -> None:
    running = running_factor()
    factors = [definite(seed) for seed in range(3)]
    for factor in factors:
        assert running.update(pack(factor, torch.empty(10)), 0.9)
    expected = 0.9 * (0.9 * factors[0] + 0.1 * factors[1]) + 0.1 * factors[2]
    torch.testing.assert_close(running.full(), expected)
    torch.testing.assert_close(running.traces(), expected[0].trace()[None])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_does_not_enter_the_average(bad: float) -> None:
    running = running_factor()
    good = pack(definite(4), torch.empty(10))
    running.update(good, 0.9)
    spoiled = definite(4)
    spoiled[0, 2, :] = spoiled[0, :, 2] = bad
    assert not running.update(pack(spoiled, torch.empty(10)), 0.9)
    assert torch.equal(running.value, good)
