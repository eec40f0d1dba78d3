"""PartitionedTopK: exclusive parts, the union as asked, and all ranks' values at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.waits import Waits, synchronised
from torch import Tensor

from gradtide.collectives.contrib.by_norm import ByNorm, deal, shares
from gradtide.collectives.partitioned import PartitionedTopK, pays, pick
from gradtide.collectives.partitions import (
    Dynamic,
    Even,
    Partition,
    Plan,
    rebalance,
)
from gradtide.core.ops import Cut, Group, in_halves
from gradtide.core.payload import Payload
from gradtide.selectors import kernels
from gradtide.testing import check_law, lockstep
from gradtide.wire.indices import Indices

SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py
PARTITIONS = (Even(), Dynamic(), ByNorm())
every_partition = pytest.mark.parametrize("partition", PARTITIONS, ids=repr)


def ranks(rows: list[Tensor], cuts: tuple[int, ...] = ()) -> list[Payload]:
    """A payload for each row, its tensors cut at `cuts`."""
    edges = [0, *cuts, len(rows[0])]
    return [Payload(row, [row[a:b] for a, b in pairwise(edges)]) for row in rows]


def step(collective: PartitionedTopK, loads: list[Payload]) -> list[Tensor]:
    group = range(len(loads))
    return lockstep([collective.reduce(loads[r], Group(r, len(loads))) for r in group])


@pytest.mark.parametrize("size", SIZES)
@every_partition
def test_law(partition: Partition, size: int) -> None:
    check_law(PartitionedTopK(0.05, partition), size, steps=size + 2)
    check_law(PartitionedTopK(0.01, partition), size, numel=6000 * size, steps=2)


@pytest.mark.parametrize("size", SIZES)
@every_partition
def test_law_of_tiny_buckets(partition: Partition, size: int) -> None:
    for density in (0.01, 0.9, 1.0):
        check_law(PartitionedTopK(density, partition), size, numel=size, steps=2)
        check_law(PartitionedTopK(density, partition), size, numel=7 * size, steps=2)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@every_partition
def test_what_the_wire_rounds_off_stays_behind(partition: Partition, wire) -> None:
    collective = PartitionedTopK(0.05, partition, wire)
    kinds = {"dtype": torch.float32, "tolerance": 2e-6}
    check_law(collective, 4, gradient=lambda g, n: torch.randn(n, generator=g), **kinds)


def test_a_density_of_one_is_dense() -> None:
    rows = [torch.randn(24) for _ in range(4)]
    expected = torch.stack(rows).mean(0)
    for payload, mean in zip(
        loads := ranks(rows), step(PartitionedTopK(1.0), loads), strict=True
    ):
        torch.testing.assert_close(mean, expected)
        assert mean.data_ptr() == payload.flat.data_ptr()


@every_partition
def test_all_values_at_the_largest_entries_of_the_own_parts_are_averaged(
    partition: Partition,
) -> None:
    size, n, k = 4, 4000, 200
    rng = torch.Generator().manual_seed(3)
    loads = ranks([torch.zeros(n) for _ in range(size)], cuts=(100, 700, 2800))
    state = Payload(torch.zeros(n), loads[0].parts)
    state.parts = [state.flat[a:b] for a, b in pairwise((0, 100, 700, 2800, n))]
    for turn in range(6):
        for payload in loads:
            payload.flat += torch.randn(n, generator=rng).pow(3)
        before = torch.stack([payload.flat for payload in loads])
        state.state = {key: v.clone() for key, v in loads[0].state.items()}
        plan = partition.plan(state, k, size, turn)
        expected = [
            i for rank in range(size) for i in found_by(before[rank], plan, turn, rank)
        ]
        means = step(PartitionedTopK(k / n, partition), loads)
        assert sorted(expected) == means[0].nonzero().flatten().tolist()
        assert len(expected) == k
        twin = torch.zeros(n)
        twin[expected] = before[:, expected].mean(0)
        torch.testing.assert_close(means[0], twin)
        for payload, row in zip(loads, before, strict=True):
            row[expected] = 0
            assert torch.equal(payload.flat, row)


@every_partition
def test_where_entries_are_weighed_small_ones_stay(partition: Partition) -> None:
    size, n, k = 4, 4000, 200
    rng = torch.Generator().manual_seed(5)
    loads: list[Payload] = [
        Payload(payload.flat, payload.parts, weigh=partial(_as_large, payload.flat))
        for payload in ranks(
            [torch.zeros(n) for _ in range(size)], cuts=(100, 700, 2800)
        )
    ]
    for _ in range(6):
        for payload in loads:
            payload.flat += torch.randn(n, generator=rng).pow(3)
            payload.num_sent = 0
        before = torch.stack([payload.flat for payload in loads])
        mean = step(PartitionedTopK(k / n, partition), loads)[0]
        gone = torch.stack([payload.flat for payload in loads]) == 0
        torch.testing.assert_close(mean, (before * gone).sum(0) / size)
        found = gone.any(0)
        assert found.sum() == k
        assert k < gone.sum() < 2 * k  # who found them, and hardly anybody else
        assert (
            before[gone].abs().mean()
            > 2 * before[:, found][~gone[:, found]].abs().mean()
        )
        assert [payload.num_sent for payload in loads] == gone.sum(1).tolist()


def _as_large(flat: Tensor, out: Tensor) -> None:
    out.copy_(flat)


def found_by(flat: Tensor, plan: Plan, turn: int, rank: int) -> list[int]:
    found: list[int] = []
    for s in plan.bins[(turn + rank) % len(plan.bins)]:
        begin, end = plan.edges[s], plan.edges[s + 1]
        best = flat[begin:end].abs().topk(plan.quotas[s]).indices + begin
        found += best.tolist()
    return found


@pytest.mark.product
@every_partition
@pytest.mark.parametrize("name", ["x0.01", "x1", "x100", "jump up", "jump down"])
def test_the_density_is_the_asked_one_on_every_scale(
    partition: Partition, name: str
) -> None:
    scales = {
        "x0.01": lambda t: 0.01,
        "x1": lambda t: 1.0,
        "x100": lambda t: 100.0,
        "jump up": lambda t: 1.0 if t < 20 else 100.0,
        "jump down": lambda t: 100.0 if t < 20 else 1.0,
    }
    sent = densities(partition, scales[name], steps=30)
    assert sum(sent) / len(sent) == pytest.approx(1, abs=0.02)
    assert min(sent) > 0.9
    assert max(sent) <= 1


def densities(
    partition: Partition, scale: Callable[[int], float], steps: int
) -> list[float]:
    """Entries a step, relative to the asked ones, where tensors differ in scale."""
    size, n, density = 4, 40_000, 0.01
    rng = torch.Generator().manual_seed(0)
    heat = torch.ones(n)
    heat[:5000] = 20
    loads = ranks([torch.zeros(n) for _ in range(size)], cuts=(5000, 5100, 30_000))
    sent = []
    for t in range(steps):
        for payload in loads:
            payload.flat += torch.randn(n, generator=rng) * heat * scale(t)
        before = loads[0].num_sent
        step(PartitionedTopK(density, partition), loads)
        sent.append((loads[0].num_sent - before) / (n * density))
    return sent


def test_dynamic_boundaries_move_until_thresholds_are_equal() -> None:
    size, n = 4, 40_000
    rng = torch.Generator().manual_seed(0)
    loads = ranks([torch.zeros(n) for _ in range(size)])
    heat = torch.ones(n)
    heat[:20_000] = 3
    for _ in range(30):
        for payload in loads:
            payload.flat += torch.randn(n, generator=rng) * heat
        step(PartitionedTopK(0.02, Dynamic()), loads)
    thresholds = loads[0].state["thresholds"]
    assert thresholds.max() < 1.25 * thresholds.min()
    assert loads[0].state["edges"][2] < 15_000
    for payload in loads[1:]:
        for key, value in loads[0].state.items():
            assert torch.equal(payload.state[key], value), f"{key} drifted"


@every_partition
def test_traffic_is_the_formula(partition: Partition) -> None:
    size, n, k = 4, 400_000, 4000
    traffic = check_law(
        PartitionedTopK(k / n, partition), size, numel=n, steps=1, dtype=torch.float32,
        tolerance=1e-5, gradient=lambda g, n: torch.randn(n, generator=g),
    )  # fmt: skip
    total = (traffic["AllGather"] + traffic["Mean"]) / 4
    words = (2 + Indices(k, n).nbytes / k / 4) * k * (size - 1)
    assert words <= total <= 1.01 * words
    assert traffic["rounds"] == 3  # one of them waits for the host


def test_what_pays() -> None:
    assert pays(1000, 10, 4)
    assert not pays(1000, 10, 1)
    assert not pays(8, 1, 8)
    assert not pays(1000, 1000, 4)
    assert pays(1000, 750, 4)
    assert not pays(1000, 800, 4)


@pytest.mark.parametrize("size", [2, 5])
@every_partition
def test_zeros_and_ties(partition: Partition, size: int) -> None:
    collective, n = PartitionedTopK(0.01, partition), 10_000 * size
    loads = ranks([torch.zeros(n) for _ in range(size)])
    for mean in step(collective, loads):
        assert torch.equal(mean, torch.zeros(n))
    for _ in range(3):
        for payload in loads:
            payload.flat.fill_(-1.0)
        for mean in step(collective, loads):
            assert mean.unique().tolist() == [-1.0, 0.0]
            assert int(mean.count_nonzero()) == n // 100
    few = torch.zeros(n)
    few[::500] = 3.0
    for payload in loads:
        payload.flat.copy_(few)
    means = step(collective, loads)
    for payload in loads:
        payload.flat.zero_()
    step(collective, loads)
    for payload in loads:
        payload.flat.copy_(few)
    means = step(collective, loads)
    assert torch.equal(means[0], few), "fewer entries than asked: all are delivered"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 11_999])
@every_partition
def test_what_is_not_finite_raises_the_alarm_and_arrives(
    partition: Partition, place: int, bad: float
) -> None:
    size, n = 4, 12_000
    rng = torch.Generator().manual_seed(0)
    loads = ranks([torch.randn(n, generator=rng) for _ in range(size)])
    step(PartitionedTopK(0.01, partition), loads)
    for payload in loads:
        payload.flat += torch.randn(n, generator=rng)
    loads[1].flat[place] = bad
    arrived = False
    for turn in range(size):
        means = step(PartitionedTopK(0.01, partition), loads)
        arrived = arrived or all(not mean[place].isfinite() for mean in means)
        assert turn > 0 or math.isnan(loads[1].nonfinite), "the alarm comes at once"
        for payload in loads:
            payload.flat += torch.randn(n, generator=rng)
    assert arrived, "on all ranks, after P steps at the latest"
    for _ in range(3):
        means = step(PartitionedTopK(0.01, partition), loads)
    assert all(mean.isfinite().all() for mean in means), "thresholds are not poisoned"


@every_partition
def test_the_mean_of_means_approaches_the_mean_of_gradients(
    partition: Partition,
) -> None:
    size, n, steps = 3, 600, 80
    rng = torch.Generator().manual_seed(1)
    gradients = [torch.randn(n, generator=rng) for _ in range(size)]
    loads = ranks([torch.zeros(n) for _ in range(size)])
    total = torch.zeros(n)
    for _ in range(steps):
        for payload, gradient in zip(loads, gradients, strict=True):
            payload.flat += gradient
        total += step(PartitionedTopK(0.1, partition), loads)[0]
    expected = torch.stack(gradients).mean(0)
    assert (total / steps - expected).norm() < 0.25 * expected.norm()


def test_a_flow_closed_at_its_cut_leaves_the_remainder() -> None:
    flat = torch.randn(1000)
    before = flat.clone()
    group = Group(0, 2)
    flow = PartitionedTopK(0.1).reduce(payload := Payload(flat, [flat]), group)
    flow = in_halves(flow, group)
    request = next(flow)
    while not isinstance(request, Cut):
        tensor = getattr(request, "tensor", torch.empty(0))
        match type(request).__name__:
            case "AllGather":
                request = flow.send(tensor.repeat(2))
            case "ReduceScatter":
                request = flow.send(tensor[: len(tensor) // 2])
            case _:
                request = flow.send(tensor)
    flow.close()
    assert payload.num_sent > 0
    kept = flat != 0
    assert torch.equal(flat[kept], before[kept])
    assert int(kept.sum()) < 1000


def test_pick_takes_the_largest_whatever_the_threshold() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    expected = x.abs().topk(100).indices.sort().values.to(torch.int32)
    for threshold in (math.nan, 0.0, 1e-3, 2.5, 2.6, 1e3):
        [where], [following] = pick([x], [(100, threshold)], seed=0)
        assert torch.equal(where, expected)
        assert 1.5 < following < 4


def segments(seed: int) -> list[Tensor]:
    """Some short, some long, one with a few entries that are not zero."""
    rng = torch.Generator().manual_seed(seed)
    found = [torch.randn(n, generator=rng) for n in (20_000, 300, 4096, 9000, 7)]
    found[1][3:] = 0
    return found


QUOTAS = [100, 10, 50, 60, 7]


def check_pick_waits_once(device: str, waits: Callable[[], Any]) -> None:
    """Also for several segments, once it knows thresholds: they change slowly."""
    following: Sequence[Tensor] = [torch.tensor(math.nan)] * 5
    for seed in range(3):
        here = segments(seed)
        sought = list(zip(QUOTAS, map(float, following), strict=True))
        there = [x.to(device) for x in here]
        with waits() as seen:
            found, following = pick(there, sought, seed)
        # On CPUs a pass has its threshold in a tensor.
        known = [what for what in seen if what != "aten.lift_fresh"]
        assert not seed or len(known) <= 1, known
        for x, quota, where in zip(here, QUOTAS, found, strict=True):
            largest = x.abs().topk(quota).indices.sort().values
            expected = largest[x[largest] != 0]
            assert torch.equal(where.cpu(), expected.to(torch.int32))


def test_pick_waits_for_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def top(found: Tensor, sizes: Tensor, k: int) -> Tensor:
        return found.index_select(0, sizes.topk(k).indices).sort().values

    monkeypatch.setattr(kernels, "top", top)  # as it is on a GPU
    check_pick_waits_once("cpu", Waits)


@pytest.mark.gpu
def test_pick_waits_for_the_gpu_once() -> None:
    check_pick_waits_once("cuda", synchronised)


@pytest.mark.gpu
@every_partition
def test_the_law_on_a_gpu(partition: Partition) -> None:
    rows = [torch.randn(40_000, device="cuda") for _ in range(3)]
    before = torch.stack(rows).sum(0)
    loads = ranks(rows, cuts=(1000, 30_000))
    for _ in range(3):
        mean = step(PartitionedTopK(0.05, partition), loads)[0]
        after = torch.stack([load.flat for load in loads]).sum(0)
        torch.testing.assert_close(before, 3 * mean + after)
        before = after


def test_shares_are_exact_and_in_proportion() -> None:
    assert shares(100, [1000, 1000], [3.0, 1.0]) == [75, 25]
    assert shares(100, [10, 1000], [9.0, 1.0]) == [10, 90]
    assert shares(7, [4, 4, 4], [0.0, 0.0, 0.0]) == shares(7, [4, 4, 4], [])
    for k in (1, 5, 17, 60):
        quotas = shares(k, [5, 40, 1, 14], [0.1, 7.0, 30.0, 2.0])
        assert sum(quotas) == k
        assert all(q <= n for q, n in zip(quotas, [5, 40, 1, 14], strict=True))


def test_bins_are_balanced_and_complete() -> None:
    bins = deal([9, 1, 1, 8, 2, 7, 3, 5], 4)
    assert sorted(s for segments in bins for s in segments) == list(range(8))
    work = [sum([9, 1, 1, 8, 2, 7, 3, 5][s] for s in segments) for segments in bins]
    assert max(work) == 9
    assert deal([1], 3) == [[0], [], []]


def test_boundaries_keep_a_least_length() -> None:
    edges = rebalance([0, 2500, 5000, 7500, 10_000], [1e6, 1.0, 1.0, 1.0], gain=1.0)
    assert edges[0] == 0
    assert edges[-1] == 10_000
    assert edges[1] < 2500
    assert min(b - a for a, b in pairwise(edges)) >= 625
    same = rebalance([0, 100, 200], [math.nan, 1.0], gain=1.0)
    assert same == [0, 100, 200]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PartitionedTopK(0.0),
        lambda: PartitionedTopK(1.5),
        lambda: PartitionedTopK(wire="int7"),
        lambda: PartitionedTopK(partition=Even),
        lambda: PartitionedTopK(partition="even"),
        lambda: Dynamic(gain=0.0),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"PartitionedTopK|Dynamic"):
        make()
