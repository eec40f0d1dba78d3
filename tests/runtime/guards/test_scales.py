"""GradScalers whose scales differ between ranks are named; join() makes them alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.amp import GradScaler

import gradtide
from gradtide.runtime.guards.scales import Scales


def model_and_optimizer(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)


def told(words: list[list[int]]) -> bool:
    scales = Scales(None, None)  # type: ignore[arg-type]  # it asks nobody here
    scales.update(iter([sum(column) for column in zip(*words, strict=True)]))
    return scales._differ


def of(scale: float | None) -> list[int]:
    """The words of a rank whose GradScaler has that scale, or of one that has none."""
    scaler = GradScaler("cpu", init_scale=scale or 1.0)
    scaler.scale(torch.ones(()))  # it has its scale from then on
    scales = Scales(None, scaler)  # type: ignore[arg-type]
    return scales.words(abstain=scale is None)()


def test_sums_tell_whether_scales_are_equal() -> None:
    powers = [2.0**k for k in range(-60, 60)]
    words = [of(scale) for scale in powers]
    for first in words:
        assert not told([first] * 7)
        assert not told([first, of(None), first])
        assert all(told([first, first, other]) for other in words if other != first)
    assert len({tuple(each) for each in words}) == len(powers)
    assert not told([of(None)] * 3)
    assert not told([of(3.0), of(None)])
    assert told([of(2.0), of(8.0), of(4.0)])  # no sum of these alone would tell


SCHEMES = ["wfbp", "dear", "topk(0.2)", "wfbp(wire='e3m0')"]


def steps_until_told(scheme: str, where: str, fused: bool, given: bool) -> Any:
    """Train with a scale that is another one on rank 1, from some step on."""
    model, opt = model_and_optimizer(fused)
    scaler = GradScaler("cpu", init_scale=64.0)
    known = {"grad_scaler": scaler} if given else {}
    sync = gradtide.replicate(model, opt, scheme, **known)
    for step in range(8):
        if step == (0 if where == "first" else 4) and dist.get_rank() == 1:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
        torch.manual_seed(10 * step + dist.get_rank())
        try:
            scaler.scale(model(torch.randn(3, 6)).square().mean()).backward()
            scaler.step(opt)
        except RuntimeError as error:
            text = str(error)
            assert "rank 0 has 64, rank 1 has 16" in text, text
            assert "scaler.load_state_dict" in text
            return step
        scaler.update()
        opt.zero_grad()
    sync.remove()
    return None


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unlike_scales_are_named_within_one_step(scheme: str) -> None:
    def run() -> list[Any]:
        cases = [
            ("later", False, False),
            ("first", True, False),
            ("first", False, True),
        ]
        return [steps_until_told(scheme, *case) for case in cases]

    late = int(scheme == "dear")  # it does not wait at step(), once it defers
    for rank in run_ranks(2, run):
        assert rank == [4 + late, 1, 0]


@pytest.mark.parametrize("scheme", ["exdyna(0.1, schedule='local')", "diloco(every=2)"])
def test_where_steps_are_exchanged_each_rank_may_have_its_own(scheme: str) -> None:
    assert run_ranks(2, lambda: steps_until_told(scheme, "first", False, True)) == [
        None,
        None,
    ]


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_after_join_all_ranks_have_the_same_scale(scheme: str) -> None:
    def run() -> Any:
        model, opt = model_and_optimizer()
        sync = gradtide.replicate(model, opt, scheme, check_every=1)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def epoch(steps: int) -> None:
            with sync.join():
                for _ in range(steps):
                    x = torch.randn(8, 6)
                    scaler.scale(model(x).square().mean()).backward()
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()

        epoch(9 if dist.get_rank() == 0 else 3)
        first = scaler.get_scale(), scaler._get_growth_tracker()
        epoch(4)
        sync.remove()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        return first, scaler.get_scale(), flat.tolist()

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    assert ranks[0][:2] == ((128.0, 1), 512.0)
