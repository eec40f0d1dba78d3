"""CLT-k: one rank chooses, all average."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradtide.collectives.contrib.cltk import SMALL, CLTk, pays
from gradtide.core.ops import Cut, Group, in_halves
from gradtide.core.payload import Payload
from gradtide.selectors import Exact, Threshold
from gradtide.testing import check_law, lockstep
from gradtide.wire import codec_of

FLOATS = codec_of(None, torch.float32)
SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py
LARGE = SMALL // 4 * 12  # elements: a tenth of them is too much for one hop


@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("size", SIZES)
def test_law(size: int, select: Exact | Threshold) -> None:
    check_law(CLTk(0.02, select), size)
    check_law(CLTk(0.02, select), size, numel=size, steps=5)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_law_in_two_halves(size: int) -> None:
    check_law(CLTk(0.1), size, numel=LARGE // size * size, steps=3)


def test_nothing_is_lost_on_a_wire() -> None:
    check_law(CLTk(0.1, wire="bf16"), 4, numel=LARGE, steps=3)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("numel", [500, LARGE])
def test_all_average_what_the_leader_of_the_step_chose(size: int, numel: int) -> None:
    rng = torch.Generator().manual_seed(0)
    flats = [torch.zeros(numel, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    for step in range(2 * size):
        for flat in flats:
            flat += torch.randn(numel, generator=rng)
        before = torch.stack(flats)
        chosen = torch.topk(flats[step % size].abs(), round(0.05 * numel)).indices
        expected = torch.zeros(numel, dtype=torch.float64)
        expected[chosen] = before.mean(0)[chosen]
        flows = [
            CLTk(0.05, Exact()).reduce(payload, Group(r, size))
            for r, payload in enumerate(loads)
        ]
        for mean in lockstep(flows):
            torch.testing.assert_close(mean, expected)
        before[:, chosen] = 0
        assert torch.equal(torch.stack(flats), before)


@pytest.mark.parametrize("size", SIZES)
def test_density_one_is_dense(size: int) -> None:
    traffic = check_law(CLTk(1.0), size)
    assert "Broadcast" not in traffic


@pytest.mark.parametrize("numel", [8000, LARGE])
def test_traffic(numel: int) -> None:
    size, k = 8, round(0.1 * numel)
    traffic = check_law(
        CLTk(0.1, Exact()), size, numel=numel, steps=1, dtype=torch.float32,
        tolerance=1e-5,
    )  # fmt: skip
    padded = -(-k // size) * size
    half = (size - 1) * padded * 4
    assert traffic["Broadcast"] == 4 * k
    if numel == LARGE:
        assert traffic["Mean"] == 2 * half
    else:
        assert traffic["AllReduce"] == 2 * half
    # 4 k for the indices; 8 (P - 1) / P of the values.
    assert pays(1000, 630, 8, FLOATS)
    assert not pays(1000, 640, 8, FLOATS)
    assert not pays(1000, 1, 1, FLOATS)


@pytest.mark.parametrize("size", [2, 5])
def test_zeros_and_ties(size: int) -> None:
    for value in (0.0, 1.0):
        check_law(CLTk(0.1), size, gradient=lambda _, n, v=value: torch.full((n,), v))


class Few:
    """Finds fewer than it is asked for."""

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        return torch.tensor([1, 3], dtype=torch.int32)


def test_a_leader_that_finds_fewer_than_k() -> None:
    check_law(CLTk(0.1, Few()), 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("owner", [0, 1])
def test_what_is_not_finite_raises_the_alarm_at_once(bad: float, owner: int) -> None:
    rng = torch.Generator().manual_seed(0)
    flats = [torch.randn(300, generator=rng) for _ in range(3)]
    flats[owner][17] = bad
    loads = [Payload(flat, [flat]) for flat in flats]
    steps = []
    for _ in range(3):
        flows = [
            CLTk(0.02, Exact()).reduce(payload, Group(r, 3))
            for r, payload in enumerate(loads)
        ]
        steps.append(lockstep(flows)[0][17].isfinite().item())
        assert [math.isnan(payload.nonfinite) for payload in loads] == [
            r == owner for r in range(3)
        ]
    assert steps.index(False) == owner  # it arrives when its rank leads
    assert all(flat.isfinite().all() for flat in flats)


def test_closed_at_the_cut_the_buffer_holds_the_remainder() -> None:
    flats = [torch.arange(1.0, LARGE + 1) for _ in range(2)]
    loads = [Payload(flat, [flat]) for flat in flats]
    flows = [
        CLTk(0.1, Exact()).reduce(payload, Group(r, 2))
        for r, payload in enumerate(loads)
    ]

    def held(flow):
        answer = None
        while True:
            asked = flow.send(answer)
            if isinstance(asked, Cut):
                flow.close()
                return asked.part
            answer = yield asked

    parts = lockstep([held(in_halves(flow, Group(0, 2))) for flow in flows])
    top = torch.arange(1.0, LARGE + 1)[-(LARGE // 10) :]
    assert torch.equal(torch.cat(parts)[: len(top)], top)
    for flat in flats:
        assert flat[: -len(top)].all()
        assert not flat[-len(top) :].any()


def test_means_approach_the_mean_of_the_gradients() -> None:
    size, n, steps = 4, 400, 400
    rng = torch.Generator().manual_seed(0)
    target = torch.randn(size, n, generator=rng, dtype=torch.float64)
    flats = [torch.zeros(n, dtype=torch.float64) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        for flat, gradient in zip(flats, target, strict=True):
            flat += gradient
        flows = [
            CLTk(0.1).reduce(payload, Group(r, size)) for r, payload in enumerate(loads)
        ]
        total += lockstep(flows)[0]
    error = (total / steps - target.mean(0)).norm() / target.mean(0).norm()
    assert error < 0.2
