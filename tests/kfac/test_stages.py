"""The papers' stages, from records and from a run."""

from __future__ import annotations

import torch
from tests.kfac.test_product import KFACS, batch, network, scheme
from tests.ranks import run_ranks
from torch import distributed as dist

import gradtide
from gradtide.core.engine import Record
from gradtide.kfac.stages import Stages, stages


def test_records_are_told_apart() -> None:
    records = [
        Record("grad3", "AllGather", 10, 0.0, 1.0),
        Record("kfac.A0", "AllReduce", 10, 1.0, 3.0),
        Record("kfac.G1", "ReduceScatter", 10, 3.0, 7.0),
        Record("kfac.inverse0", "AllGather", 10, 7.0, 15.0),
        Record("kfac.gradient0", "AllGather", 10, 15.0, 31.0),
        Record("used", "AllReduce", 10, 31.0, 63.0),
    ]
    assert stages(records, 0.25, 0.5) == Stages(1.0, 0.25, 6.0, 0.5, 24.0)


def test_a_run_has_all_stages() -> None:
    def run() -> list[float]:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        text = scheme("Dense()", KFACS["mpd"], "WFBP")
        kfac = gradtide.replicate(model, opt, text).kfac
        assert kfac is not None
        for step in range(3):
            model(batch(step, dist.get_rank())[0]).square().mean().backward()
            opt.step()
            opt.zero_grad()
        found = list(kfac.stages())
        kfac.clear()
        assert list(kfac.stages()) == [0.0] * 5
        return found

    for found in run_ranks(2, run):
        assert all(seconds > 0 for seconds in found)
