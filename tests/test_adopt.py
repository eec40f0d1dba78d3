"""A live replica goes on with another scheme: nothing is lost, nothing is different."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.collectives import COLLECTIVES, Dense
from gradtide.core.schedule import DEAR
from gradtide.core.step import Stage
from gradtide.fusion import Trace
from gradtide.scheme import Scheme
from tests.ranks import run_ranks

FUSIONS = ("PerTensor()", "BySize(0.004, ends=0.001)", "BySize(100.0)")
SCHEDULES = ("SEQUENTIAL", "WFBP", "DEAR")
SPARSE = [kind.__name__ for kind in COLLECTIVES if hasattr(kind, "density")]


class Branches(nn.Module):
    """Even ranks use one head, odd ranks the other; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 24))
        self.even, self.odd, self.never = (nn.Linear(24, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        head = self.odd if dist.get_rank() % 2 else self.even
        out: Tensor = head(self.body(x))
        return out


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 12, generator=rng)


def build(scheme: str) -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
    torch.manual_seed(0)
    model = Branches()
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    return model, opt, gradtide.replicate(model, opt, scheme)


def train(
    schemes: Sequence[str],
    accumulate: int = 1,
    max_norm: float | None = None,
    to_none: bool = True,
) -> Tensor:
    """The weights after two steps with each of the schemes."""
    model, opt, sync = build(schemes[0])
    for step in range(2 * len(schemes)):
        if step and step % 2 == 0:
            sync.adopt(schemes[step // 2])
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last else sync.no_sync():
                model(batch(10 * step + micro)).square().mean().backward()
        if max_norm is not None:
            sync.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad(set_to_none=to_none)
    sync.remove()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def dense(fusion: str, schedule: str) -> str:
    return f"Scheme(Dense(), fusion={fusion}, schedule={schedule})"


def everybodys(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dense_runs_do_not_change_by_a_bit(size: int) -> None:
    run_ranks(size, _dense_product)


def _dense_product() -> None:
    walk = list(itertools.product(FUSIONS, SCHEDULES))
    walk = [walk[4 * i % len(walk)] for i in range(len(walk))]  # both change at once
    if dist.get_world_size() != 2:
        walk = walk[::2]
    for case in [(1, 0.3, True), (2, None, False)][dist.get_world_size() != 2 :]:
        moving = train([dense(*place) for place in walk], *case)
        still = train([dense(FUSIONS[1], "WFBP")] * len(walk), *case)
        assert len({tuple(row) for row in everybodys(moving.tolist())}) == 1
        # Of two numbers the sum has one value; the norm is added up by buckets.
        if dist.get_world_size() <= 2 and case[1] is None:
            assert torch.equal(moving, still), case
        torch.testing.assert_close(moving, still, rtol=1e-4, atol=1e-6, msg=str(case))


class Slopes(nn.Module):
    """Its gradients are what it is given, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Part(n) for n in (700, 16, 333, 1200, 5, 64, 4096, 100)
        )

    def forward(self, step: int, used: int = 8) -> Tensor:
        rng = torch.Generator().manual_seed(50 * step + dist.get_rank())
        losses = [
            part(torch.randn(part.weight.numel(), generator=rng).double())
            for part in list(self.parts)[:used]  # type: ignore[arg-type]
        ]
        return torch.stack(losses).sum()


class Part(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_was_left_behind_is_kept_and_then_delivered(size: int) -> None:
    run_ranks(size, _conserved)


def _conserved() -> None:
    places = itertools.cycle(itertools.product(FUSIONS, SCHEDULES))
    kinds = [f"{kind}(0.05)" for kind in SPARSE]
    mixed = [kind for one in kinds for kind in (one, one, "Dense()")]
    half = len(mixed) // 6 * 3
    walks = [mixed[:half], mixed[half:]]
    size = dist.get_world_size()
    for walk in walks if size == 2 else walks[size // 3 : size // 3 + 1]:
        _walk([f"Scheme({kind}, {f}, {s})" for kind, (f, s) in zip(walk, places)])  # noqa: B905


def _walk(schemes: list[str]) -> None:
    model = Slopes()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gradtide.replicate(model, opt, schemes[0])
    given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    step, sparse_left = 0, 0.0
    for scheme in schemes:
        sync.adopt(scheme)
        _check_sum(model, sync, given)  # before and after anything has travelled
        for _ in range(3):
            # In the first step of each scheme nobody uses some parameters: what the
            # scheme before left of them has to arrive nevertheless.
            used = 5 if step % 3 == 0 else 8
            model(step, used).backward()
            own = [(n, p) for n, p in model.named_parameters()][:used]
            for name, slope in zip(
                (n for n, _ in own), _slopes(model, step), strict=False
            ):
                given[name] += slope
            opt.step()
            opt.zero_grad()
            step += 1
        left = _check_sum(model, sync, given)
        if "Dense" in scheme:
            assert left == 0.0, scheme
        else:
            sparse_left = max(sparse_left, left)
    if dist.get_world_size() > 1:
        assert sparse_left > 1.0  # or this shows nothing
    sync.remove()


def _slopes(model: Slopes, step: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(50 * step + dist.get_rank())
    return [
        torch.randn(part.weight.numel(), generator=rng).double()  # type: ignore[operator, union-attr]
        for part in model.parts
    ]


def _check_sum(model: nn.Module, sync: gradtide.Replica, given: Any) -> float:
    """All that was given is in the weights or in residuals; returns how much is."""
    saved = sync.state_dict()
    remainders = saved[f"rank{dist.get_rank()}"]["remainders"]
    total = 0.0
    for name, p in model.named_parameters():
        left = remainders.get(name, torch.zeros_like(p)).clone()
        everything = given[name].clone()
        dist.all_reduce(left)
        dist.all_reduce(everything)
        arrived = -p.detach() * dist.get_world_size()
        torch.testing.assert_close(arrived + left, everything, msg=name)
        total += float(left.abs().sum())
    return total


def test_it_begins_with_dear_only_after_a_step_that_is_recorded() -> None:
    run_ranks(2, _deferring)


def _deferring() -> None:
    model, opt, sync = build(dense(FUSIONS[1], "WFBP"))

    def changed(step: int) -> bool:
        """Whether step() itself changed the parameters."""
        model(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        # Whoever reads a parameter that is due has it updated.
        return all(b.stage is not Stage.DUE for b in sync._training.placement.buckets)

    assert all([changed(0), changed(1)])
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    sync.adopt(dense(FUSIONS[0], "DEAR"))
    assert changed(2)
    assert not changed(3)
    # Every module waits for its own bucket, not all for all of them.
    reads = sync._training.placement.reads
    assert len(reads[model.body[0]]) == 2  # type: ignore[index, operator]
    sync.adopt(dense(FUSIONS[1], "SEQUENTIAL"))
    assert changed(4)
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    sync.adopt(dense(FUSIONS[1], "DEAR"))  # the modules are known by now
    assert not changed(5)
    sync.remove()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_buckets_are_cut_anew_in_the_same_memory() -> None:
    run_ranks(2, _in_place)


def _in_place() -> None:
    model, opt, sync = build("Scheme(TopK(0.05), PerTensor())")
    for step in range(2):
        model(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    first = sync._training.placement.buckets[0].payload.flat
    sync.adopt("Scheme(TopK(0.05), BySize(100.0))")
    (whole,) = sync._training.placement.buckets
    assert whole.payload.flat.data_ptr() == first.data_ptr()
    sync.remove()


def test_what_algorithms_remember_of_elements_and_steps_comes_along() -> None:
    run_ranks(2, _remembered)


def _remembered() -> None:
    still = "Scheme(MomentumCorrection(Dense()), PerTensor())"
    walk = [f"Scheme(MomentumCorrection(Dense()), {fusion})" for fusion in FUSIONS]
    assert torch.equal(train(walk), train([still] * len(walk)))

    model, opt, sync = build("Scheme(Warmup(TopK(0.1), 4), PerTensor())")
    for step in range(5):
        model(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    sync.adopt("Scheme(Warmup(TopK(0.1), 4), BySize(0.004, ends=0.001))")
    for bucket in sync._training.placement.buckets:
        assert int(bucket.payload.state["warmup.step"]) == 5
        if len(bucket.slots) > 1:  # it is a new one
            assert set(bucket.payload.state) == {"warmup.step"}
    sync.adopt("Scheme(TopK(0.1))")
    assert not any(bucket.payload.state for bucket in sync._training.placement.buckets)
    sync.remove()


def test_a_state_that_is_saved_right_after_holds_what_is_owed() -> None:
    run_ranks(2, _saved)


def _saved() -> None:
    def go(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    for switch in ("wfbp", "Scheme(OkTopk(0.05), PerTensor(), DEAR)"):
        model, opt, sync = build("Scheme(TopK(0.05), PerTensor())")
        go(model, opt, range(3))
        sync.adopt(switch)
        saved = [_copied(each.state_dict()) for each in (model, opt, sync)]
        go(model, opt, range(3, 6))
        sync.flush()
        other, other_opt, fresh = build(switch)
        for to, state in zip((other, other_opt, fresh), saved, strict=True):
            to.load_state_dict(state)  # type: ignore[attr-defined]
        go(other, other_opt, range(3, 6))
        fresh.flush()
        assert all(map(torch.equal, model.parameters(), other.parameters())), switch


def test_a_resumed_run_defers_by_modules_again() -> None:
    run_ranks(2, _resumed)


def _resumed() -> None:
    scheme = "Scheme(OkTopk(0.05), PerTensor(), DEAR)"

    def go(run: Any, steps: range) -> None:
        model, opt, _ = run
        for step in steps:
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    one = build(scheme)
    go(one, range(4))
    for steps in (1, 3):  # saved again when the modules are not known yet
        saved = [_copied(part.state_dict()) for part in one]
        go(one, range(4, 4 + steps))
        one[2].flush()
        other = build(scheme)
        for part, state in zip(other, saved, strict=True):
            part.load_state_dict(state)
        go(other, range(4, 4 + steps))
        other[2].flush()
        pairs = zip(one[0].parameters(), other[0].parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
        one = other
    assert len(one[2]._training.placement.reads[one[0].body[0]]) == 2  # type: ignore[index, operator]


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state


def test_gradients_that_nobody_zeroes_stay() -> None:
    run_ranks(2, _kept_gradients)


def _kept_gradients() -> None:
    model, opt, sync = build("Scheme(TopK(0.05), PerTensor())")
    # A bucket that was delivered whole, beside one that was not: they are joined.
    sync._training.placement.buckets[0].collective = Dense()
    model(batch(0)).square().mean().backward()
    opt.step()
    params = dict(model.named_parameters())
    before = {n: p.grad.clone() for n, p in params.items() if p.grad is not None}
    sync.adopt("Scheme(TopK(0.05), BySize(100.0))")
    for name, p in model.named_parameters():
        if name in before:
            assert p.grad is not None
            assert torch.equal(p.grad, before[name]), name
    left = sync._training.placement.buckets[0]
    views = {s.name: v for s, v in zip(left.slots, left.views, strict=True)}
    assert not views["never.bias"].any()
    sync.remove()


@pytest.mark.product
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wrong_moments_are_refused(schedule: str) -> None:
    run_ranks(2, _moments, schedule)


def _moments(schedule: str) -> None:
    model, opt, sync = build(dense(FUSIONS[1], schedule))
    other = dense(FUSIONS[0], "WFBP")

    def refused(words: str) -> None:
        with pytest.raises(RuntimeError, match=words):
            sync.adopt(other)

    for step in range(3):
        output = model(batch(step))
        if step == 1:
            output.register_hook(lambda _: refused("during a backward"))
        with sync.no_sync():
            refused("inside no_sync")
        output.square().mean().backward()
        refused("between backward and step")
        opt.step()
        sync.adopt(dense(FUSIONS[step % 2], schedule))
        opt.zero_grad()
    model(batch(3)).square().mean().backward()
    opt.zero_grad()  # a step that is skipped
    if schedule != "DEAR":  # where the means are still on their way
        sync.adopt(other)
    sync.remove()


STEPWISE = "Scheme({}, BySize(0.004, ends=0.001), {}{})"
LOCALS = {
    "steps": ("TopK(0.05)", "LOCAL", ""),
    "partitioned": ("PartitionedTopK(0.05, Dynamic())", "LOCAL", ""),
    "rounds": ("Dense()", "Schedule('step', every=3)", ""),
    "diloco": ("Dense()", "Schedule('step', every=3)", ", outer=OuterSGD()"),
    "sparseloco": (
        "TiledTopK(0.05)",
        "Schedule('step', every=3, decay=0.95)",
        "",
    ),
}


@pytest.mark.product(each=12)
@pytest.mark.parametrize("kind", LOCALS)
@pytest.mark.parametrize("before", ["wfbp", "dear", "TopK(1.0)"])
def test_steps_begin_where_gradients_leave_nothing(kind: str, before: str) -> None:
    run_ranks(2, _steps_begin, kind, before)


def _steps_begin(kind: str, before: str) -> None:
    """As after a warm-up that is dense."""

    def go(start: str, adopted: str) -> tuple[list[Tensor], gradtide.Replica]:
        torch.manual_seed(0)
        model = Branches()
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        sync = gradtide.replicate(model, opt, start)
        for step in range(10):
            if step == 4 and adopted:
                sync.adopt(adopted)
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        sync.end_round()
        return [p.detach().clone() for p in model.parameters()], sync

    collective, schedule, outer = LOCALS[kind]
    warm = STEPWISE.format(f"Warmup({collective}, 4)", schedule, outer)
    start = before if "(" not in before else f"Scheme({before})"
    expected, one = go(warm, "")
    got, other = go(start, STEPWISE.format(collective, schedule, outer))
    assert all(map(torch.equal, got, expected))
    with pytest.raises(ValueError, match="optimizer's state of its own"):
        other.adopt("wfbp")
    one.remove()
    other.remove()


def test_an_optimizer_that_is_found_later_expects_own_gradients_too() -> None:
    """What it remembers of squares is as large as where it was passed."""
    run_ranks(2, _found_later)


def _found_later() -> None:
    found = []
    for passed in (True, False):
        torch.manual_seed(0)
        model = Branches()
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        sync = gradtide.replicate(model, opt if passed else None, "wfbp")
        for step in range(10):
            if step == 4:
                sync.adopt("Scheme(TopK(0.05), PerTensor(), LOCAL)")
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        found.append(dict(opt.state[model.body[0].weight])["exp_avg_sq"].clone())
        sync.remove()
    # One step more was of averaged gradients where it had to be found.
    assert 0.8 < float(found[1].norm() / found[0].norm()) < 1.25


def test_what_gradients_have_left_is_no_step() -> None:
    run_ranks(2, _left)


def _left() -> None:
    model, opt, sync = build("Scheme(TopK(0.05))")
    for step in range(8):
        if step == 4:
            with pytest.raises(ValueError, match="no step; call adopt"):
                sync.adopt("Scheme(TopK(0.05), schedule=LOCAL)")
            sync.adopt("wfbp")
        if step == 6:
            sync.adopt("Scheme(TopK(0.05), schedule=LOCAL)")
        model(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    sync.remove()


@dataclass(frozen=True)
class Loses:
    def __call__(self, trace: Trace, cost: object) -> list[slice]:
        return [slice(0, 1)]


def test_what_cannot_be_adopted_changes_nothing() -> None:
    run_ranks(2, _refused)


def _refused() -> None:
    model, opt, sync = build("wfbp")
    frozen = nn.Linear(12, 4)
    left_out = torch.optim.SGD([frozen.weight], lr=0.1)
    second = gradtide.replicate(frozen, left_out, "wfbp")
    rank = dist.get_rank()
    for replica, scheme, words in (
        (sync, "nonsense", "is not known"),
        (sync, ("wfbp", "dear")[rank], "differs between ranks"),
        (sync, ("wfbp", "nonsense")[rank], "is not known|rank 1 cannot take part"),
        (sync, Scheme(Dense(), Loses()), "cover all"),
        (second, Scheme(schedule=DEAR), "bias requires a gradient"),
    ):
        before = replica.scheme
        with pytest.raises(ValueError, match=words):
            replica.adopt(scheme)
        assert replica.scheme == before
    for step in range(2):
        model(batch(step)).square().mean().backward()
        opt.step()
    sync.remove()
    second.remove()
