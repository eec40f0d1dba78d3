"""Ok-Topk: the law, its choice of winners, its volume, and its edge cases."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.collectives._balance import pays
from gradtide.collectives.dense import Dense
from gradtide.collectives.oktopk import OkTopk
from gradtide.core.ops import Cut, Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact, Threshold
from gradtide.testing import answer, check_law, lockstep

SIZES = (1, 2, 3, 4, 5, 8)  # sixteen, and seven, are in tests/test_law.py
EXACT = Exact()


def heavy(size: int, numel: int, seed: int = 0) -> list[Tensor]:
    """Heavy-tailed gradients with a part that all ranks share."""
    rng = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=rng).pow(3)
    return [torch.randn(numel, generator=rng).pow(3) + common for _ in range(size)]


def payloads(rows: list[Tensor]) -> list[Payload]:
    return [Payload(row.clone(), []) for row in rows]


def run(
    scheme: OkTopk, loads: list[Payload], traffic: Counter[str] | None = None
) -> Tensor:
    size = len(loads)
    flows = [scheme.reduce(payload, Group(r, size)) for r, payload in enumerate(loads)]
    means = lockstep(flows, traffic)
    for mean in means:
        torch.testing.assert_close(mean, means[0], rtol=0, atol=0, equal_nan=True)
    return means[0].clone()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("density", "select"), [(0.05, Threshold()), (0.3, Exact())], ids=repr
)
def test_law(size: int, density: float, select: Exact | Threshold) -> None:
    scheme = OkTopk(density, select=select, rebalance=4, refresh=3)
    traffic = check_law(scheme, size, numel=256 * size, steps=8)
    assert ("AllToAll" in traffic) == (size > 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [1, 3])
def test_law_of_tiny_buckets(size: int, numel: int) -> None:
    check_law(OkTopk(), size, numel=numel * size)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_what_the_wire_rounds_off_stays_behind(size: int, wire) -> None:
    scheme = OkTopk(0.1, wire=wire)
    traffic = check_law(
        scheme, size, numel=512 * size, steps=8, dtype=torch.float32, tolerance=1e-6
    )
    assert "AllToAll" in traffic


def test_a_mean_that_is_rounded_to_zero_stays_once() -> None:
    """A quarter of the smallest number of the wire: the sum of four ranks is there."""
    size, smallest = 4, 2.0**-24
    rows = [torch.zeros(2048) for _ in range(size)]
    for row in rows:
        row[100:1100:10] = 1.0
    rows[0][5] = smallest
    loads = payloads(rows)
    mean = run(OkTopk(0.05, wire="fp16", select=EXACT), loads)
    assert mean[100:1100:10].eq(1).all()
    assert mean[5] == 0
    assert [float(load.flat[5]) for load in loads] == [smallest, 0, 0, 0]
    assert loads[0].num_sent == 100, "it won, and was not delivered"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_buckets(dtype: torch.dtype) -> None:
    traffic = check_law(OkTopk(0.1), 4, numel=2048, dtype=dtype, tolerance=0.05)
    assert "AllToAll" in traffic


@pytest.mark.parametrize("size", [2, 5])
def test_density_of_one_is_dense(size: int) -> None:
    rows = heavy(size, 60 * size)
    loads = payloads(rows)
    mean = run(OkTopk(1.0), loads)
    assert torch.equal(mean, run(Dense(), payloads(rows)))  # type: ignore[arg-type]
    assert torch.equal(loads[0].flat, mean), "handed out: nothing was left behind"


def twin(flats: list[Tensor], k: int, winners: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The definition on dense tensors, given who won: the mean and what is left."""
    chosen = [torch.zeros_like(flat, dtype=torch.bool) for flat in flats]
    for mask, flat in zip(chosen, flats, strict=True):
        mask[flat.abs().topk(k).indices] = True
    pairs = list(zip(chosen, flats, strict=True))
    sums = sum(torch.where(m, flat, 0) for m, flat in pairs)
    mean = torch.where(winners, sums / len(flats), 0)
    left = [flat.masked_fill(m & winners, 0) for m, flat in pairs]
    return mean, left


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_agrees_with_the_definition(size: int) -> None:
    numel, k = 6400 * size, 64 * size
    loads = payloads([torch.zeros(numel, dtype=torch.float64)] * size)
    scheme = OkTopk(k / numel, select=EXACT, rebalance=3, refresh=2)
    for step in range(8):
        for payload, row in zip(loads, heavy(size, numel, step), strict=True):
            payload.flat.add_(row)
        before = [payload.flat.clone() for payload in loads]
        mean = run(scheme, loads)
        expected, left = twin(before, k, mean != 0)
        torch.testing.assert_close(mean, expected)
        for payload, rest in zip(loads, left, strict=True):
            torch.testing.assert_close(payload.flat, rest, rtol=0, atol=0)
        best = twin(before, k, mean == mean)[0].abs().topk(k).values.sum()
        assert int((mean != 0).sum()) == k
        assert mean.abs().sum() > 0.995 * best, f"step {step}"


@pytest.mark.parametrize("refresh", [1, 32])
def test_k_entries_are_delivered_at_every_scale(refresh: int) -> None:
    size, numel, k = 4, 10_000, 200
    scheme = OkTopk(k / numel, refresh=refresh)
    loads = payloads([torch.zeros(numel)] * size)
    delivered = []
    for step in range(100):
        scale = {0: 1.0, 1: 100.0, 2: 0.01, 3: 1e-4}[step // 25]
        for payload, row in zip(loads, heavy(size, numel, step), strict=True):
            payload.flat.add_(row, alpha=scale)
        delivered.append(int((run(scheme, loads) != 0).sum()))
    assert delivered == pytest.approx([k] * 100, rel=0.01)


@pytest.mark.product
@pytest.mark.parametrize("size", [4, 8, 16])
def test_volume_is_between_the_bounds_of_the_paper(size: int) -> None:
    numel, steps = 10_000 * size, 8
    k = numel // 100
    scheme = OkTopk(0.01, rebalance=4, refresh=3)
    loads, traffic = payloads([torch.zeros(numel)] * size), Counter[str]()
    for step in range(steps):
        for payload, row in zip(loads, heavy(size, numel, step), strict=True):
            payload.flat.add_(row)
        run(scheme, loads, traffic)
    traffic.pop("rounds")
    words = traffic.total() / 4 / size / steps
    small = (size - 1) * (2 + 52)
    # Half a word an index, where the paper counts a whole one.
    assert (
        1.5 * k
        < words
        < (1.5 + 1.5 + 1.5 / size) * k * (size - 1) / size * 1.15 + small
    )
    assert words < 6 * k * (size - 1) / size


def test_one_round_of_counts_one_of_rankings_two_of_entries() -> None:
    loads, traffic = payloads(heavy(4, 20_000)), Counter[str]()
    scheme = OkTopk(0.01)
    names = []
    for _ in range(2):
        flows = [scheme.reduce(payload, Group(r, 4)) for r, payload in enumerate(loads)]
        asked = [next(flow) for flow in flows]
        names.append([])
        while asked:
            names[-1].append(type(asked[0]).__name__)
            answers = answer(asked, traffic)
            asked = []
            for flow, reply in zip(flows, answers, strict=True):
                try:
                    asked.append(flow.send(reply))
                except StopIteration:
                    assert not asked
                    break
    first = ["AllToAll", "ToHost", "AllToAll", "AllToAll", "ToHost", "Cut", "AllGather"]
    assert names == [["AllToAll", "ToHost", *first], first]


def test_regions_receive_equal_numbers_from_the_first_step_on() -> None:
    size, numel = 4, 40_000
    ramp = torch.linspace(4, 0, numel).exp()  # almost all entries in the first tenth
    loads = payloads([row * ramp for row in heavy(size, numel)])
    run(OkTopk(0.02, select=EXACT), loads)
    bounds = loads[0].state["bounds"]
    rows = [row * ramp for row in heavy(size, numel)]
    where = torch.cat([EXACT(row, 800, {}) for row in rows])
    received = torch.bincount(torch.bucketize(where, bounds[1:-1]), minlength=size)
    assert received.max() < 1.2 * received.float().mean()
    assert bounds[1] < numel // 20


def test_regions_are_cut_anew_as_soon_as_one_gets_too_much() -> None:
    size, numel = 4, 40_000
    ramp = torch.linspace(4, 0, numel).exp()
    loads = payloads([row * ramp for row in heavy(size, numel)])
    scheme = OkTopk(0.02)
    run(scheme, loads)
    begin = loads[0].state["bounds"].clone()
    hot = payloads([row * ramp.flip(0) for row in heavy(size, numel)])
    for payload, new in zip(loads, hot, strict=True):
        payload.flat.copy_(new.flat)
    mean = run(scheme, loads)  # all that is selected lies in the last region
    assert int((mean != 0).sum()) == 800
    assert torch.equal(loads[0].state["bounds"], begin)
    run(scheme, loads)
    assert loads[0].state["bounds"][1] > numel // 2
    assert not loads[0].state["skewed"]


def test_regions_are_cut_anew_every_so_many_steps() -> None:
    """Also where none gets far too much, as what is large moves slowly."""
    size, numel = 4, 40_000
    loads = payloads([torch.zeros(numel) for _ in range(size)])
    scheme, cut = OkTopk(0.02, select=EXACT, rebalance=3), []
    for step in range(6):
        ramp = torch.linspace(1, 1 + 0.1 * step, numel)
        for payload, row in zip(loads, heavy(size, numel, seed=step), strict=True):
            payload.flat.copy_(row * ramp)
        run(scheme, loads)
        cut.append(loads[0].state["bounds"].tolist())
        assert not loads[0].state["skewed"]
    assert cut[0] == cut[1] == cut[2] != cut[3] == cut[4] == cut[5]


def test_boundaries_of_another_world_size_are_not_used() -> None:
    loads = payloads(heavy(4, 20_000))
    for payload in loads:
        payload.state.update(
            bounds=torch.tensor([0, 5000, 20_000]),
            skewed=torch.tensor(False),
            step=torch.tensor(5),
        )
    run(OkTopk(0.01), loads)
    assert len(loads[0].state["bounds"]) == 5


def to_cut(scheme: OkTopk, loads: list[Payload]) -> tuple[list, list[Cut]]:
    """Flows that wait at their cut."""
    size = len(loads)
    flows = [scheme.reduce(payload, Group(r, size)) for r, payload in enumerate(loads)]
    asked = [next(flow) for flow in flows]
    while not isinstance(asked[0], Cut):
        replies = answer(asked)
        asked = [f.send(reply) for f, reply in zip(flows, replies, strict=True)]
    return flows, asked


def test_a_step_skipped_at_the_cut_keeps_everything_finite() -> None:
    rows = heavy(3, 6000)
    rows[1][17] = float("inf")
    loads = payloads(rows)
    flows, cuts = to_cut(OkTopk(0.02), loads)
    assert sum(len(cut.part) for cut in cuts) == 120
    for flow in flows:
        flow.close()
    rows[1][17] = 0
    for payload, row in zip(loads, rows, strict=True):
        torch.testing.assert_close(payload.flat, row, rtol=0, atol=0)


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_the_owners_change_at_the_cut_is_what_travels(wire) -> None:
    rows = heavy(3, 6000)
    plain, clipped = payloads(rows), payloads(rows)
    whole = run(OkTopk(0.02, wire=wire), plain)
    flows, cuts = to_cut(OkTopk(0.02, wire=wire), clipped)
    for cut in cuts:
        cut.part.mul_(0.25)
    for mean in lockstep(flows):
        torch.testing.assert_close(mean, whole * 0.25, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("wire", [None, "bf16"])
def test_what_is_not_finite_arrives_and_leaves_nothing(
    bad: float, select, wire
) -> None:
    size, numel = 4, 8000
    scheme = OkTopk(0.02, select=select, wire=wire)
    loads = payloads(heavy(size, numel))
    run(scheme, loads)
    loads[2].flat[4321] = bad
    mean = run(scheme, loads)
    assert not mean[4321].isfinite()
    assert int((~mean.isfinite()).sum()) == 1
    assert all(payload.flat.isfinite().all() for payload in loads)
    assert [bool(torch.as_tensor(payload.nonfinite).isnan()) for payload in loads] == [
        rank == 2 for rank in range(size)
    ]
    assert run(scheme, loads).isfinite().all(), "and the next step is sound"


@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("share", [2, 1])
def test_a_gradient_of_many_nans(share: int, select: Exact | Threshold) -> None:
    rows = heavy(4, 6000)
    rows[3][::share] = float("nan")
    loads = payloads(rows)
    scheme = OkTopk(0.02, select=select)
    assert run(scheme, loads).isnan().any()
    assert all(payload.flat.isfinite().all() for payload in loads)
    assert torch.as_tensor(loads[3].nonfinite).isnan()
    assert run(scheme, loads).isfinite().all()


def test_what_overflows_the_wire_arrives_infinite() -> None:
    rows = heavy(2, 4000)
    rows[0][5] = 1e30
    loads = payloads(rows)
    mean = run(OkTopk(0.02, wire="fp16"), loads)
    assert mean[5].isinf()
    assert all(payload.flat.isfinite().all() for payload in loads)


@pytest.mark.parametrize("select", [Exact(), Threshold()], ids=repr)
@pytest.mark.parametrize("size", [2, 5])
def test_zeros_and_ties(size: int, select) -> None:
    scheme = OkTopk(0.1, select=select)
    numel = 1000 * size
    loads = payloads([torch.zeros(numel)] * size)
    assert not run(scheme, loads).any()
    for payload in loads:
        payload.flat.fill_(1.0)
    mean = run(scheme, loads)
    k = round(0.1 * numel)
    assert 0 < int((mean != 0).sum()) <= k
    kept = sum(payload.flat for payload in loads)
    torch.testing.assert_close(size * mean + kept, torch.full((numel,), float(size)))


def test_a_rank_without_gradients_and_one_with_all_in_one_place() -> None:
    rows = heavy(4, 20_000)
    rows[0].zero_()
    rows[3][:19_000] = 0
    loads = payloads(rows)
    for _ in range(3):
        before = sum(payload.flat for payload in loads)
        mean = run(OkTopk(0.02, select=EXACT), loads)
        after = sum(payload.flat for payload in loads)
        torch.testing.assert_close(4 * mean + after, before, rtol=1e-5, atol=1e-5)
        assert int((mean != 0).sum()) == 400


def test_sums_that_cancel_stay_behind() -> None:
    row = heavy(1, 4000)[0]
    loads = payloads([row, -row])
    assert not run(OkTopk(0.02, select=EXACT), loads).any()
    assert torch.equal(loads[0].flat, row)


def test_what_was_taken_is_counted() -> None:
    loads = payloads(heavy(3, 6000))
    before = [payload.flat.clone() for payload in loads]
    run(OkTopk(0.02, select=EXACT), loads)
    for payload, flat in zip(loads, before, strict=True):
        assert payload.num_sent == int((payload.flat != flat).sum()) > 0


def test_the_mean_of_means_approaches_the_mean_of_gradients() -> None:
    size, numel, steps = 4, 4000, 80
    rows = heavy(size, numel)
    loads = payloads([torch.zeros(numel)] * size)
    scheme, total = OkTopk(0.05), torch.zeros(numel)
    for _ in range(steps):
        for payload, row in zip(loads, rows, strict=True):
            payload.flat.add_(row)
        total += run(scheme, loads)
    expected = torch.stack(rows).mean(0)
    error = (total / steps - expected).norm() / expected.norm()
    assert error < 0.25


def test_large_skewed_winners_are_evened_out_before_the_gather() -> None:
    size, numel = 8, 400_000
    rows = heavy(1, numel) * size
    for rank, row in enumerate(rows):  # as many are selected here as in the other
        rows[rank] = row = row.clone()  # half, but not one sum there is as large
        row[: numel // 2] = 0
        row[rank : numel // 2 : size] = 1000
    loads, traffic = payloads(rows), Counter[str]()
    before = sum(payload.flat for payload in loads)
    mean = run(OkTopk(0.125, select=EXACT), loads, traffic)
    assert traffic["rounds"] == 10  # two for the regions, one for the move
    after = sum(payload.flat for payload in loads)
    torch.testing.assert_close(size * mean + after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 8])
def test_small_or_dense_buckets_travel_dense(size: int) -> None:
    for numel, density in ((8 * size, 0.5), (100 * size, 0.7)):
        assert not pays(numel, round(density * numel), size)
        loads, traffic = payloads(heavy(size, numel)), Counter[str]()
        run(OkTopk(density), loads, traffic)
        assert set(traffic) == {"Mean", "rounds"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0.0}, "above 0"),
        ({"density": 1.5}, "at most 1"),
        ({"rebalance": 0}, "counts steps"),
        ({"refresh": -1}, "counts steps"),
        ({"wire": "int7"}, "'2bit', 'sign' or None"),
    ],
)
def test_refuses_what_makes_no_sense(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OkTopk(**arguments)
