"""Replica.refresh(): parameters begin, end and change, and what stays is not lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.programs import imported
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide import parallel
from gradtide.refreshing import REMEDY

with imported("refresh") as program:
    SCHEMES, Run, network = program.SCHEMES, program.Run, program.network
    law, walk = program.law, program.walk


@pytest.mark.product(each=12)
@pytest.mark.parametrize("name", SCHEMES)
def test_what_stays_is_carried_over(name: str) -> None:
    ranks = run_ranks(2, walk, SCHEMES[name], 5, 10)
    for rank in ranks:
        assert rank["lost"] == 0
        assert rank["kept"] > 0
        assert rank["ends"] == ranks[0]["ends"]


@pytest.mark.product
@pytest.mark.parametrize("name", ["wfbp", "dear", "local"])
def test_on_hosts_of_several_ranks(name: str) -> None:
    ranks = run_ranks(4, walk, SCHEMES[name][:-1] + ", levels=2)", 4, 5)
    for rank in ranks:
        assert rank["lost"] == 0
        assert rank["ends"] == ranks[0]["ends"]


def unchanged(scheme: str, refresh: bool) -> list[float]:
    run = Run(scheme)
    run.step(8)
    run.sync.end_round()
    if refresh:
        run.sync.refresh()
    run.step(8)
    run.sync.end_round()
    run.sync.flush()
    return [x for p in run.model.parameters() for x in p.flatten().tolist()]


EXACT = ("sequential", "local", "int8", "momentum", "warmup", "rounds")


@pytest.mark.product
@pytest.mark.parametrize("name", EXACT)
def test_a_refresh_that_changes_nothing_changes_nothing(name: str) -> None:
    # Thresholds are learnt anew, so entries are selected exactly.
    scheme = SCHEMES[name].replace("TopK(0.05)", "TopK(0.05, select=Exact())")
    scheme = scheme.replace("schedule=DEAR", "schedule=WFBP")
    for plain, refreshed in zip(
        run_ranks(2, unchanged, scheme, False),
        run_ranks(2, unchanged, scheme, True),
        strict=True,
    ):
        assert refreshed == pytest.approx(plain, abs=1e-6)


def differing(change: Callable[[Any], None], schedule: str) -> list[str]:
    """What each rank says if one of them changes something, and that all go on."""
    run = Run(SCHEMES[schedule])
    run.step(5)
    if dist.get_rank() == 1:
        change(run)
    told = ""
    try:
        run.sync.refresh()
    except ValueError as error:
        told = str(error)
    if dist.get_rank() == 0:
        change(run)
    run.sync.refresh()
    run.step(5)
    run.sync.end_round()
    run.sync.flush()
    return [told, *map(str, (x for p in run.model.parameters() for x in p.flatten()))]


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["wfbp", "dear", "local"])
@pytest.mark.parametrize("change", [Run.freeze, Run.add])
def test_ranks_that_differ_are_told_the_parameter(
    change: Callable[[Any], None], schedule: str
) -> None:
    (one, *a), (other, *b) = run_ranks(2, differing, change, schedule)
    name = "0.weight" if change is Run.freeze else "2.adapter.0.weight"
    for told in (one, other):
        assert f"parameter {name} differs between ranks" in told
        assert "rank 1 has" in told
        assert REMEDY in told
    assert a == b


def renamed() -> tuple[float, float]:
    run = Run(SCHEMES["wfbp"])
    run.step(5)
    before = run.residuals()["0.weight"]
    run.model[0] = nn.Sequential(run.model[0])
    run.sync.refresh()
    after = run.residuals()["0.0.weight"]
    return float(before.abs().sum()), float((before - after).abs().max())


def test_a_parameter_of_another_name_is_the_same() -> None:
    for size, apart in run_ranks(2, renamed):
        assert size > 0
        assert apart == 0


def momenta() -> tuple[bool, bool]:
    run = Run(SCHEMES["wfbp"])
    run.step()
    before = run.opt.state[run.model[0].weight]["momentum_buffer"].clone()
    run.assign()
    run.sync.refresh()
    new = run.model[0].weight
    held = any(new is p for group in run.opt.param_groups for p in group["params"])
    return held, torch.equal(run.opt.state[new]["momentum_buffer"], before)


def test_what_is_in_a_parameters_place_has_its_momentum() -> None:
    assert run_ranks(2, momenta) == [(True, True)] * 2


def found_late(scheme: str) -> tuple[str, float]:
    """The optimizer was not passed: who stepped before steps what is there now."""
    model = network()
    sync = gradtide.replicate(model, None, scheme)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        model(torch.randn(4, 24, generator=draw)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        sync.flush()

    for _ in range(3):
        step()
    for _ in range(2):  # the second time before a step
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        sync.refresh()
    before = model[0].weight.detach().clone()
    step()
    moved = float((model[0].weight.detach() - before).abs().sum())
    return str(model[0].weight.tolist()), moved


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_an_optimizer_that_was_not_passed_is_told_too(scheme: str) -> None:
    (one, moved), (other, _) = run_ranks(2, found_late, scheme)
    assert one == other
    assert moved > 0


def grown(scheme: str) -> tuple[list[float], float]:
    """A layer is longer, and the same object, as an embedding that is resized."""
    run = Run(scheme)
    run.step(5)
    run.sync.end_round()
    before = run.residuals()
    with torch.no_grad():
        for p in (run.model[4].weight, run.model[4].bias):
            p.data = torch.cat([p.data, torch.zeros_like(p.data)])
    run.opt = torch.optim.SGD(run.model.parameters(), lr=0.02)
    run.sync.refresh(run.opt)
    after = run.residuals()
    same = [n for n in before if not n.startswith("4.")]
    apart = max(float((before[n] - after[n]).abs().max()) for n in same)
    run.step(5)
    return run.ends(), apart


@pytest.mark.product
@pytest.mark.parametrize("name", ["wfbp", "dear", "local"])
def test_a_parameter_that_has_grown_begins_anew(name: str) -> None:
    (one, apart), (other, _) = run_ranks(2, grown, SCHEMES[name])
    assert one == other
    assert apart == 0


def grown_in_a_round() -> str:
    run = Run(SCHEMES["rounds"])
    run.step(2)
    p = run.model[0].bias
    before = p.data
    p.data = torch.zeros(30)
    try:
        run.sync.refresh()
    except ValueError as error:
        p.data = before
        run.step(2)
        return str(error)
    return ""


def test_in_a_round_no_parameter_may_grow() -> None:
    for told in run_ranks(2, grown_in_a_round):
        assert "0.bias had the shape (24,)" in told
        assert "call end_round() and remove()" in told


def velocities() -> tuple[float, float]:
    run = Run(SCHEMES["rounds"])
    run.step(8)
    run.sync.end_round()
    names = "0.weight", "0.bias"

    def held() -> Tensor:
        consensus = run.sync._training.actions.consensus
        assert consensus is not None
        found = consensus.by_name(consensus.velocity)
        return torch.cat([found[name].flatten() for name in names])

    before = held()
    run.add()
    run.sync.refresh()
    return float(before.abs().sum()), float((held() - before).abs().max())


def test_outer_momentum_is_kept() -> None:
    for size, apart in run_ranks(2, velocities):
        assert size > 0
        assert apart == 0


def with_another_optimizer() -> list[float]:
    run = Run(SCHEMES["dear"])
    run.step(4)
    run.add()
    run.opt = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    run.sync.refresh(run.opt)
    run.step(4)
    run.sync.flush()
    assert run.sync.optimizer is run.opt
    return [x for p in run.model.parameters() for x in p.flatten().tolist()]


def test_another_optimizer_may_come_with_it() -> None:
    one, other = run_ranks(2, with_another_optimizer)
    assert one == other


def by_class(scheme: str) -> list[float]:
    model = network()
    ddp = parallel.DistributedDataParallel(model, scheme=scheme)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(12):
        ddp(torch.randn(4, 24, generator=draw)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 3:
            model[0].requires_grad_(False)
        if step == 7:
            model[0].requires_grad_(True)
            model.append(nn.Linear(5, 5))
            opt.add_param_group({"params": [*model[5].parameters()]})
        if step in (3, 7):
            ddp.refresh()
    ddp.replica.flush()
    return [x for p in model.parameters() for x in p.flatten().tolist()]


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "oktopk(0.05)"])
def test_the_class_has_it_too(scheme: str) -> None:
    one, other = run_ranks(2, by_class, scheme)
    assert one == other


def others(name: str) -> list[float]:
    if name == "kfac":
        run = Run("pad_kfac")
    else:
        run = Run("oktopk(0.05)", buffers="mean")
        run.model.append(nn.BatchNorm1d(5))
        run.opt.add_param_group({"params": [*run.model[5].parameters()]})
        run.sync.refresh()
    for change in run.CHANGES:
        run.step(4)
        change(run)
        run.sync.refresh()
    run.step(4)
    run.sync.flush()
    found = [*run.model.parameters(), *run.model.buffers()]
    return [float(x) for tensor in found for x in tensor.detach().flatten()]


@pytest.mark.parametrize("name", ["kfac", "buffers"])
def test_with_curvature_and_with_buffers_that_come(name: str) -> None:
    one, other = run_ranks(2, others, name)
    assert one == other


def saved(name: str) -> float:
    run = Run(SCHEMES[name])
    run.step(4)
    run.add()
    run.sync.refresh()
    run.step(4)
    run.sync.end_round()
    state, before = run.sync.state_dict(), run.residuals()
    run.sync.load_state_dict(state)
    return law(before, run.residuals())


@pytest.mark.parametrize("name", ["dear", "local"])
def test_what_is_saved_afterwards_can_be_loaded(name: str) -> None:
    assert run_ranks(2, saved, name) == [0, 0]


def logged() -> list[str]:
    told: list[str] = []
    log, handler = logging.getLogger("gradtide"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    run = Run(SCHEMES["wfbp"])
    run.step()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for change in (run.add, run.freeze):
        change()
        run.sync.refresh()
        run.step()
    run.remove()
    run.sync.refresh()
    return told


def test_what_is_lost_is_logged() -> None:
    for told in run_ranks(2, logged):
        assert "trained no more: 2.adapter" in told[-1]
        assert "lost, with a residual of that norm: 2.adapter" in told[-1]
    assert "trained from now on: 2.adapter.0.weight" in run_ranks(2, logged)[0][0]


def at_a_wrong_moment() -> list[str]:
    run, told = Run(SCHEMES["wfbp"]), []
    run.step()

    def refused() -> None:
        try:
            run.sync.refresh()
        except RuntimeError as error:
            told.append(str(error))

    run.model(torch.ones(2, 24)).sum().backward()
    refused()
    run.opt.step()
    run.opt.zero_grad()
    with run.sync.no_sync():
        refused()
    for p in run.model.parameters():
        p.requires_grad_(False)
    try:
        run.sync.refresh()
    except ValueError as error:
        told.append(str(error))
    for p in run.model.parameters():
        p.requires_grad_(True)
    run.step()
    return told


def test_moments_and_models_that_do_not_fit_are_refused() -> None:
    for backward, accumulating, none in run_ranks(2, at_a_wrong_moment):
        assert "refresh() between backward and step()" in backward
        assert "inside no_sync()" in accumulating
        assert "no parameter of the model requires a gradient" in none
