"""Ranks whose parameters have come apart are told so, all of them, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.runtime.guards.checksum import COLUMNS, checksum

DEAR = "Scheme(Dense(), fusion=BySize(0.004, 0.001, 1), schedule=DEAR)"
SCHEMES = [
    "wfbp",
    "sequential",
    DEAR,
    "topk",
    "topk(schedule='dear')",
    "topk(schedule='local')",
    "wfbp(wire='bf16')",
]


def test_signs_that_change_in_pairs_change_it() -> None:
    """Two in one column: in sums of 32 bits these cancel each other."""
    x = torch.linspace(1, 2, 4 * COLUMNS)
    for other in (COLUMNS, 2 * COLUMNS, 1):
        changed = x.clone()
        changed[[0, other]] *= -1
        assert checksum([changed]) != checksum([x])


def test_a_checksum_tells_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        torch.manual_seed(0)
        tensors = [torch.randn(n).to(dtype) for n in (5, 1, 0, 8)]
        tensors.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        before = int(checksum(tensors))
        changed = [
            [*tensors[:-1], -tensors[-1]],
            [*tensors[:-1], tensors[-1].flip(-1)],
            [tensors[0] + torch.tensor([0, 0, 0, 0, 1e-2]).to(dtype), *tensors[1:]],
        ]
        assert before not in [int(checksum(other)) for other in changed]
        tensors[3][2] = math.nan
        with_nan = int(checksum(tensors))
        assert int(checksum([tensor.clone() for tensor in tensors])) == with_nan
        tensors[0], tensors[1] = tensors[1], tensors[0]
        assert int(checksum(tensors)) != with_nan


def train(
    scheme: str, steps: int, after: Callable[[int, nn.Module, Any], Any], **options: Any
) -> int:
    """Train and call `after` each step; returns the steps until ranks were told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme, **options)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        try:
            model(torch.randn(3, 4)).square().mean().backward()
            skip = after(step, model, sync)
            if not skip:
                opt.step()
        except RuntimeError as error:
            told = str(error)
            assert "differs between ranks 0 and 1" in told, told
            return step if told.startswith(("2.bias", "3.weight")) else -step
        opt.zero_grad()
    sync.remove()
    return steps


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_edit_on_one_rank_is_named_on_every_rank(scheme: str) -> None:
    def run() -> int:
        def edit(step: int, model: Any, sync: gradtide.Replica) -> None:
            if step == 4 and dist.get_rank() == 1:
                sync.flush()
                with torch.no_grad():
                    model[2].bias[0] += 1e-3

        return train(scheme, 12, edit, check_every=3)

    found = run_ranks(3, run)
    assert found[0] in ((4,) if "local" in scheme else (5, 6, 7, 8)), found
    assert len(set(found)) == 1


def test_a_frozen_parameter_counts() -> None:
    def run() -> int:
        def edit(step: int, model: Any, _: gradtide.Replica) -> None:
            model[3].weight.data[0, 0] = math.nan  # on all ranks: equal bits
            if step == 4 and dist.get_rank() == 1:
                model[3].weight.data[1, 1] += 1

        return train("wfbp", 12, edit, check_every=1)

    assert run_ranks(2, run) == [6, 6]


def test_a_step_that_one_rank_left_out() -> None:
    def run() -> int:
        def skip(step: int, *_: object) -> bool:
            return step == 4 and dist.get_rank() == 1

        return train("wfbp", 12, skip, check_every=2)

    assert run_ranks(2, run) == [-6, -6]


def test_the_first_step_is_looked_at() -> None:
    def run() -> int:
        def edit(step: int, model: Any, _: gradtide.Replica) -> None:
            if step == 0:
                model[2].bias.data[0] += dist.get_rank()

        return train("wfbp", 9, edit)

    assert run_ranks(2, run) == [2, 2]


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_that_are_alike_train_the_same_bits_with_it(scheme: str) -> None:
    """Also through accumulation, `adopt`, steps left out and a resumed run."""

    def run() -> list[list[float]]:
        trained = []
        for every in (0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync = gradtide.replicate(model, opt, scheme, check_every=every)
            for step in range(9):
                torch.manual_seed(10 * step + dist.get_rank())
                if step == 3:
                    with sync.no_sync():
                        model(torch.randn(3, 4)).square().mean().backward()
                model(torch.randn(3, 4)).square().mean().backward()
                if step == 4:
                    opt.zero_grad()
                    continue
                opt.step()
                opt.zero_grad()
                if step == 5 and scheme in SCHEMES[3:5]:
                    sync.adopt("topk(schedule='dear')")
                if step == 6:
                    sync.load_state_dict(sync.state_dict())
            sync.remove()
            trained.append(
                [float(p.detach().double().sum()) for p in model.parameters()]
            )
        return trained

    for first, second in run_ranks(2, run):
        assert first == second


def test_bad_values_are_refused() -> None:
    def run() -> None:
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for bad in (-1, 1.5, True):
            with pytest.raises(ValueError, match="check_every="):
                gradtide.replicate(model, opt, check_every=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="check_every differs"):
            gradtide.replicate(model, opt, check_every=dist.get_rank())

    run_ranks(2, run)
