"""Replica.describe(): what is told of every bucket is what happens to it."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide import parallel
from gradtide.collectives import COLLECTIVES
from gradtide.runtime.describe import foreseen

# Two buckets: one that is long, and one that is too short for anything sparse.
FUSION = "fusion=BySize(0.0001, 0.0001, 1)"
NUMEL = 4096 + 4  # with what pads the short one, for two ranks


def network() -> nn.Module:
    torch.manual_seed(3)
    short = nn.Linear(1, 1)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.AdaptiveAvgPool1d(1), short)


class Run:
    """A replica, and steps of it."""

    def __init__(self, scheme: str, model: nn.Module | None = None) -> None:
        self.model = network() if model is None else model
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = gradtide.replicate(self.model, self.opt, scheme)

    def step(self, count: int = 1) -> str:
        rank = torch.distributed.get_rank()
        for _ in range(count):
            rng = torch.Generator().manual_seed(rank)
            self.model(torch.randn(4, 64, generator=rng)).square().sum().backward()
            self.opt.step()
            self.opt.zero_grad()
        self.sync.flush()
        return self.sync.describe()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("grad")]


def sent_of(row: str) -> int:
    return int(row.split("counted")[0].split()[-1].replace(",", ""))


def compare(scheme: str) -> list[tuple[int | None, int, bool]]:
    """What was foreseen of each bucket, and what was counted then."""
    run = Run(scheme)
    run.step()  # buckets are cut anew
    found = []
    for _ in range(4):
        buckets = run.sync._training.placement.buckets
        before = [foreseen(bucket, run.sync.engine) for bucket in buckets]
        run.step()
        for bucket, sent in zip(buckets, before, strict=True):
            seen = bucket.exchanged
            assert seen is not None
            found.append((sent, *seen))
    return found


NAMES = [f"{kind.__name__}()" for kind in COLLECTIVES]
NAMES += ["Warmup(OkTopk(0.02), 3, (1.0, 0.5))", "OkTopk(0.02, wire='int8')"]
NAMES += ["Dense('bf16')", "TopK(0.05, select=Exact())", "MomentumCorrection(TopK())"]


@pytest.mark.product(each=12)
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_foreseen_is_what_happens(name: str, levels: int) -> None:
    size = 2 * levels
    scheme = f"Scheme({name}, {FUSION}, levels={levels})"
    for found in run_ranks(size, compare, scheme):
        for sent, counted, whole in found:
            assert (sent is not None) == whole
            assert sent in (None, counted)
        if "OkTopk" in name or "SGD" in name:
            assert {whole for *_, whole in found} == {True, False}


def tell(scheme: str, steps: int = 2) -> tuple[str, str, dict[str, float]]:
    run = Run(scheme)
    before = run.sync.describe()
    after = run.step(steps)
    return before, after, run.sync.metrics()


def test_a_short_bucket_is_told_of_with_its_reason() -> None:
    for before, after, numbers in run_ranks(2, tell, f"Scheme(OkTopk(0.02), {FUSION})"):
        first, *short = rows(before)[::-1]  # the first layer gets ready last
        assert "not yet   OkTopk(0.02)" in first
        assert all("too short for fewer bytes among 2 ranks" in row for row in short)
        assert all("foreseen  densely, not by OkTopk(0.02)" in row for row in short)
        assert "are cut anew" in before
        assert "are cut anew" not in after
        assert all("counted" in row for row in rows(after))
        assert numbers["compressed_share"] == pytest.approx(4096 / NUMEL)


def test_bytes_are_those_that_were_counted() -> None:
    for _, after, numbers in run_ranks(2, tell, f"Scheme(Dense('int8'), {FUSION})", 2):
        sent = [sent_of(row) for row in rows(after)]
        assert all("densely in int8" in row for row in rows(after))
        # Two steps, and flags; before the second one the order of gradients.
        assert 0 < numbers["sent_bytes"] - 2 * sum(sent) < 300
        # Of 8 bytes the scale takes what is saved.
        assert numbers["compressed_share"] == pytest.approx(4096 / NUMEL)


def test_a_scheme_that_is_dense_compresses_nothing() -> None:
    for _, after, numbers in run_ranks(2, tell, f"Scheme(Dense(), {FUSION})"):
        assert numbers["compressed_share"] == 0
        assert all(row.endswith("counted  densely") for row in rows(after))


def warm() -> list[str]:
    run = Run(f"Scheme(Warmup(OkTopk(0.02), 2), {FUSION})")
    return [run.sync.describe(), run.step(2), run.step()]


def test_a_warm_up_is_told_until_it_is_over() -> None:
    for before, last, after in run_ranks(2, warm):
        for text in (before, last):
            assert all("densely: the warm-up before OkTopk" in r for r in rows(text))
        assert "warm-up" not in after
        assert "counted  OkTopk(0.02)" in re.sub(" +", "  ", after)


def changed() -> list[str]:
    run = Run(f"Scheme(Dense(), {FUSION})")
    told = [run.step(2)]
    run.sync.adopt(f"Scheme(OkTopk(0.02), {FUSION})")
    told.append(run.sync.describe())
    told.append(run.step())
    run.sync.adopt("wfbp")
    return [*told, run.sync.describe()]


def test_what_was_counted_before_another_scheme_is_not_told_of_it() -> None:
    for dense, adopted, sparse, last in run_ranks(2, changed):
        assert "OkTopk" not in dense
        assert "counted" not in adopted
        assert "not yet" in adopted
        assert "not yet" not in sparse
        assert "foreseen" in last


def waiting() -> list[str]:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    ddp = parallel.DistributedDataParallel(model, scheme="dear")
    told = [ddp.describe()]
    for _ in range(2):
        ddp(torch.randn(4, 64)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return [*told, ddp.describe()]


def test_a_scheme_that_waits_for_the_optimizer_is_told_as_dense() -> None:
    for before, after in run_ranks(2, waiting):
        assert "densely, until the optimizer is known" in before
        assert "until" not in after


def in_rounds() -> list[str]:
    scheme = f"Scheme(Dense(), {FUSION}, schedule=Schedule('step', every=4))"
    run = Run(scheme)
    return [run.sync.describe(), run.step(4)]


def test_bytes_of_a_round_are_told_for_one_step() -> None:
    for _, after in run_ranks(2, in_rounds):
        assert "what 4 steps did" in after
        assert sum(map(sent_of, rows(after))) == 4 * NUMEL / 4


def others() -> list[str]:
    model = network()
    model[2].requires_grad_(False)
    kfac = Run("pad_kfac", network())
    alone = Run("auto")
    told = [Run("wfbp", model).step(), kfac.step(3), alone.step()]
    hooked = Run("wfbp")

    def hook(state: object, bucket: torch.distributed.GradBucket) -> object:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hooked.sync.use_comm_hook(None, hook)
    return [*told, hooked.step(2)]


def test_what_is_in_no_bucket_of_the_scheme_is_told() -> None:
    for frozen, kfac, auto, hooked in run_ranks(2, others):
        assert "2 parameters require no gradient" in frozen
        assert "K-FAC's A, in fp32" in kfac
        assert "densely, until auto has decided" in auto
        assert "by a communication hook: what it sends is not counted" in hooked


def logged() -> list[str]:
    told: list[str] = []
    log, handler = logging.getLogger("gradtide"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    run = Run("oktopk(0.02)")
    table = run.sync.describe()
    run.step(2)
    return [table, *told]


def test_rank_0_logs_it_once() -> None:
    first, second = run_ranks(2, logged)
    table, *told = first
    assert [text for text in told if table in text] == [told[1]]
    assert not any("grad0" in text for text in second[1:])


def alone() -> str:
    return Run("oktopk(0.02)").step()


def test_one_rank_sends_nothing() -> None:
    (text,) = run_ranks(1, alone)
    assert "there is one rank" in text
