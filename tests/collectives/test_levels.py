"""Two levels: the law for hosts x ranks, bytes on a host's link, and closed flows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.collectives import ACPSGD, COLLECTIVES, Dense, OkTopk, TopKA2A
from gradtide.collectives.levels import TwoLevel
from gradtide.core.ops import Cut, Group
from gradtide.core.payload import Collective, Payload
from gradtide.scheme import parse
from gradtide.testing import check_law, lockstep
from gradtide.wire import NARROW, WIRES

CLUSTERS = [(1, 2), (2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (4, 4), (3, 5)]
STEPS = 6  # of which bytes are counted
SPARSE = [make for make in COLLECTIVES if hasattr(make, "density")]


@pytest.mark.parametrize(("hosts", "local"), CLUSTERS)
@pytest.mark.parametrize("make", COLLECTIVES, ids=lambda c: c.__name__)
def test_law(make: type[Collective], hosts: int, local: int) -> None:
    """`tests/test_law.py` has the data that makes places differ."""
    size = hosts * local
    check_law(TwoLevel(make(), local), size, steps=6, scales=())
    if make in SPARSE:  # enough entries for none to be sent densely
        sparse = replace(make(), density=0.05)  # type: ignore[type-var]
        check_law(TwoLevel(sparse, local), size, numel=400 * size, steps=6, scales=())


HOSTS = [(2, 2), (3, 2), (2, 3)]


@pytest.mark.pairs(make=SPARSE, wire=WIRES, hosts=HOSTS)
def test_law_on_a_wire(make: Any, wire: Any, hosts: tuple[int, int]) -> None:
    size, local = hosts[0] * hosts[1], hosts[1]
    collective = TwoLevel(make(density=0.05, wire=wire), local)
    check_law(collective, size, numel=333 * size, steps=6)


@pytest.mark.parametrize(("hosts", "local"), HOSTS)
@pytest.mark.parametrize("wire", NARROW)
def test_law_of_what_is_dense_on_a_wire(wire: Any, hosts: int, local: int) -> None:
    size = hosts * local
    check_law(TwoLevel(Dense(wire), local), size, numel=333 * size, steps=6)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("shapes", [[(24, 40), (12,), (60, 16)]])
def test_matrices_are_not_cut(hosts: int, local: int, shapes: list[Any]) -> None:
    """The low-rank mean equals that among all ranks at once."""
    size = hosts * local
    flat = run(ACPSGD(2), size, shapes)
    levels = run(TwoLevel(ACPSGD(2), local), size, shapes)
    for one, two in zip(flat, levels, strict=True):
        torch.testing.assert_close(one, two)


def run(collective: Collective, size: int, shapes: list[Any]) -> list[Tensor]:
    """What rank 0 holds after three steps: its mean and its residual."""
    lengths = [-(-torch.Size(s).numel() // size) * size for s in shapes]
    loads = []
    for rank in range(size):
        rng = torch.Generator().manual_seed(rank)
        flat = torch.randn(sum(lengths), generator=rng, dtype=torch.float64)
        begins = [sum(lengths[:i]) for i in range(len(shapes))]
        views = [
            flat[b : b + torch.Size(s).numel()].view(s)
            for b, s in zip(begins, shapes, strict=True)
        ]
        loads.append(Payload(flat, views))
    means = [torch.empty(0)]
    for _ in range(3):
        flows = [collective.reduce(p, Group(r, size)) for r, p in enumerate(loads)]
        means = lockstep(flows)
    return [means[0].clone(), loads[0].flat]


@cache
def crossed(make: Any, hosts: int, local: int) -> float:
    """Bytes that cross a host's link in a step, with so many ranks behind it."""
    size = hosts * local
    traffic = Counter[str]()
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(480 * 640, generator=rng).pow(3) for _ in range(size)]
    loads = [Payload(flat, [flat.view(480, 640)]) for flat in flats]
    collective = TwoLevel(make(), local)
    for _ in range(STEPS):
        flows = [collective.reduce(p, Group(r, size)) for r, p in enumerate(loads)]
        lockstep(flows, traffic)
        for flat in flats:
            flat += torch.randn(flat.shape, generator=rng).pow(3)
    traffic.pop("rounds")
    return sum(traffic.values()) / size / STEPS


@pytest.mark.product
@pytest.mark.parametrize("local", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        Dense,
        lambda: Dense("bf16"),
        lambda: TopKA2A(0.05),
        lambda: OkTopk(0.05),
        lambda: parse("exdyna(0.05)").collective,
        lambda: ACPSGD(4),
    ],
    ids=["dense", "bf16", "topka2a", "oktopk", "exdyna", "acpsgd"],
)
def test_a_link_carries_the_same_however_many_ranks_there_are(
    make: Any, local: int
) -> None:
    """Within 5 %: what small messages and their alignment add."""
    assert crossed(make, 4, local) == pytest.approx(crossed(make, 4, 1), rel=0.05)


@pytest.mark.parametrize("make", [Dense, *SPARSE], ids=lambda c: c.__name__)
def test_a_flow_that_is_closed_at_its_cut_loses_nothing(make: Any) -> None:
    """What was not sent yet is in the buffers: the skipped step's gradients."""
    hosts, local = 2, 3
    size, numel = hosts * local, 2400
    rng = torch.Generator().manual_seed(1)
    flats = [torch.randn(numel, generator=rng, dtype=torch.float64) for _ in range(6)]
    loads = [Payload(flat, [flat]) for flat in flats]
    before = torch.stack(flats).sum(0)
    collective = make() if make is Dense else make(density=0.05)
    flows = [
        _to_cut(TwoLevel(collective, local), p, Group(r, size))
        for r, p in enumerate(loads)
    ]
    parts = lockstep(flows)
    after = torch.stack(flats).sum(0)
    if parts[0] is not None and make is not Dense:
        gone = (before - after).abs() > 1e-9
        # Only what travelled in the first half is gone.
        assert gone.double().mean() < 0.5


def _to_cut(collective: Collective, payload: Payload, group: Group) -> Any:
    """Drives a flow to its cut, and closes it."""
    flow, answer = collective.reduce(payload, group), None
    try:
        while True:
            asked = flow.send(answer)
            if isinstance(asked, Cut):
                flow.close()
                return asked.part
            answer = yield asked
    except StopIteration as stop:
        return stop.value


def test_hosts_must_be_of_one_size() -> None:
    with pytest.raises(ValueError, match="3 ranks are not hosts of 2"):
        next(TwoLevel(Dense(), 2).reduce(Payload(torch.ones(6), []), Group(0, 3)))
    with pytest.raises(ValueError, match="hosts=0"):
        TwoLevel(Dense(), 0)
