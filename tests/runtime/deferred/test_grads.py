"""Deferred gradients answer, or are delivered: as under DDP, on any rank alone."""

from __future__ import annotations

import copy
import io
import itertools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Product
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.core.step import Stage

WFBP, DEAR = (
    f"Scheme(Dense(), BySize(0.004, 0.001, 1), {name})" for name in ("WFBP", "DEAR")
)
LOCAL = "Scheme(TopK(0.05), BySize(0.004, 0.001, 1), LOCAL)"
CURVED = "Scheme(Dense(), BySize(0.004, 0.001, 1), WFBP, KFAC())"
EARLY = "read or edited before step"  # of the warning


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(6, 12, generator=rng), torch.randint(0, 4, (6,), generator=rng)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Loop:
    """A training loop, under a scheme; `between` is done before each step."""

    def __init__(
        self,
        scheme: str,
        between: Callable[[Loop, int], Any] = lambda loop, step: None,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        make: Callable[[], nn.Sequential] = model,
    ) -> None:
        self.net = make()
        self.optimizer = optimizer(self.net.parameters())
        self.sync = gradtide.replicate(self.net, self.optimizer, scheme)
        self.between = between
        self.found: list[Any] = []
        self.held: list[bool] = []  # whether step() was deferred

    def backward(self, number: int) -> Tensor:
        x, y = data(number)
        loss = cross_entropy(self.net(x), y)
        loss.backward()
        return loss

    def params(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def step(self, step: int) -> None:
        self.backward(step)
        self.found.append(self.between(self, step))
        self.held.append(self.sync._training.step.held)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = 6) -> Loop:
        for step in range(steps):
            self.step(step)
        self.sync.remove()
        self.requests = [
            f"{r.bucket}:{r.request}" for r in self.sync.engine.telemetry.records
        ]
        return self


def quietly(scheme: str, *args: Any, **options: Any) -> Loop:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{EARLY}")
        return Loop(scheme, *args, **options).run()


def alike(loop: Loop, within: float = 0.0) -> None:
    """All ranks have the same parameters, and sent the same things."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (loop.params(), loop.requests))
    for params, requests in told:
        torch.testing.assert_close(params, told[0][0], rtol=0.0, atol=within)
        assert requests == told[0][1]


# - The product of habits --------------------------------------------------------------


def torch_clip(loop: Loop) -> Any:
    return nn.utils.clip_grad_norm_(loop.net.parameters(), 0.3).item()


def own_clip(loop: Loop) -> Any:
    return loop.sync.clip_grad_norm_(0.3).item()


CLIPS: tuple[Callable[[Loop], Any] | None, ...] = (None, torch_clip, own_clip)
ACCUMULATIONS = None, "no_sync", "backward"


@pytest.mark.parametrize("size", [2, 3])
def test_the_product_of_habits(size: int, product: Product) -> None:
    axes = CLIPS, ACCUMULATIONS, (sgd, adamw), (False, True)
    run_ranks(size, _product, product(*axes, other=size > 2))


def _product(cases: list[Any]) -> None:
    for clip, accumulate, optimizer, closure in cases:
        options = clip, accumulate, optimizer, closure
        eager = _trained(WFBP, *options)
        lazy = _trained(DEAR, *options)
        assert eager[1] == lazy[1] or clip, options  # losses
        for mine, other in zip(eager[0].params(), lazy[0].params(), strict=True):
            if clip is None:
                assert torch.equal(mine, other), options
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        alike(lazy[0])
        # From the third step on at full overlap, unless backward comes twice.
        assert all(lazy[0].held[3:]), options


def _trained(
    scheme: str, clip: Any, accumulate: Any, optimizer: Any, closure: bool
) -> tuple[Loop, list[float]]:
    loop = Loop(scheme, optimizer=optimizer)
    losses = []
    for step in range(5):

        def evaluate(step: int = step) -> Tensor:
            loop.optimizer.zero_grad()
            if accumulate is not None:
                quiet = loop.sync.no_sync if accumulate == "no_sync" else nullcontext
                with quiet():
                    loop.backward(10 * step)
            loss = loop.backward(10 * step + 1)
            if clip is not None:
                clip(loop)
            loop.held.append(loop.sync._training.step.held)
            return loss

        if closure:
            losses.append(loop.optimizer.step(evaluate).item())
        else:
            losses.append(evaluate().item())
            loop.optimizer.step()
    return loop.run(0), losses


# - One rank alone ---------------------------------------------------------------------


def largest(loop: Loop) -> float:
    return max(float(g.abs().max()) for g in loop.grads())


def edited(loop: Loop) -> None:
    loop.grads()[0].add_(0.0)


def sliced(loop: Loop) -> list[float]:
    return loop.grads()[1].view(-1)[:3].tolist()  # type: ignore[no-any-return]


def saved(loop: Loop) -> list[float]:
    file = io.BytesIO()
    torch.save(loop.grads(), file)
    back = torch.load(io.BytesIO(file.getvalue()))
    return [float(g.sum()) for g in (*back, *copy.deepcopy(loop.grads()))]


def as_arrays(loop: Loop) -> list[float]:
    return [float(g.numpy().sum()) for g in loop.grads()]


def norms(loop: Loop) -> list[float]:
    return [float(g.norm()) for g in loop.grads()]


def other_norms(loop: Loop) -> list[float]:
    return [float(g.norm(1)) + float(g.norm(torch.inf)) for g in loop.grads()]


TOUCHES = largest, edited, sliced, saved, as_arrays, norms, other_norms


@pytest.mark.product(each=12)
@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_alone_may_read_gradients(size: int) -> None:
    run_ranks(size, _alone)


def _alone() -> None:
    for clip, place in itertools.product(
        (None, torch_clip, own_clip), ("before", "after")
    ):
        if clip is own_clip and dist.get_world_size() > 2:
            continue  # with two ranks it was
        few = TOUCHES[: 2 if dist.get_world_size() > 2 or clip else None]
        for touch in few:

            def between(
                loop: Loop,
                step: int,
                touch: Any = touch,
                clip: Any = clip,
                place: str = place,
            ) -> Any:
                alone = dist.get_rank() == 1 and step % 3 != 2
                found = touch(loop) if alone and place == "before" else None
                norm = clip(loop) if clip else None
                found = touch(loop) if alone and place == "after" else found
                return found, norm

            eager, lazy = quietly(WFBP, between), quietly(DEAR, between)
            # Who has edited clips by the norm of what it has, the others by another.
            rounded = touch is edited and place == "before" and clip is not None
            alike(lazy, 1e-6 if rounded else 0.0)
            for mine, other in zip(eager.params(), lazy.params(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
            for mine, other in zip(eager.found, lazy.found, strict=True):
                if mine[0] is not None:
                    assert other[0] == pytest.approx(mine[0], rel=1e-5, abs=1e-7)
                assert other[1] == (mine[1] and pytest.approx(mine[1], rel=1e-5))
            wanted = dist.get_rank() != 1 or touch is norms
            assert all(lazy.held[4:]) == wanted, touch.__name__


@pytest.mark.parametrize("skip", [False, True])
def test_one_rank_alone_may_read_with_a_grad_scaler(skip: bool) -> None:
    run_ranks(2, _scaled, skip)


def _scaled(skip: bool) -> None:
    results = []
    for scheme, place in itertools.product((WFBP, DEAR), range(3)):
        loop = Loop(scheme)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = []

        def touch(
            at: int, loop: Loop = loop, found: Any = found, place: int = place
        ) -> None:
            if at == place and dist.get_rank() == 1:
                found.append(largest(loop))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{EARLY}")
            for step in range(6):
                x, y = data(step)
                loss = cross_entropy(loop.net(x), y)
                if skip and step in (2, 4) and dist.get_rank() == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                touch(0)
                scaler.unscale_(loop.optimizer)
                touch(1)
                torch_clip(loop)
                touch(2)
                before = scaler.get_scale()
                scaler.step(loop.optimizer)
                scaler.update()
                assert (scaler.get_scale() < before) == (skip and step in (2, 4))
                loop.optimizer.zero_grad()
        loop.run(0)
        alike(loop)
        results.append((loop, found))
    for (eager, seen), (lazy, told) in zip(results[:3], results[3:], strict=True):
        for mine, other in zip(eager.params(), lazy.params(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        assert told == pytest.approx(seen, rel=1e-5, nan_ok=True)


def normed() -> nn.Sequential:
    """Has buffers, which rank 0 sends in every training forward."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


def test_what_a_forward_sends_comes_behind_what_one_rank_has_read() -> None:
    run_ranks(2, _forwards)


def _forwards() -> None:
    def between(loop: Loop, step: int) -> Any:
        if step % 2 == dist.get_rank():
            largest(loop)
        loop.net(data(step)[0])  # sends buffers
        norm = torch_clip(loop)
        if step % 3 == 2:
            loop.backward(step + 100)
        return norm

    eager, lazy = (quietly(scheme, between, make=normed) for scheme in (WFBP, DEAR))
    alike(lazy)
    for mine, other in zip(eager.params(), lazy.params(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_kfac_sees_gradients_as_they_were_scaled() -> None:
    run_ranks(2, _curved)


def _curved() -> None:
    for clip in (torch_clip, own_clip, by_groups):
        schemes = (
            f"Scheme(Dense(), BySize(0.004, 0.001, 1), {name}, KFAC(kl_clip=0.001))"
            for name in ("WFBP", "DEAR")
        )
        eager, lazy = (
            Loop(scheme, lambda loop, _, clip=clip: clip(loop)).run()
            for scheme in schemes
        )
        assert all(lazy.held[1:])
        for mine, other in zip(eager.params(), lazy.params(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
        alike(lazy)
    loop = Loop("Scheme(Dense(), BySize(0.004, 0.001, 1), DEAR, KFAC())")
    loop.backward(0)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward(1)
    with pytest.raises(RuntimeError, match=r"K-FAC.*gather_gradients"):
        largest(loop)
    loop.sync.gather_gradients()
    assert largest(loop) > 0
    loop.sync.remove()


def test_early_reading_is_said_to_cost_once() -> None:
    run_ranks(2, _warned)


def _warned() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Loop(DEAR, lambda loop, _: largest(loop)).run()
        assert [EARLY in str(w.message) for w in caught] == [True]
        caught.clear()
        Loop(DEAR, lambda loop, _: torch_clip(loop)).run()
        assert not caught


# - By hand ----------------------------------------------------------------------------


def by_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.net.parameters(), 0.01)


def clamped(loop: Loop) -> None:
    for g in loop.grads():
        g.clamp_(-0.01, 0.01)


def replaced(loop: Loop) -> None:
    for p in loop.net.parameters():
        assert p.grad is not None
        p.grad = p.grad.sign()


def noisy(loop: Loop) -> None:
    for p in loop.net.parameters():
        assert p.grad is not None
        p.grad += 0.01
        p.grad.data.mul_(0.5)


def of_another_kind(loop: Loop) -> None:
    loop.net[0].weight.grad = torch.ones(32, 12)


def some_left_out(loop: Loop) -> None:
    loop.net[2].weight.grad = None
    loop.grads()[0].zero_()


def by_groups(loop: Loop) -> None:
    for module in (loop.net[0], loop.net[2], loop.net[4]):
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def scaled_by_hand(loop: Loop) -> None:
    total = torch.stack([g.norm() for g in loop.grads()]).norm()
    for p in loop.net.parameters():
        assert p.grad is not None
        p.grad.div_(total)
    torch._foreach_mul_(loop.grads(), 0.5)
    loop.found.append(float(nn.utils.get_total_norm(loop.grads())))


def edited_after_norms(loop: Loop) -> float:
    torch_clip(loop)
    loop.grads()[0].view(-1)[0] = 3.0  # by a view: seen by what it did to the memory
    return float(nn.utils.get_total_norm(loop.grads()))


def edited_below_autograd(loop: Loop) -> float:
    """As code that is not Python does: torch counts no such write."""
    torch_clip(loop)
    with torch._C.DisableTorchFunctionSubclass():
        loop.grads()[0].fill_(3.0)
    return float(nn.utils.get_total_norm(loop.grads()))


EDITS = (
    *(by_value, clamped, replaced, noisy, of_another_kind, some_left_out, by_groups),
    *(scaled_by_hand, edited_after_norms, edited_below_autograd),
)


def test_gradients_may_be_edited() -> None:
    run_ranks(2, _edits)


def _edits() -> None:
    for edit in EDITS:
        eager, lazy = (
            quietly(scheme, lambda loop, _, edit=edit: edit(loop))
            for scheme in (WFBP, DEAR)
        )
        for mine, other in zip(eager.params(), lazy.params(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        for was, told in zip(eager.found, lazy.found, strict=True):
            assert told == (was and pytest.approx(was, rel=1e-5)), edit.__name__
        alike(lazy)


def test_gradients_can_be_read_after_step_and_added_to() -> None:
    run_ranks(2, _after)


def _after() -> None:
    """A loop that reads gradients after step(), and clears them seldom, or to zero."""
    for mode in ("never", "seldom", "zeros", "read", "read by one"):
        results = []
        for scheme in (WFBP, DEAR):
            loop = Loop(scheme)
            for step in range(7):
                loop.backward(step)
                loop.optimizer.step()
                stages = {b.stage for b in loop.sync._training.placement.buckets}
                deferred = scheme is DEAR and step
                assert stages == {Stage.DUE if deferred else Stage.IDLE}
                if mode == "read" or (mode == "read by one" and dist.get_rank()):
                    loop.found.append(largest(loop))
                if mode == "zeros":
                    loop.optimizer.zero_grad(set_to_none=False)
                elif mode != "never" and (mode != "seldom" or step % 3 == 2):
                    loop.optimizer.zero_grad()
            results.append(loop.run(0))
        eager, lazy = results
        assert eager.found == lazy.found, mode
        assert all(map(torch.equal, eager.params(), lazy.params())), mode
        alike(lazy)


class Branches(nn.Module):
    """Uses one branch on even ranks, the other on odd ones, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Linear(12, 32)
        self.even, self.odd, self.never = (nn.Linear(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        head = self.even if dist.get_rank() % 2 == 0 else self.odd
        out: Tensor = head(torch.relu(self.body(x)))
        return out


def test_what_no_rank_uses_has_no_gradient() -> None:
    run_ranks(2, _unused)


def _unused() -> None:
    def between(loop: Loop, step: int) -> Any:
        if step > 2 and dist.get_rank():
            largest(loop)
        return own_clip(loop), torch_clip(loop)

    decaying = {"optimizer": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5)}
    loops = [quietly(s, between, make=Branches, **decaying) for s in (WFBP, DEAR)]
    for was, told in zip(*(loop.found for loop in loops), strict=True):
        assert told == pytest.approx(was, rel=1e-5)
    for mine, other in zip(*(loop.params() for loop in loops), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    alike(loops[1])
    untouched = Branches().never.weight
    assert torch.equal(loops[1].net.never.weight, untouched)


class Seldom(nn.Module):
    """Uses a head in the first steps alone; what is late of it arrives later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body, self.seldom = nn.Linear(12, 4), nn.Linear(12, 4)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out: Tensor = self.body(x)
        return out + 5 * self.seldom(x) if self.forwards <= 3 else out


@pytest.mark.parametrize("scheme", ["topk(0.2)", "topka2a(0.2)", "exdyna(0.2)"])
def test_what_arrives_of_what_no_rank_has_used_is_in_no_norm(scheme: str) -> None:
    def run() -> None:
        deferred = scheme.replace(")", ", schedule='dear')")
        loops = [quietly(s, own_clip, make=Seldom) for s in (scheme, deferred)]
        assert all(loops[1].held[2:])
        for was, told in zip(*(loop.found for loop in loops), strict=True):
            assert told == pytest.approx(was, rel=1e-5)
        alike(loops[1])

    def own_clip(loop: Loop, step: int) -> Any:
        return loop.sync.clip_grad_norm_(0.3).item()

    run_ranks(2, run)


class EveryOther(Seldom):
    """Uses a head in every other forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out: Tensor = self.body(x)
        return out + self.seldom(x) if self.forwards % 2 else out


def edited_after_own_clip(loop: Loop) -> list[float]:
    told = [own_clip(loop)]
    loop.net.seldom.weight.grad.mul_(3.0)  # type: ignore[union-attr]
    return [*told, float(nn.utils.get_total_norm(loop.grads()))]


def told_twice(loop: Loop) -> list[float]:
    return [torch_clip(loop), float(nn.utils.get_total_norm(loop.grads()))]


def unscaled(loop: Loop) -> float:
    """What a GradScaler says of an infinity that only the first backward has."""
    with torch.no_grad():
        loop.net.seldom.bias.grad[0] = math.inf  # type: ignore[index]
    loop.backward(7)
    grads, found = loop.grads(), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1))
    loop.optimizer.zero_grad()
    return float(found)


@pytest.mark.product
@pytest.mark.parametrize("do", [edited_after_own_clip, told_twice, unscaled])
def test_what_the_last_of_two_backwards_does_not_use_counts(
    do: Callable[[Loop], Any],
) -> None:
    def between(loop: Loop, step: int) -> Any:
        if do is not unscaled:
            loop.backward(step + 100)
        return do(loop)

    def run() -> None:
        loops = [quietly(s, between, make=EveryOther) for s in (WFBP, DEAR)]
        for was, told in zip(*(loop.found for loop in loops), strict=True):
            assert told == pytest.approx(was, rel=1e-5)
        for mine, other in zip(*(loop.params() for loop in loops), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        alike(loops[1])

    run_ranks(2, run)


# - Closures ---------------------------------------------------------------------------


class Twice(torch.optim.SGD):
    """Evaluates again from where it has stepped to."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure else None
        super().step()
        return closure() if closure else loss


@pytest.mark.product
@pytest.mark.parametrize("scheme", [DEAR, LOCAL, CURVED])
def test_a_closure_that_is_called_twice_is_refused(scheme: str) -> None:
    def run() -> None:
        loop = Loop(scheme, optimizer=lambda params: Twice(params, lr=0.1))
        with pytest.raises(RuntimeError, match=r"more than once.*'wfbp'"):
            loop.optimizer.step(lambda: loop.backward(0))

    run_ranks(2, run)


@pytest.mark.parametrize("scheme", [LOCAL, CURVED])
def test_a_closure_is_the_loop_without_one(scheme: str) -> None:
    def run() -> None:
        plain, closed = Loop(scheme), Loop(scheme)
        for step in range(4):
            plain.step(step)
            with torch.no_grad():
                loss = closed.optimizer.step(
                    lambda step=step: (  # type: ignore[misc]
                        closed.optimizer.zero_grad(),
                        closed.backward(step),
                    )[1]
                )
            assert loss.item() > 0
        for loop in (plain, closed):
            loop.run(0)
        assert all(map(torch.equal, plain.params(), closed.params()))

    run_ranks(2, run)


@pytest.mark.product
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_optimizer_see_gradients(when: str, closed: bool) -> None:
    run_ranks(2, _step_hooks, when, closed)


def _step_hooks(when: str, closed: bool) -> None:
    """Whenever they are registered; after the step, too."""
    found = {}
    for scheme in ("wfbp", DEAR):
        seen: list[float] = []
        net = model()
        weight: Any = net[0].weight
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def look(weight: Any, seen: list[float]) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if weight.grad is not None or not closed:  # a closure writes it later
                    seen.append(float(weight.grad.norm()))

            return hook

        def register(look: Callable[..., None], optimizer: Any = optimizer) -> None:
            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)

        if when == "before":
            register(look(weight, seen))
        sync = gradtide.replicate(net, optimizer, scheme)
        if when == "after":
            register(look(weight, seen))
        for step in range(6):
            x, y = data(step)

            def backward(net: Any = net, x: Any = x, y: Any = y) -> Tensor:
                loss = cross_entropy(net(x), y)
                loss.backward()
                return loss

            optimizer.zero_grad()
            if closed:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        sync.remove()
        found[scheme] = seen
        found[scheme + " weight"] = weight.detach().norm().tolist()
    assert found["wfbp weight"] == found[DEAR + " weight"]
    assert closed or found["wfbp"] == pytest.approx(found[DEAR])


def test_norms_of_what_is_scaled_by_as_much_as_a_type_holds() -> None:
    """A GradScaler that is left on doubles its scale, and nothing is infinite by it."""

    def norms(schedule: str, power: int) -> tuple[list[float], list[float]]:
        net = model()
        optimizer = sgd(net.parameters())
        sync = gradtide.replicate(net, optimizer, schedule)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
        found = []
        for step in range(4):
            x, y = data(step)
            scaler.scale(cross_entropy(net(x), y)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sync.flush()
        told = [x for p in net.parameters() for x in p.flatten().tolist()]
        sync.remove()
        return found, told

    def work() -> None:
        for schedule in ("wfbp", "dear", "dear(wire='bf16')"):
            usual = norms(schedule, 16)
            for power in (40, 70, 100):
                assert norms(schedule, power) == usual

    run_ranks(2, work)
