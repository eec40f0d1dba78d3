"""Two levels on real ranks: the product of features, and a run stopped and resumed."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.core.schedule import DEAR, LOCAL, WFBP
from gradtide.fusion import BySize
from gradtide.integrations.ddp import comm_hook
from gradtide.scheme import Scheme
from gradtide.transport.hosts import equal_runs
from tests.ranks import run_ranks

COLLECTIVES = {
    "dense": gradtide.Dense(),
    "bf16": gradtide.Dense("bf16"),
    "int8": gradtide.Dense("int8"),
    "topka2a": gradtide.TopKA2A(0.2),
    "oktopk": gradtide.OkTopk(0.2),
    "acpsgd": gradtide.ACPSGD(2),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
}
SMALL = BySize(0.004, ends=0.001)


def scheme(name: str, schedule: Any, levels: int | None) -> Scheme:
    return Scheme(COLLECTIVES[name], SMALL, schedule, levels=levels)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))
    return made.double()


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 40, generator=rng, dtype=torch.float64)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train(
    wanted: Scheme,
    optimizer: str = "sgd",
    accumulate: int = 1,
    max_norm: float | None = None,
    stop: int | None = None,
) -> list[float]:
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    sync = gradtide.replicate(model, opt, wanted)
    for step in range(4):
        if step == stop:
            saved = [x.state_dict() for x in (model, opt, sync)]
            sync.remove()
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            model = network()
            opt = OPTIMIZERS[optimizer](model.parameters())
            sync = gradtide.replicate(model, opt, wanted)
            for x, state in zip((model, opt, sync), torch.load(file), strict=True):
                x.load_state_dict(state)
        with sync.no_sync():
            for part in range(accumulate - 1):
                model(batch(100 + 10 * step + part)).square().mean().backward()
        model(batch(step)).square().mean().backward()
        if max_norm is not None:
            sync.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad()
    sync.remove()
    return weights(model)


@pytest.mark.parametrize(
    ("name", "hosts", "local"),
    [*((name, 2, 2) for name in COLLECTIVES), ("oktopk", 3, 2)],
)
def test_the_product_of_features(name: str, hosts: int, local: int) -> None:
    product = list(itertools.product(OPTIMIZERS, (1, 2), (None, 0.1)))
    product = [product[i] for i in (0, 3, 5, 6)]  # every pair of features meets
    if hosts > 2:
        product = product[1:3]

    def run() -> list[Any]:
        return [
            [train(scheme(name, s, levels), *case) for s, levels in CASES]
            for case in product
        ]

    CASES = [(WFBP, local), (DEAR, local), (WFBP, 1)]
    first, *others = run_ranks(hosts * local, run)
    for other in others:
        assert other == first, "replicas differ"
    for case, (wfbp, dear, flat) in zip(product, first, strict=True):
        rounding = {"rtol": 1e-9, "atol": 1e-12}
        if name == "bf16" and case[2] is not None:  # scaled before the cast, or after
            rounding = {"rtol": 0.02, "atol": 1e-3}
        near = torch.tensor(wfbp, dtype=torch.float64)
        for found in (dear, flat)[: 2 if name in ("dense", "acpsgd") else 1]:
            other = torch.tensor(found, dtype=torch.float64)
            torch.testing.assert_close(other, near, **rounding, msg=str(case))


@pytest.mark.parametrize("name", ["dense", "int8", "topka2a", "oktopk"])
def test_a_run_that_is_stopped_goes_on_bit_by_bit(name: str) -> None:
    def run() -> list[list[float]]:
        return [train(scheme(name, DEAR, 2), stop=stop) for stop in (None, 2)]

    for whole, resumed in run_ranks(4, run):
        assert whole == resumed


def test_steps_can_be_exchanged() -> None:
    def run() -> list[float]:
        return train(scheme("topka2a", LOCAL, 2), "adamw")

    first, *others = run_ranks(4, run)
    assert all(other == first for other in others)


def test_the_norm_of_every_parameter_is_known() -> None:
    """Torch's own clipping keeps the overlap: a part is found in its bucket."""

    def run() -> tuple[int, int]:
        model = network()
        opt = OPTIMIZERS["sgd"](model.parameters())
        sync = gradtide.replicate(model, opt, scheme("dense", DEAR, 2))
        known = 0
        for step in range(5):
            model(batch(step)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if step < 4 else "error")
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            known = len(sync._training.tally.squares or ())
            held = sync._training.step.held
            opt.step()
            opt.zero_grad()
        sync.remove()
        assert held
        assert 0.01 < float(norm) < 100
        return known, len(list(model.parameters()))

    assert run_ranks(4, run) == [(4, 4)] * 4


def test_ddps_hook_has_levels_too() -> None:
    def run() -> list[list[float]]:
        trained = []
        for levels in (1, 2):
            ddp = DistributedDataParallel(network())
            ddp.register_comm_hook(*comm_hook(scheme("dense", WFBP, levels)))
            opt = OPTIMIZERS["sgd"](ddp.parameters())
            for step in range(3):
                ddp(batch(step)).square().mean().backward()
                opt.step()
                opt.zero_grad()
            trained.append(weights(ddp.module))
        return trained

    first, *others = run_ranks(4, run)
    assert all(other == first for other in others)
    assert first[0] == pytest.approx(first[1], rel=1e-9, abs=1e-12)


def test_one_level_is_what_there_was() -> None:
    """Ranks of one host find nothing to divide, and the scheme says so."""

    def run() -> tuple[str, bool]:
        model = network()
        opt = OPTIMIZERS["sgd"](model.parameters())
        sync = gradtide.replicate(model, opt, "wfbp")
        said = repr(sync.scheme)
        sync.remove()
        return said, sync.scheme == gradtide.parse("wfbp")

    for said, same in run_ranks(2, run):
        assert same, said


def test_levels_must_divide_the_ranks() -> None:
    def run() -> str:
        model = network()
        opt = OPTIMIZERS["sgd"](model.parameters())
        try:
            gradtide.replicate(model, opt, scheme("dense", WFBP, 2))
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    for said in run_ranks(3, run):
        assert "levels=2" in said
        assert "3 ranks" in said


@pytest.mark.parametrize(
    ("names", "local"),
    [
        ("aabb", 2),
        ("abab", 1),
        ("aab", 1),
        ("aabba", 1),
        ("aaaa", 4),
        ("abcd", 1),
        ("aaabbb", 3),
        ("aabbaa", 1),
    ],
)
def test_hosts_are_runs_of_equal_length(names: str, local: int) -> None:
    assert equal_runs(names) == local
