"""Every collective keeps the conservation law and gives identical means."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtide.collectives import COLLECTIVES, Dense, MomentumCorrection
from gradtide.collectives.levels import TwoLevel
from gradtide.core.ops import AllReduce, Broadcast, Flow, Group
from gradtide.core.payload import Collective, Payload
from gradtide.testing import SCALES, DivergedError, check_law, lockstep
from gradtide.wire import NARROW, WIRES

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
RUN = 128  # elements of which all or none count: who chooses, chooses rows at most
SPARSE = [make for make in COLLECTIVES if hasattr(make, "density")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", COLLECTIVES, ids=lambda c: c.__name__)
def test_law(make: type[Collective], size: int) -> None:
    # Among sixteen, sparse ones meet such data on the wires below.
    scales = None if size <= 8 else ()
    check_law(make(), size, steps=8, scales=scales)
    if make in SPARSE:  # enough entries for none to be sent densely
        sparse = replace(make(), density=0.05)  # type: ignore[type-var]
        check_law(sparse, size, numel=400 * size, steps=4, scales=scales)


@pytest.mark.pairs(make=SPARSE, wire=WIRES, size=SIZES)
def test_law_on_every_wire(make: Any, wire: Any, size: int) -> None:
    """Exactly, up to the rounding of sums; parts end within a block, or are shorter."""
    collective = make(density=0.05, wire=wire)
    check_law(collective, size, numel=333 * size, steps=0)
    if wire in NARROW:
        check_law(collective, size, numel=3 * size, steps=3, scales=())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", NARROW)
def test_law_of_what_is_dense_on_a_wire_of_few_bits(wire: Any, size: int) -> None:
    check_law(Dense(wire), size, numel=3 * size, steps=3, scales=())
    check_law(Dense(wire), size, numel=333 * size, steps=0)


class AddsInOrder(TorchDispatchMode):
    """Refuses what a GPU adds up in an order of chance."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_add_, torch.ops.aten.index_add):
            index = args[2][args[3] != 0]
            assert len(index) == len(index.unique()), "an index comes twice in one call"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", SPARSE, ids=lambda c: c.__name__)
def test_sums_have_the_same_bits_in_each_run_on_a_gpu(make: type[Collective]) -> None:
    with AddsInOrder():
        check_law(replace(make(), density=0.05), 4, numel=1600, steps=4)  # type: ignore[type-var]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("make", SPARSE, ids=lambda c: c.__name__)
def test_what_is_weighed_travels_by_its_weight(
    make: type[Collective], size: int
) -> None:
    rng = torch.Generator().manual_seed(size)
    loads = []
    for _ in range(size):
        flat = torch.randn(512 * size, generator=rng)
        loads.append(Payload(flat, [flat], weigh=partial(_shrunk, flat)))
    before = torch.stack([payload.flat for payload in loads]).sum(0)
    collective = replace(make(), density=0.05)  # type: ignore[type-var]
    flows = [
        collective.reduce(payload, Group(r, size)) for r, payload in enumerate(loads)
    ]
    for mean in lockstep(flows):
        after = torch.stack([payload.flat for payload in loads]).sum(0)
        torch.testing.assert_close(size * mean + after, before)
        assert mean.view(-1, 2, RUN)[:, 0].any()
        assert not mean.view(-1, 2, RUN)[:, 1].any()


def _shrunk(flat: Tensor, out: Tensor) -> None:
    out.copy_(flat)
    out.view(-1, 2, RUN)[:, 1] *= 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [1, 3])
def test_law_of_tiny_buckets(size: int, numel: int) -> None:
    check_law(Dense(), size, numel=numel * size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("wire", "bits"), [("bf16", 8), ("fp16", 11)])
def test_wire_rounds_each_value_twice_and_no_more(size: int, wire, bits: int) -> None:
    tolerance = 0 if size == 1 else (size + 1) * 2.0**-bits
    check_law(Dense(wire), size, dtype=torch.float32, tolerance=tolerance + 1e-6)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_dense_is_the_mean_and_moves_the_least_bytes(size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(size * 6, generator=rng) for _ in range(size)]
    expected = torch.stack(rows).mean(0)
    flows = [
        Dense().reduce(Payload(row, [row]), Group(rank, size))
        for rank, row in enumerate(rows)
    ]
    for mean in lockstep(flows):
        torch.testing.assert_close(mean, expected)
    traffic = check_law(Dense(), size, steps=1, numel=size * 6)
    half = (size - 1) * size * 6 * 8  # all ranks, float64
    assert traffic == {"Mean": 2 * half, "rounds": 1}


class Loses:
    def reduce(self, payload: Payload, group: Group) -> Flow:
        mean = (yield AllReduce(payload.flat.clone())) / group.size
        payload.flat.zero_()
        return mean * 0.99


class Differs:
    def reduce(self, payload: Payload, group: Group) -> Flow:
        yield AllReduce(payload.flat) if group.rank else Broadcast(payload.flat, 0)
        return payload.flat


def test_the_law_finds_what_is_lost() -> None:
    with pytest.raises(AssertionError, match="neither delivered nor kept"):
        check_law(Loses(), 3)


def test_ranks_that_diverge_are_named_with_their_requests() -> None:
    with pytest.raises(
        DivergedError, match="rank 0 asks for Broadcast, rank 1 for AllR"
    ):
        check_law(Differs(), 3)


@pytest.mark.pairs(
    make=COLLECTIVES, hosts=[(2, 2), (3, 2), (2, 4), (4, 4)], scale=SCALES.values()
)
def test_law_where_the_places_of_a_host_differ(
    make: Any, hosts: tuple[int, int], scale: Any
) -> None:
    """For long enough that what is learned in one step is acted upon in others."""
    collective, local, size = make(), hosts[1], hosts[0] * hosts[1]
    if make in SPARSE:
        collective = replace(collective, density=0.05)
    levels, scales = TwoLevel(collective, local), [scale] * 9
    check_law(levels, size, numel=240 * size, steps=0, scales=scales)


class Alone:
    """A place of a host asks once more where it has nothing."""

    def reduce(self, payload: Payload, group: Group) -> Flow:
        if not payload.flat.any():
            yield AllReduce(payload.flat)
        yield AllReduce(payload.flat)
        return payload.flat.div_(group.size)


def test_what_is_not_agreed_is_found() -> None:
    """By data that make ranks differ, or, among hosts, places: there each may."""
    check_law(Alone(), 2, scales=())
    with pytest.raises(DivergedError, match="asks for"):
        check_law(Alone(), 2)
    with pytest.raises(DivergedError, match="asks for"):
        check_law(TwoLevel(Alone(), 2), 6)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("make", COLLECTIVES, ids=lambda c: c.__name__)
def test_an_empty_bucket_is_exchanged(make: Any, size: int) -> None:
    """A parameter may have no elements, and a bucket, or a fragment, to itself."""
    wires = (None, *WIRES) if "wire" in make.__dataclass_fields__ else (None,)
    for wire in wires:
        plain = make() if wire is None else make(wire=wire)
        for collective in (plain, TwoLevel(plain, 2), MomentumCorrection(plain)):
            loads = [Payload(torch.zeros(0), [torch.zeros(0, 5)]) for _ in range(size)]
            groups = [Group(rank, size) for rank in range(size)]
            if size % 2 == 0 or not isinstance(collective, TwoLevel):
                for mean in lockstep(list(map(collective.reduce, loads, groups))):
                    assert mean.shape == (0,)
