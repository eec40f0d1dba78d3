"""Means by weight, and ranks that skip a step: values, messages and the law."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.collectives import OkTopk, PartitionedTopK, TopK, TopKA2A
from gradtide.core.ops import Group
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.weights import COUNT, Weights
from gradtide.testing import lockstep

SIZE, COUNTS = 3, (1, 50, 3)
EXACT = ("wfbp", "dear", "sequential")
LOCAL = "Scheme(TopK(0.2), schedule=LOCAL)"
STEPS = "Scheme(Dense(), schedule=Schedule('step'))"
ROUNDS = "Scheme(Dense(), schedule=Schedule('step', every=3))"
FRAGMENTS = (
    "Scheme(TopK(0.3), schedule=Schedule('step', every=4, delay=1, fragments=2))"
)
# As the README names them, but for the lengths of warm-ups.
RECIPES = (
    *EXACT[:2],
    "dear(wire='bf16')",
    "topka2a(0.02, schedule='local', warmup=6, wire='e3m0')",
    "exdyna(0.01, schedule='local', warmup=6, wire='e3m0')",
    "exdyna(0.1, warmup=6)",
    ROUNDS,
    FRAGMENTS,
)
OTHERS = ("wfbp(wire='e3m0')", "wfbp(wire='fp16')", "oktopk(0.2, schedule='dear')")


def net(normed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if normed else []
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(count, 4, generator=rng, dtype=torch.float64)
    return x, torch.randn(count, 2, generator=rng, dtype=torch.float64)


def count(step: int, rank: int) -> int:
    return COUNTS[(rank + step) % SIZE]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def params(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def assert_close(own: Any, other: Any, tolerance: float) -> None:
    for mine, its in zip(own, other, strict=True):
        assert mine == pytest.approx(its, rel=0, abs=tolerance)


def one_process(
    steps: int, clip: bool, who: Callable[[int], list[int]] = lambda _: [0, 1, 2]
) -> list[list[float]]:
    """Train on all samples of the ranks that take part in each step."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        data = [batch(step, rank, count(step, rank)) for rank in who(step)]
        if not data:
            continue
        opt.zero_grad()
        loss(model, *(torch.cat(part) for part in zip(*data, strict=True))).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
    return params(model)


def weighed(
    scheme: str, clip: bool, micro: int, lengths: tuple[int, ...]
) -> list[list[float]]:
    rank, model = dist.get_rank(), net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme, check_every=1)
    with sync.join() if min(lengths) < max(lengths) else nullcontext():
        for step in range(lengths[rank]):
            x, y = batch(step, rank, count(step, rank))
            sync.weight(len(x))
            parts = [*zip(x.chunk(micro), y.chunk(micro), strict=True)]
            for i, (own, target) in enumerate(parts):
                with sync.no_sync() if i < len(parts) - 1 else nullcontext():
                    (loss(model, own, target) * len(own) / len(x)).backward()
            if clip:
                sync.clip_grad_norm_(0.05)
            opt.step()
            opt.zero_grad()
    sync.flush()
    found = params(model)
    sync.remove()
    return found


@pytest.mark.product
@pytest.mark.pairs(
    scheme=[*EXACT, "dear(wire='bf16')"],
    clip=[False, True],
    micro=[1, 3],
    lengths=[(7, 7, 7), (7, 4, 6)],
)
def test_means_are_those_of_one_process_on_all_samples(
    scheme: str, clip: bool, micro: int, lengths: tuple[int, ...]
) -> None:
    ranks = range(SIZE)
    one = one_process(7, clip, lambda step: [r for r in ranks if step < lengths[r]])
    bits16 = "bf16" in scheme  # what the wire rounds off; by ranks it is 50 times that
    first, *others = run_ranks(SIZE, weighed, scheme, clip, micro, lengths)
    assert others == [first] * (SIZE - 1)
    assert_close(first, one, 2e-3 if bits16 else 1e-12)


def bits(scheme: str, weight: float | None) -> tuple[list[list[float]], list[Any]]:
    """Train with one and the same weight on all ranks, or without any."""
    rank, model = dist.get_rank(), net(normed=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(14):
        if weight is not None:
            sync.weight(weight)
        loss(model, *batch(step, rank, 5)).backward()
        sync.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    sync.end_round()
    sync.flush()
    found = params(model)
    asked = [
        (r.bucket, r.request, r.payload_bytes) for r in sync.engine.telemetry.records
    ]
    sync.remove()
    return found, asked


def of_both(scheme: str) -> list[Any]:
    return [bits(scheme, weight) for weight in (None, 7.1)]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("scheme", [*RECIPES, *OTHERS])
def test_equal_weights_change_no_bit_and_send_no_message(scheme: str) -> None:
    for (plain, asked), (own, told) in run_ranks(SIZE, of_both, scheme):
        assert own == plain
        assert told == asked
        # In a run's first backward alone.
        assert len([name for name, *_ in asked if name == "weights"]) <= 1


def unequal_messages(scheme: str) -> list[Any]:
    """What was asked for with weights that differ, and without."""
    found = []
    for given in (False, True):
        rank, model = dist.get_rank(), net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, scheme)
        for step in range(6):
            if given:
                sync.weight(count(step, rank))
            loss(model, *batch(step, rank, 5)).backward()
            sync.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        sync.flush()
        records = sync.engine.telemetry.records
        found.append([(r.bucket, r.request, r.payload_bytes) for r in records])
        sync.remove()
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", STEPS, ROUNDS])
def test_weights_travel_in_messages_that_there_are(scheme: str) -> None:
    for plain, own in run_ranks(SIZE, unequal_messages, scheme):
        assert plain == own
        assert plain


# - The law ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TopK, TopKA2A, OkTopk, PartitionedTopK])
def test_the_law_holds_with_weights_in_lockstep(make: Any) -> None:
    """Buckets take gradients in by weight; with 0, not even a NaN is left of one."""
    rng = torch.Generator().manual_seed(1)
    groups = [Group(rank, SIZE) for rank in range(SIZE)]
    buckets = []
    for _ in groups:
        p = nn.Parameter(torch.zeros(SIZE, 64, dtype=torch.float64))
        flat = torch.zeros(SIZE * 64, dtype=torch.float64)
        buckets.append(GradientBucket([Slot("w", p, 0)], flat, make(0.05)))
    due = torch.zeros(SIZE * 64, dtype=torch.float64)  # added, and not delivered
    for step in range(12):
        for rank, bucket in enumerate(buckets):
            slot = bucket.slots[0]
            grad = torch.randn(SIZE, 64, generator=rng, dtype=torch.float64)
            bucket.gain = 0.0 if (step + rank) % 4 == 0 else count(step, rank) / 18
            if bucket.gain:
                due += grad.flatten() * bucket.gain
            else:
                grad[0] = math.nan
            bucket.begin_residual()
            slot.param.grad, slot.arrived = grad, True
            bucket.copy_in()
        flows = [
            bucket.collective.reduce(bucket.payload, group)
            for bucket, group in zip(buckets, groups, strict=True)
        ]
        means = lockstep(flows)
        due -= SIZE * means[0]
        for bucket, mean in zip(buckets, means, strict=True):
            bucket.take(mean)
            bucket.rearm()
        left = sum(bucket.payload.flat for bucket in buckets)
        assert torch.allclose(left, due, rtol=0, atol=1e-9)


def conserved(scheme: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What was added by weight, delivered, and left; SGD's steps add up means."""
    rank, model = dist.get_rank(), net()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    added = [torch.zeros_like(p) for p in model.parameters()]
    grads = dict[int, Tensor]()
    for i, p in enumerate(model.parameters()):

        def take(grad: Tensor, i: int = i) -> None:
            grads[i] = grad.clone()

        p.register_hook(take)
    begin = [p.detach().clone() for p in model.parameters()]
    sync = gradtide.replicate(model, opt, scheme)
    weights = sync._session.notices.weights
    for step in range(20):
        sync.weight(count(step, rank))
        if (step + rank) % 7 == 3:
            sync.skip()
        else:
            grads.clear()
            (loss(model, *batch(step, rank, 5)) * 0.05).backward()
            for i, grad in grads.items():
                added[i].add_(grad, alpha=weights.gain)
        opt.step()
        opt.zero_grad()
    sync.flush()
    moved = [a - p for a, p in zip(begin, model.parameters(), strict=True)]
    places = sync._training.placement.places
    left = [places[p].bucket.residual_of(places[p].slot) for p in model.parameters()]
    sync.remove()
    return [[t.tolist() for t in each] for each in (added, moved, left)]  # type: ignore[return-value]


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["topk(0.1)", "topka2a(0.1)", "exdyna(0.1)"])
def test_the_law_holds_with_weights_on_real_ranks(scheme: str) -> None:
    found = run_ranks(SIZE, conserved, scheme)
    for i in range(4):
        added, moved, left = (
            [torch.tensor(rank[kind][i], dtype=torch.float64) for rank in found]
            for kind in range(3)
        )
        assert torch.equal(moved[0], moved[1])
        assert float(sum(left).abs().max()) > 0  # type: ignore[union-attr]
        assert torch.allclose(sum(added), SIZE * moved[0] + sum(left), atol=1e-9)  # type: ignore[arg-type]


# - Steps, and rounds of them ----------------------------------------------------------


def averaged_steps(scheme: str, steps: int) -> list[list[float]]:
    rank, model = dist.get_rank(), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(steps):
        sync.weight(count(step, rank) if rank or step != 4 else 0)
        loss(model, *batch(step, rank, 5)).backward()
        opt.step()
        opt.zero_grad()
    sync.end_round()
    found = params(model)
    sync.remove()
    return found


@pytest.mark.parametrize(("scheme", "every"), [(STEPS, 1), (ROUNDS, 3)])
def test_what_ranks_did_counts_by_the_weights_of_its_steps(
    scheme: str, every: int
) -> None:
    """The last round is ended before its time."""
    steps, models = 8, [net() for _ in range(SIZE)]
    sums = [0] * SIZE
    for step in range(steps):
        for rank, model in enumerate(models):
            if rank == 0 and step == 4:  # by a weight of 0 a step is none
                continue
            sums[rank] += count(step, rank)
            model.zero_grad()
            loss(model, *batch(step, rank, 5)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad  # type: ignore[operator]
        if (step + 1) % every == 0 or step == steps - 1:
            with torch.no_grad():
                for same in zip(*(m.parameters() for m in models), strict=True):
                    rows = zip(sums, same, strict=True)
                    mean = sum(n * p for n, p in rows) / sum(sums)
                    for p in same:
                        p.copy_(mean)
            sums = [0] * SIZE
    for found in run_ranks(SIZE, averaged_steps, scheme, steps):
        assert_close(found, params(models[0]), 1e-12)


# - Skipping ---------------------------------------------------------------------------


def skipping(step: int) -> list[int]:
    """The ranks that skip a step: none, some, or all."""
    rng = torch.Generator().manual_seed(step)
    draw = torch.rand(SIZE, generator=rng)
    return [*range(SIZE)] if step == 5 else (draw < 0.25).nonzero().flatten().tolist()


def skips(
    scheme: str, steps: int, how: str, wrapped: bool
) -> tuple[list[list[float]], int]:
    """`how` says of what kinds the model and the loop are."""
    rank, model = dist.get_rank(), net("normed" in how)
    momentum = scheme == "exdyna(0.1, warmup=6)"
    opt: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if momentum:
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync: Any = None
    if wrapped:
        sync = gradtide.DistributedDataParallel(model, scheme=scheme)
        replica, around = sync.replica, sync
    else:
        sync = replica = gradtide.replicate(model, opt, scheme, check_every=1)
        around = model
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="scaler" in how)
    scaler.scale(torch.ones(()))
    for step in range(steps):
        x, y = batch(step, rank, count(step, rank) + 2 * ("normed" in how))
        if "weights" in how:
            sync.weight(len(x))
        opt.zero_grad()
        bad = rank in skipping(step)
        own = None if bad and step % 2 else loss(around, x, y)
        if bad:
            del own
            sync.skip()
        else:
            scaler.scale(own).backward()
        if "clip" in how:
            scaler.unscale_(opt)
            replica.clip_grad_norm_(0.05)
        scaler.step(opt)
        scaler.update()
    replica.end_round()
    replica.flush()
    found, counted = params(model), replica.metrics()["step"]
    replica.remove()
    return found, int(counted)


@pytest.mark.product(each=12)
@pytest.mark.parametrize("how", ["", "normed", "clip scaler weights"])
@pytest.mark.parametrize("scheme", RECIPES)
def test_ranks_that_skip_end_as_the_others(scheme: str, how: str) -> None:
    found = run_ranks(SIZE, skips, scheme, 25, how, False)
    assert found == [found[0]] * SIZE
    assert found[0][1] == 25


@pytest.mark.product
@pytest.mark.parametrize("how", ["weights", "clip weights", "clip scaler weights"])
@pytest.mark.parametrize("scheme", EXACT[:2])
def test_the_mean_is_over_those_that_do_not_skip(scheme: str, how: str) -> None:
    def active(step: int) -> list[int]:
        return [rank for rank in range(SIZE) if rank not in skipping(step)]

    one = one_process(25, "clip" in how, active)
    for found, _ in run_ranks(SIZE, skips, scheme, 25, how, False):
        assert_close(found, one, 1e-12)


@pytest.mark.parametrize("scheme", ["dear", FRAGMENTS])
def test_a_wrapper_skips_and_weighs_too(scheme: str) -> None:
    found = run_ranks(SIZE, skips, scheme, 12, "normed weights", True)
    assert found == [found[0]] * SIZE


def joined(scheme: str) -> list[list[float]]:
    rank, model = dist.get_rank(), net(normed=True)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme)
    with sync.join():
        for step in range(3 + 2 * rank):
            if step == rank:
                sync.skip()
            else:
                loss(model, *batch(step, rank, 5)).backward()
            opt.step()
            opt.zero_grad()
    found = params(model)
    sync.remove()
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", LOCAL, ROUNDS])
def test_ranks_skip_inside_join(scheme: str) -> None:
    found = run_ranks(SIZE, joined, scheme)
    assert found == [found[0]] * SIZE


def nothing(scheme: str) -> list[Any]:
    """A step in which all weights are 0, and one in which all ranks skip."""
    model, rank = net(), dist.get_rank()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found = []
    for step in range(6):
        sync.weight(0 if step == 3 else count(step, rank))
        if step == 4:
            sync.skip()
        else:
            scaler.scale(loss(model, *batch(step, rank, 5))).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        sync.flush()
        found.append(params(model))
    sync.remove()
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.2)", STEPS])
def test_nothing_changes_if_nobody_counts(scheme: str) -> None:
    first, *others = run_ranks(SIZE, nothing, scheme)
    assert others == [first] * (SIZE - 1)
    _, _, before, zero, skipped, after = first
    assert before == zero == skipped != after


def spoilt(scheme: str) -> list[list[float]]:
    """One rank's gradients are not numbers, and count by 0."""
    rank, model = dist.get_rank(), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(4):
        bad = step == 2 and rank == 1
        sync.weight(0 if bad else 4)
        (loss(model, *batch(step, rank, 5)) * (math.nan if bad else 1)).backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    found = params(model)
    sync.remove()
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.2)", STEPS, LOCAL])
def test_gradients_that_count_by_0_need_be_no_numbers(scheme: str) -> None:
    first, *others = run_ranks(SIZE, spoilt, scheme)
    assert others == [first] * (SIZE - 1)
    assert all(math.isfinite(x) for each in first for x in each)


# - Refusals ---------------------------------------------------------------------------


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    found, model = {}, net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, "wfbp")
    odds: tuple[Any, ...] = (math.nan, math.inf, -1.0, 1e-12, 1e20, "many", None)
    for odd in odds:
        found[str(odd)] = refused(lambda odd=odd: sync.weight(odd))
    found["two"] = refused(lambda: sync.weight(torch.ones(2)))  # type: ignore[arg-type]
    if dist.get_rank():
        sync.weight(3)
    loss(model, *batch(0, 0, 5)).backward()
    found["mixed"] = refused(opt.step)
    sync.remove()
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, "wfbp")
    loss(model, *batch(0, 0, 5)).backward()
    opt.step()
    found["late"] = refused(lambda: sync.weight(3))
    with sync.no_sync():
        found["quiet"] = refused(sync.skip)
    sync.remove()
    wrapped = gradtide.DistributedDataParallel(net())
    with wrapped.no_sync():
        found["quiet too"] = refused(wrapped.skip)
    wrapped.replica.remove()
    sync = gradtide.replicate(model, opt, "spd_kfac")
    found["kfac"] = refused(lambda: sync.weight(3))
    found["skip"] = refused(sync.skip)
    sync.remove()
    return found


def test_what_is_no_weight_is_refused_with_the_remedy() -> None:
    for found in run_ranks(2, refusals):
        for odd in ("nan", "inf", "-1.0", "1e-12", "1e+20", "many", "None"):
            assert found[odd].startswith("ValueError")
            assert "a number of tokens or samples" in found[odd]
        assert "a number of tokens or samples" in found["two"]
        assert "on every rank, or sync.skip()" in found["mixed"]
        assert "from the first step on" in found["late"]
        assert "leave the batch out there" in found["quiet"]
        assert found["quiet too"] == found["quiet"]
        assert "use a scheme without it" in found["kfac"]
        assert "use a scheme without it" in found["skip"]


class Breaks(torch.autograd.Function):
    """Has no backward, for the want of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise MemoryError


def broken_off() -> str:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, "wfbp")
    x, y = batch(0, 0, 5)
    with pytest.raises(MemoryError):
        (model[2](Breaks.apply(model[:2](x))) + model(x) - y).square().sum().backward()
    return refused(sync.skip)


def test_a_backward_that_broke_off_is_no_step_to_skip() -> None:
    for told in run_ranks(1, broken_off):
        assert "the last backward pass raised before its end" in told


def forgotten(steps: tuple[int, ...]) -> tuple[int, str]:
    """Rank 1 gives weights in some steps only of a round of 4."""
    rank, model = dist.get_rank(), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheme = "Scheme(Dense(), schedule=Schedule('step', every=4))"
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(8):
        if rank == 0 or step in steps:
            sync.weight(10)
        try:
            loss(model, *batch(step, rank, 5)).backward()
            opt.step()
        except RuntimeError as error:
            return step, str(error)
        opt.zero_grad()
    return 8, ""


@pytest.mark.parametrize("steps", [(0, 1, 2), (3,), (0, 1, 3)])
def test_a_weight_that_is_missing_in_a_round_is_told(steps: tuple[int, ...]) -> None:
    for step, told in run_ranks(2, forgotten, steps):
        assert step == 3
        assert "some ranks gave a weight for this step, and others none" in told


def in_rounds(weights: tuple[float, float]) -> list[list[float]]:
    """Weights in every step of the first two rounds, and none in the third."""
    rank, model = dist.get_rank(), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, ROUNDS)
    for step in range(9):
        if step < 6:
            sync.weight(weights[rank])
        loss(model, *batch(step, rank, 5)).backward()
        opt.step()
        opt.zero_grad()
    return params(model)


def test_sums_of_the_largest_weights_are_those_of_small_ones() -> None:
    for large, small in zip(
        run_ranks(2, in_rounds, (1e12, 2.5e11)),
        run_ranks(2, in_rounds, (4.0, 1.0)),
        strict=True,
    ):
        assert_close(large, small, 1e-12)


# - Saved runs -------------------------------------------------------------------------


def resumed(scheme: str) -> list[Any]:
    rank, saved, found = dist.get_rank(), {}, []
    for first, last in ((0, 9), (0, 4), (4, 9)):  # whole; to the middle; from there on
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, scheme)
        if first:
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
            sync.load_state_dict(saved["sync"])
        for step in range(first, last):
            sync.weight(count(step, rank) + step % 3)  # their sum varies
            loss(model, *batch(step, rank, 5)).backward()
            opt.step()
            opt.zero_grad()
        sync.flush()
        saved = {
            "model": {k: v.clone() for k, v in model.state_dict().items()},
            "opt": opt.state_dict(),
            "sync": sync.state_dict(),
        }
        found.append(params(model))
        sync.remove(end_round=False)
    return found


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.2)", ROUNDS, FRAGMENTS])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_went_on(scheme: str) -> None:
    for whole, _, later in run_ranks(SIZE, resumed, scheme):
        assert later == whole


# - The sum ----------------------------------------------------------------------------


def told(ranks: list[Weights]) -> None:
    rows = [rank.words() for rank in ranks]
    assert {len(row) for row in rows} == {COUNT}
    assert all(0 <= word < 2**16 for row in rows for word in row)
    for rank in ranks:
        rank.hear([sum(words) for words in zip(*rows, strict=True)])


@pytest.mark.parametrize("unit", [1e-6, 0.1, 1.0, 7.1, 4096.0, 1e12])
def test_equal_weights_of_any_size_are_the_unit(unit: float) -> None:
    ranks = [Weights(5) for _ in range(5)]
    for rank in ranks:
        rank.give(unit)
        rank.unit = unit
    told(ranks)
    assert {(rank.gain, rank.factor, rank.share) for rank in ranks} == {(1, 1, 1)}


@pytest.mark.parametrize("weights", [(None, None), (3.0, 5.0)])
def test_steps_that_are_left_out_make_a_rank_count_no_less(
    weights: tuple[float | None, float | None],
) -> None:
    ranks = [Weights(2), Weights(2)]
    for rank, weight, steps in zip(ranks, weights, (7, 2), strict=True):
        for _ in range(steps):
            if weight is not None:
                rank.give(weight)
            rank.begin()
            rank.ended()
            rank.stepped(eager=False)
        if weight is not None:
            rank.give(weight)
        rank.begin()
    ranks[1].skip()  # as the last step of a round it is one all the same
    ranks[1].leave_out(5)
    ranks[1].begin()
    for rank in ranks:
        rank.leave([0], 8)
    told(ranks)
    plain = weights[0] is None
    expected = [1.0, 1.0] if plain else [2 * w / 8 for w in (3.0, 5.0)]
    assert [rank.share for rank in ranks] == expected


def test_shares_are_those_of_the_sum() -> None:
    ranks = [Weights(3) for _ in range(3)]
    weights = (1e-6, 1e12, 0.3)
    for rank, weight in zip(ranks, weights, strict=True):
        rank.give(weight)
    told(ranks)
    for rank, weight in zip(ranks, weights, strict=True):
        assert rank.share == pytest.approx(3 * weight / sum(weights), rel=1e-10)
        assert rank.factor == pytest.approx(3 / sum(weights))
