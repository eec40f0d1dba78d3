"""Two levels on real ranks: the product of features, and a run stopped and resumed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.core.levels import Hosts, alike
from gradtide.core.ops import Group
from gradtide.core.schedule import DEAR, LOCAL, WFBP
from gradtide.fusion import BySize
from gradtide.integrations.ddp import comm_hook
from gradtide.scheme import Scheme, with_levels
from gradtide.testing import SCALES
from gradtide.transport.hosts import Whereabouts, hosts_of, whereabouts
from tests.conftest import Product
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


@pytest.mark.product(each=12)
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_product_of_features(
    name: str, hosts: int, local: int, product: Product
) -> None:
    combined = product(OPTIMIZERS, (1, 2), (None, 0.1))
    if len(combined) == 4:  # every pair meets in one of the two
        combined = combined[hosts - 2 :: 2]

    def run() -> list[Any]:
        return [
            [train(scheme(name, s, levels), *case) for s, levels in CASES]
            for case in combined
        ]

    CASES = [(WFBP, local), (DEAR, local), (WFBP, 1)]
    first, *others = run_ranks(hosts * local, run)
    for other in others:
        assert other == first, "replicas differ"
    for case, (wfbp, dear, flat) in zip(combined, first, strict=True):
        rounding = {"rtol": 1e-9, "atol": 1e-12}
        if name == "bf16" and case[2] is not None:  # scaled before the cast, or after
            rounding = {"rtol": 0.02, "atol": 1e-3}
        near = torch.tensor(wfbp, dtype=torch.float64)
        for found in (dear, flat)[: 2 if name in ("dense", "acpsgd") else 1]:
            other = torch.tensor(found, dtype=torch.float64)
            torch.testing.assert_close(other, near, **rounding, msg=str(case))


@pytest.mark.product
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


@pytest.mark.product
@pytest.mark.parametrize(
    ("collective", "schedule", "data"),
    [
        (gradtide.OkTopk(0.05), DEAR, "experts"),
        (gradtide.TopkDSA(0.05), WFBP, "a half without gradient"),
    ],
)
def test_places_of_a_host_ask_for_what_their_own_data_need(
    collective: Any, schedule: Any, data: str
) -> None:
    """In one half of a bucket regions are cut anew, or there is nothing to tell."""

    def run() -> tuple[list[float], int]:
        rank, scale = dist.get_rank(), SCALES[data]
        halves = nn.ParameterList(torch.zeros(600) for _ in range(2))
        optimizer = torch.optim.SGD(halves.parameters(), lr=0.1)
        wanted = Scheme(collective, BySize(1.0), schedule, levels=2)
        sync = gradtide.replicate(halves, optimizer, wanted)
        for step in range(24):
            rng = torch.Generator().manual_seed(100 * step + rank)
            active = torch.as_tensor(scale(step, Group(rank, 6), 1200))
            gradients = torch.randn(1200, generator=rng).mul_(active).view(2, 600)
            loss = sum((p * g).sum() for p, g in zip(halves, gradients, strict=True))
            cast(Tensor, loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        asked = len(sync.engine.telemetry.records)
        sync.remove()
        return weights(halves), asked

    found = run_ranks(6, run)
    assert all(found[0][0] == other for other, _ in found)
    assert found[0][1] != found[1][1], "the data do not part a host's places"


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


def by_names(names: str) -> list[Whereabouts]:
    return [Whereabouts(name, None) for name in names]


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aabb", 2),
        ("abab", ((0, 2), (1, 3))),
        ("aab", 1),
        ("aabba", 1),
        ("aaaa", 4),
        ("abcd", 1),
        ("aaabbb", 3),
        ("aabbaa", ((0, 1), (2, 3), (4, 5))),
        ("aaaabb", 2),
        ("abaaab", ((0, 2), (1, 5), (3, 4))),
    ],
)
def test_hosts_are_told_apart(names: str, hosts: Hosts) -> None:
    found = alike(hosts_of(by_names(names)))
    assert found == (2 if names == "aabbaa" else hosts)


def test_a_launcher_is_believed_where_no_two_ranks_share_a_name() -> None:
    apart = [
        Whereabouts(name, launched)
        for name, launched in zip("abcd", "0011", strict=True)
    ]
    assert hosts_of(apart) == ((0, 1), (2, 3))
    assert hosts_of([*apart[:3], Whereabouts("d", None)]) == ((0,), (1,), (2,), (3,))
    assert hosts_of([Whereabouts("a", one) for one in "0011"]) == ((0, 1, 2, 3),)


def test_a_launcher_says_where_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert whereabouts().launched == "from 4"
    monkeypatch.setenv("NODE_RANK", "1")
    assert whereabouts().launched == "1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert whereabouts().launched is None


def test_unlike_hosts_are_divided_or_named() -> None:
    plain = Scheme()
    assert with_levels(plain, ((0, 1, 2, 3), (4, 5))).levels == 2
    assert with_levels(plain, ((0, 1), (2, 3))).levels == 2
    assert with_levels(plain, ((0, 2), (1, 3))).levels == ((0, 2), (1, 3))
    assert with_levels(plain, ((0, 1, 2),)).levels is None
    assert with_levels(plain, ((0,), (1,))).levels is None
    with pytest.warns(UserWarning, match=r"hosts of 3, 2 ranks.*levels=1"):
        assert with_levels(plain, ((0, 1, 2), (3, 4))).levels is None
    flat = Scheme(levels=1)  # says so, and is not told again
    assert with_levels(flat, ((0, 1, 2), (3, 4))) is flat


def test_levels_by_hand_are_those_that_there_are() -> None:
    two, turns = Scheme(levels=2), ((0, 2), (1, 3))
    assert with_levels(two, turns).levels == turns
    assert with_levels(two, ((0, 1, 2, 3),)).levels == 2
    named = Scheme(levels=((0, 3), (1, 2)))
    assert with_levels(named, turns) is named
    assert gradtide.parse(repr(named)) == named
    for wrong in (3, ((0, 1), (2,)), ((0, 1), (1, 2))):
        with pytest.raises(ValueError, match="use levels=1"):
            with_levels(Scheme(levels=wrong), turns)


def test_a_mesh_or_a_pair_of_groups_says_who_shares_a_host() -> None:
    """Here ranks take turns on two hosts, and the mean is that of all ranks."""

    def run() -> list[Any]:
        said: list[Any] = []
        turns = [[0, 2], [1, 3]]
        inside, between = turns, [[0, 1], [2, 3]]
        groups = [
            next(g for row, g in zip(rows, made, strict=True) if dist.get_rank() in row)
            for rows in (between, inside)
            for made in [[dist.new_group(row) for row in rows]]
        ]
        mesh = DeviceMesh("cpu", turns, mesh_dim_names=("hosts", "ranks"))
        flat = DeviceMesh("cpu", range(4))
        for where in (mesh, tuple(groups), flat, None):
            for name in ("dense", "oktopk", "acpsgd"):
                model = network()
                opt = OPTIMIZERS["sgd"](model.parameters())
                wanted = scheme(name, WFBP, None)
                sync = gradtide.replicate(model, opt, wanted, process_group=where)
                for step in range(3):
                    model(batch(step)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                said.append((sync.scheme.levels, weights(model)))
                sync.remove()
        return said

    first, *others = run_ranks(4, run)
    assert all(other == first for other in others)
    levels = [one[0] for one in first]
    assert levels == [((0, 2), (1, 3))] * 6 + [None] * 6
    for i in (0, 2, 3, 5):  # dense and low-rank means, whoever shares a host
        near = torch.tensor(first[6 + i % 3][1], dtype=torch.float64)
        found = torch.tensor(first[i][1], dtype=torch.float64)
        torch.testing.assert_close(found, near, rtol=1e-9, atol=1e-12)


def test_a_mesh_of_three_dimensions_is_refused() -> None:
    def run() -> str:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2, 1))
        model = network()
        opt = OPTIMIZERS["sgd"](model.parameters())
        try:
            gradtide.replicate(model, opt, process_group=mesh)
        except ValueError as error:
            return str(error)
        return ""

    for said in run_ranks(4, run):
        assert "a mesh of 3 dimensions" in said


def test_a_run_goes_on_with_other_hosts() -> None:
    """What is left is kept by parameter: 2x2 goes on as 2x1, 4x1 or 3x2."""

    def begin(levels: int) -> tuple[Any, ...]:
        model = network()
        opt = OPTIMIZERS["sgd"](model.parameters())
        return (
            model,
            opt,
            gradtide.replicate(model, opt, scheme("oktopk", DEAR, levels)),
        )

    def steps(model: nn.Module, opt: Any, count: int) -> None:
        for step in range(count):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    def save() -> bytes:
        model, opt, sync = begin(2)
        steps(model, opt, 4)
        file = io.BytesIO()
        torch.save(sync.state_dict(), file)
        sync.remove()
        return file.getvalue()

    def left(state: Any) -> dict[str, Tensor]:
        own = next(value for key, value in state.items() if key.startswith("rank"))
        return dict(own["remainders"])

    states = [torch.load(io.BytesIO(saved)) for saved in run_ranks(4, save)]
    together = {key: value for state in states for key, value in state.items()}
    every = [left(state) for state in states]
    sums = {name: sum(rest[name] for rest in every) for name in every[0]}
    assert any(torch.as_tensor(whole).any() for whole in sums.values())

    def load(levels: int) -> tuple[dict[str, Any], list[float]]:
        model, opt, sync = begin(levels)
        sync.load_state_dict(together)
        rests = {name: rest.tolist() for name, rest in left(sync.state_dict()).items()}
        steps(model, opt, 2)
        sync.remove()
        return rests, weights(model)

    for size, levels in [(2, 1), (4, 1), (6, 2)]:
        ranks = run_ranks(size, partial(load, levels))
        assert all(trained == ranks[0][1] for _, trained in ranks)
        for name, whole in sums.items():
            rests = torch.tensor([rest[name] for rest, _ in ranks], dtype=torch.float64)
            torch.testing.assert_close(rests.sum(0), whole)
