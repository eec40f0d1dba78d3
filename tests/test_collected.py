"""What nobody refers to any more is collected: models, threads and connections."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from tests.ranks import run_ranks

SCHEMES = ["wfbp", "dear", "micro", "exdyna(0.05, schedule='local')"]
SCHEMES += ["diloco(every=2)", "spd_kfac(schedule='dear')"]


class Net(nn.Module):
    sync: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, opt: torch.optim.Optimizer, count: int = 4) -> list[Any]:
    for step in range(count):
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 6, generator=rng)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [p.tolist() for p in opt.param_groups[0]["params"]]


def once(scheme: str) -> weakref.ref[nn.Module]:
    model = Net()
    opt = adam(model)
    sync = gradtide.replicate(model, opt, scheme)
    train(model, opt)
    sync.flush()
    return weakref.ref(model)


def left(scheme: str) -> tuple[bool, int, int]:
    """Whether the model is there, and how many threads and descriptors more are."""
    for before in (True, False):  # what the first one opens for good does not count
        known = once(scheme)
        deadline = time.monotonic() + 20
        while known() is not None and time.monotonic() < deadline:
            gc.collect()
        gc.collect()
        dist.barrier()
        now = threading.active_count(), len(os.listdir("/proc/self/fd"))
        if before:
            first = now
    return known() is not None, now[0] - first[0], now[1] - first[1]


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replica_that_is_dropped_leaves_nothing(scheme: str) -> None:
    assert run_ranks(2, left, scheme) == [(False, 0, 0)] * 2


def dropped(scheme: str, how: str) -> list[Any]:
    model = Net()
    opt = adam(model)
    sync: Any = None
    if how == "parts":  # the module that was passed is gone at once
        parts = nn.ModuleList([model.first, model.norm, model.last])
        gradtide.replicate(parts, opt, scheme, buffers="local")
        del parts
    elif how == "late":
        gradtide.replicate(model, None, scheme)
    else:
        sync = gradtide.replicate(model, opt, scheme)
    if how == "dropped":
        del sync
    gc.collect()
    found = train(model, opt)
    if scheme != "wfbp":
        model.state_dict()
        found = [p.tolist() for p in model.parameters()]
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
@pytest.mark.parametrize("how", ["dropped", "parts", "late"])
def test_training_goes_on_without_what_replicate_returned(
    scheme: str, how: str
) -> None:
    kept = run_ranks(2, dropped, "wfbp", "kept")
    assert run_ranks(2, dropped, scheme, how) == kept
    assert kept[0] == kept[1]


def lost() -> list[str]:
    model = Net()
    opt = adam(model)
    gradtide.replicate(model, opt)
    train(model, opt)
    p = model.first.weight
    del model, opt
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            p.sum().backward()
    return [str(each.message) for each in told]


def test_a_parameter_without_its_replica_says_so() -> None:
    for told in run_ranks(2, lost):
        assert len(told) == 1
        assert "keep what replicate() returned" in told[0]


def copied(scheme: str) -> list[Any]:
    model = Net()
    opt = adam(model)
    model.sync = gradtide.replicate(model, opt, scheme)
    train(model, opt, 3)
    mean = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    train(model, opt, 3)
    model.sync.remove()
    told = []
    for one in (mean, again, copy.deepcopy(mean), pickle.loads(pickle.dumps(again))):
        with pytest.raises(AttributeError, match="no link") as error:
            one.sync.flush()
        told.append(str(error.value))
        assert not hasattr(one.sync, "engine")
        one(torch.ones(2, 6)).sum().backward()  # no rank waits
    values = [[t.tolist() for t in one.state_dict().values()] for one in (mean, again)]
    return [values[0], values[0] == values[1], told[0]]


def test_a_copy_of_a_model_that_holds_its_replica_has_no_link() -> None:
    wfbp, dear = (run_ranks(2, copied, scheme) for scheme in ("wfbp", "dear"))
    assert wfbp == dear
    assert all(found[1] for found in wfbp)
