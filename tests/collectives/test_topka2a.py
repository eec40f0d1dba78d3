"""TopKA2A and TopkDSA: the largest of every part, at the owner's, then everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.collectives._entries import entry_words, length
from gradtide.collectives._nonzero import NonZero
from gradtide.collectives.contrib.topkdsa import TopkDSA, tail_pays
from gradtide.collectives.dense import Dense
from gradtide.collectives.topka2a import TopKA2A, pays
from gradtide.core.ops import Cut, Group
from gradtide.core.payload import Collective, Payload
from gradtide.selectors import Exact, Selector, Threshold
from gradtide.testing import check_law, lockstep
from gradtide.wire import codec_of

SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py
BOTH = (TopKA2A, TopkDSA)
FLOATS = codec_of(None, torch.float32)


def gradients(size: int, n: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=rng).pow(3) for _ in range(size)]


def average(
    make: Collective, rows: list[Tensor], traffic: Counter[str] | None = None
) -> tuple[list[Tensor], list[Payload]]:
    """Means and payloads of one step, `rows` being changed in place."""
    size = len(rows)
    loads = [Payload(row, [row]) for row in rows]
    flows = [make.reduce(payload, Group(r, size)) for r, payload in enumerate(loads)]
    return lockstep(flows, traffic), loads


def twin(rows: list[Tensor], kept: int) -> tuple[Tensor, list[Tensor]]:
    """The definition, on gathered dense tensors: the mean, and the remainders."""
    size, after = len(rows), []
    total = torch.zeros_like(rows[0]).view(size, -1)
    for row in rows:
        parts = row.clone().view(size, -1)
        for total_part, part in zip(total, parts, strict=True):
            best = part.abs().argsort(descending=True)[:kept]
            total_part[best] += part[best]
            part[best] = 0
        after.append(parts.flatten())
    return total.flatten() / size, after


# - The law ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=["exact", "threshold"])
@pytest.mark.parametrize("make", BOTH)
def test_law(make: type[TopKA2A], select: Selector, size: int) -> None:
    check_law(make(0.05, select), size, numel=100 * size, steps=2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize("make", BOTH)
def test_law_of_tiny_buckets(make: type[TopKA2A], span: int, size: int) -> None:
    check_law(make(0.3, Exact()), size, numel=span * size, steps=2)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("density", [0.02, 0.4])
@pytest.mark.parametrize(("wire", "dtype"), [("bf16", 32), ("fp16", 32), ("bf16", 64)])
def test_what_the_wire_rounds_off_stays(make, density, wire, dtype) -> None:
    dtype, tolerance = {32: (torch.float32, 1e-6), 64: (torch.float64, 1e-12)}[dtype]
    check_law(
        make(density, Exact(), wire),
        2,
        numel=800,
        steps=3,
        dtype=dtype,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("make", BOTH)
def test_law_of_parts_longer_than_a_block(make: type[TopKA2A]) -> None:
    check_law(make(), 2, numel=140_000, steps=2)


# - Equal to the definition ------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("density", [0.3])
@pytest.mark.parametrize("make", BOTH)
def test_the_mean_of_the_largest_of_every_part(make, density: float, size: int) -> None:
    rows = gradients(size, 50 * size)
    expected, after = twin(rows, round(50 * density))
    means, _ = average(make(density, Exact()), rows)
    for mean, row, rest in zip(means, rows, after, strict=True):
        torch.testing.assert_close(mean, expected)
        assert torch.equal(row, rest)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("size", [1, 4])
def test_everything_is_dense(make: type[TopKA2A], size: int) -> None:
    rows = gradients(size, 40 * size)
    expected, _ = average(Dense(), [row.clone() for row in rows])
    means, _ = average(make(1.0), rows)
    for mean, dense, row in zip(means, expected, rows, strict=True):
        assert torch.equal(mean, dense)
        assert mean.data_ptr() == row.data_ptr()  # handed out: nothing is left behind


@dataclass(frozen=True)
class Fixed:
    """As many candidates as it says, whatever is asked: the largest."""

    found: int

    def __call__(self, x: Tensor, k: int, state: dict[str, Tensor]) -> Tensor:
        state["calls"] = state.get("calls", torch.zeros(())) + 1
        return Exact()(x, self.found, state)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("found", [1, 3, 5, 9])
def test_any_number_of_candidates(make: type[TopKA2A], found: int) -> None:
    rows, traffic = gradients(3, 300), Counter[str]()
    expected, after = twin(rows, min(found, 5))
    means, loads = average(make(0.05, Fixed(found)), rows, traffic)
    torch.testing.assert_close(means[0], expected)
    for row, rest, payload in zip(rows, after, loads, strict=True):
        assert torch.equal(row, rest)
        assert payload.num_sent == 3 * min(found, 5)
        assert sorted(payload.state) == [f"part{i}.calls" for i in range(3)]
    numbers = 3 * 2 * 8 if make is TopkDSA else 0
    assert traffic["AllToAll"] == 3 * 2 * 32 + numbers  # 5 entries of 6 bytes, aligned


def test_in_steady_state_the_threshold_finds_nearly_the_largest() -> None:
    size, n, kept = 2, 20_000, 100
    flats, recall = [torch.zeros(n) for _ in range(size)], []
    loads = [Payload(flat, [flat]) for flat in flats]
    for step in range(30):
        for flat, row in zip(flats, gradients(size, n, step), strict=True):
            flat += row
        _, after = twin(flats, kept)
        best = [flat.ne(rest) for flat, rest in zip(flats, after, strict=True)]
        lockstep([TopKA2A().reduce(x, Group(r, size)) for r, x in enumerate(loads)])
        if step >= 10:
            sent = [flat.eq(0) & hit for flat, hit in zip(flats, best, strict=True)]
            recall.append(torch.stack(sent).sum() / torch.stack(best).sum())
    assert min(recall) > 0.8
    taken = sum(payload.num_sent for payload in loads) / 30
    assert taken == pytest.approx(size * size * kept, rel=0.1)


@pytest.mark.parametrize("make", BOTH)
def test_the_mean_of_means_approaches_the_mean_of_gradients(make) -> None:
    rows = gradients(2, 200)
    flats = [torch.zeros(200) for _ in rows]
    loads = [Payload(flat, [flat]) for flat in flats]
    total, errors = torch.zeros(200), []
    for step in range(1, 81):
        for flat, row in zip(flats, rows, strict=True):
            flat += row
        flows = [make(0.05).reduce(x, Group(r, 2)) for r, x in enumerate(loads)]
        total += lockstep(flows)[0]
        if step in (10, 80):
            wanted = torch.stack(rows).mean(0)
            errors.append(float((total / step - wanted).norm() / wanted.norm()))
    assert errors[1] < 0.25 * errors[0]


# - The cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [None, "bf16"])
@pytest.mark.parametrize("make", BOTH)
def test_what_is_done_to_the_part_at_the_cut_reaches_everybody(make, wire) -> None:
    def halving(flow):
        answer = None
        while True:
            try:
                asked = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(asked, Cut):
                asked.part.mul_(0.5)
            answer = yield asked

    rows = gradients(4, 400)
    expected, _ = average(make(0.05, Exact(), wire), [row.clone() for row in rows])
    loads = [Payload(row, [row]) for row in rows]
    one = make(0.05, Exact(), wire)
    flows = [
        halving(one.reduce(payload, Group(r, 4))) for r, payload in enumerate(loads)
    ]
    for mean in lockstep(flows):
        assert torch.equal(mean, expected[0] / 2)


@pytest.mark.parametrize("make", BOTH)
def test_closed_at_the_cut_the_remainder_is_left(make: type[TopKA2A]) -> None:
    rows = gradients(4, 400)
    _, after = twin(rows, 5)

    def until_cut(flow):
        answer = None
        while not isinstance(asked := flow.send(answer), Cut):
            answer = yield asked
        flow.close()
        return asked.part

    loads = [Payload(row, [row]) for row in rows]
    one = make(0.05, Exact())
    lockstep([until_cut(one.reduce(x, Group(r, 4))) for r, x in enumerate(loads)])
    for row, rest in zip(rows, after, strict=True):
        assert torch.equal(row, rest)


# - Edges ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=["exact", "threshold"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_zeros_and_ties(make: type[TopKA2A], select: Selector, value: float) -> None:
    check_law(
        make(0.05, select),
        3,
        steps=3,
        gradient=lambda _, n: torch.full((n,), value),
    )


@pytest.mark.parametrize("wire", [None, "fp16"])
@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=["exact", "threshold"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", BOTH)
def test_not_finite_arrives_and_does_not_stay(make, bad, select, wire) -> None:
    rows = gradients(4, 4000)
    rows[2][1234] = bad
    means, loads = average(make(0.01, select, wire), rows)
    for mean in means:
        assert mean[1234].isnan() if bad != bad else mean[1234] == bad
        assert mean.isfinite().sum() == 3999
    assert all(row.isfinite().all() for row in rows)
    assert torch.as_tensor(loads[2].nonfinite).isnan()


@pytest.mark.parametrize("make", BOTH)
def test_what_is_too_large_for_the_wire_raises_the_alarm(make: type[TopKA2A]) -> None:
    rows = gradients(4, 400)
    rows[2][123] = 1e6
    means, loads = average(make(0.05, Exact(), "fp16"), rows)
    assert means[0][123].isinf()
    assert torch.as_tensor(loads[2].nonfinite).isnan()
    assert all(row.isfinite().all() for row in rows)


def test_a_mean_that_is_dense_in_one_step_and_sparse_in_the_next() -> None:
    one, alike = TopkDSA(0.3, Exact()), gradients(1, 800)[0]
    kinds = (gradients(8, 800), [alike.clone() for _ in range(8)])
    flats = [torch.zeros(800) for _ in range(8)]
    loads = [Payload(flat, [flat]) for flat in flats]
    tails = []
    for step in range(4):
        for flat, row in zip(flats, kinds[step % 2], strict=True):
            flat.copy_(row)
        expected, _ = twin(flats, 30)
        traffic = Counter[str]()
        flows = [one.reduce(payload, Group(r, 8)) for r, payload in enumerate(loads)]
        for mean in lockstep(flows, traffic):
            torch.testing.assert_close(mean, expected)
        tails.append(traffic["AllGather"])
    assert tails == [8 * 7 * 400, 8 * 7 * 136] * 2


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("density", [0.0, -1.0, 1.5, float("nan")])
def test_a_density_that_makes_no_sense(make: type[TopKA2A], density: float) -> None:
    with pytest.raises(ValueError, match="share of entries"):
        make(density)
    with pytest.raises(ValueError, match="wire is"):
        make(wire="fp8")


# - Cost -------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [None, "bf16", "e3m0"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_are_those_of_the_formula(size: int, wire: Any) -> None:
    n, codec = 80_000 // size * size, codec_of(wire, torch.float32)
    span, kept = n // size, n // size // 50
    traffic = Counter[str]()
    average(TopKA2A(0.02, Exact(), wire), gradients(size, n), traffic)
    whole, short = codec.nbytes(span), NonZero(codec, span, size * kept)
    assert traffic["AllToAll"] == size * (size - 1) * length(kept, span, codec)
    assert traffic["AllGather"] == size * (size - 1) * short.nbytes
    assert short.nbytes < 0.5 * whole  # of Li's, with zeros
    assert traffic["rounds"] == 3


def test_where_few_values_are_zero_all_of_the_mean_travels() -> None:
    traffic = Counter[str]()
    average(TopKA2A(0.02, Exact(), "2bit"), gradients(8, 80_000), traffic)
    codec = codec_of("2bit", torch.float32)
    assert traffic["AllGather"] == 8 * 7 * codec.nbytes(10_000)


@pytest.mark.parametrize("make", BOTH)
def test_a_wire_of_two_bytes_halves_the_mean(make: type[TopKA2A]) -> None:
    traffic = Counter[str]()
    average(make(0.3, Exact(), "bf16"), gradients(8, 80_000), traffic)
    numbers = 8 * 7 * 8 if make is TopkDSA else 0
    entries = length(3000, 10_000, codec_of("bf16", torch.float32))
    assert traffic["AllGather"] == 8 * 7 * 10_000 * 2
    assert traffic["AllToAll"] == 8 * 7 * entries + numbers


def test_bytes_of_a_sparse_tail() -> None:
    rows, traffic = gradients(8, 80_000), Counter[str]()
    union = int(twin(rows, 100)[0].count_nonzero())
    average(TopkDSA(0.01, Exact()), rows, traffic)
    # Every rank passes on what the others have.
    wanted = 7 * (length(union, 80_000, FLOATS) + 8 * 8)
    assert traffic["AllGather"] == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("size", "tail"),
    [
        (4, 0.1591),
        (8, 0.0830),
        (16, 0.0424),
        (32, 0.0214),
        (64, 0.0108),
        (128, 0.0054),
        (256, 0.0027),
    ],
)
def test_crossover_densities(size: int, tail: float) -> None:
    n = 10_000_000

    def union(density: float) -> int:
        return round(n * (1 - (1 - density) ** size))

    rounding = 0.00005
    for sign in (-1, 1):
        above = sign > 0
        assert tail_pays(union(tail + sign * rounding), n) == (not above)
        assert pays(n, round(n * (0.5 + sign * rounding)), size) == (not above)


@pytest.mark.parametrize("wire", [None, "bf16"])
@pytest.mark.parametrize("make", BOTH)
def test_where_it_does_not_pay_the_exchange_is_dense(make, wire) -> None:
    limit = 1 / entry_words(torch.float32, wire)
    for density, kind in ((limit - 0.01, "AllToAll"), (limit + 0.01, "Dense")):
        rows = gradients(4, 4000)
        means, _ = average(make(density, Exact(), wire), rows)
        handed_out = means[0].data_ptr() == rows[0].data_ptr()
        assert handed_out == (kind == "Dense")
