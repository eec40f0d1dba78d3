"""What the training thread does in a step, by counts: a device may wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.transport.as_nccl import as_nccl
from torch import nn

import gradtide
from gradtide.replica import Replica
from gradtide.runtime.actions import Actions
from gradtide.transport import connect
from gradtide.transport.nccl import NcclTransport

pytestmark = pytest.mark.filterwarnings("ignore:.* has run for minutes")
BEFORE = 4  # steps in which buckets and modules are found out
# At most so many functions of Python are called for another parameter in a bucket,
# and for another bucket.
CALLS = {"WFBP": (17, 105), "DEAR": (24, 178)}


def in_training(scheme: str, layers: int) -> tuple[Callable[[], None], Replica]:
    """A step of a model with two parameters a layer, and what exchanges for it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    sync = gradtide.replicate(net, opt, scheme)
    x = torch.full((2, 4), float(dist.get_rank()))

    def step() -> None:
        net(x).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(BEFORE):
        step()
    return step, sync


# - Deferred updates -------------------------------------------------------------------


def optimizer_steps(here: bool) -> tuple[int, list[Any]]:
    """How often a step steps the optimizer; `here`: whether means are at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actions, "here", lambda *_: here)
        step, sync = in_training("Scheme(Dense(), Cuts((1, 3, 5, 7, 8)), DEAR)", 4)
        own, count = torch.optim.AdamW._init_group, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            count.append(1)
            return own(*args, **kwargs)

        patch.setattr(torch.optim.AdamW, "_init_group", counted)
        step()
        found = len(count)
        sync.flush()
        return found, [p.tolist() for p in sync._training.model.parameters()]


def both() -> list[Any]:
    return [optimizer_steps(here) for here in (False, True)]


def test_updates_whose_means_are_here_are_one_step_of_the_optimizer() -> None:
    for (apart, one), (together, other) in run_ranks(2, both):
        # step() is one more, which finds no gradients.
        assert (apart, together) == (5 + 1, 1 + 1)
        assert one == other


# - Functions of Python ----------------------------------------------------------------


def calls(layers: int, buckets: int, schedule: str) -> int:
    """How many of them the training thread calls in a step."""
    each = 2 * layers // buckets
    ends = ", ".join(str(each * (i + 1)) for i in range(buckets))
    step, sync = in_training(f"Scheme(Dense(), Cuts(({ends},)), {schedule})", layers)
    seen = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.append(frame.f_code)

    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    sync.remove()
    return len(seen)


def over_nccl() -> dict[str, tuple[float, float]]:
    """Of each schedule the calls for another parameter, and for another bucket."""

    def on_device(group: Any, _: torch.device) -> NcclTransport:
        links = connect(group, torch.device("cpu"))
        return NcclTransport(dist.new_group([0]), links, torch.device("cpu"))

    with as_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradtide.session, "connect", on_device)
        patch.setattr(Actions, "here", lambda *_: True)
        found = {}
        for schedule in CALLS:
            few, more, apart = (
                calls(*sizes, schedule) for sizes in ((8, 1), (40, 1), (40, 40))
            )
            found[schedule] = (more - few) / 64, (apart - more) / 39
        return found


def test_few_functions_are_called_for_a_parameter_and_for_a_bucket() -> None:
    """The model's own calls for a layer, half of which are a parameter's, are in it."""
    (found,) = run_ranks(1, over_nccl)
    for schedule, bounds in CALLS.items():
        assert all(map(float.__le__, found[schedule], map(float, bounds))), found
