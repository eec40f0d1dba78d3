"""A step takes exchanged gradients, or says so; and `exchange()` makes them that."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Product
from tests.ranks import TIMEOUT, run_ranks
from torch import Tensor, nn

import gradtide

EXACT = ["wfbp", "dear", "sequential"]
SCHEMES = [
    *EXACT,
    "topk(0.2)",
    "oktopk(0.2, schedule='dear')",
    "powersgd(2)",
    "wfbp(wire='e3m0')",
    "exdyna(0.1, schedule='local')",
    "diloco(every=2)",
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 2))


def loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    value: Tensor = model(torch.randn(3, 6)).square().mean()
    return value


def by_hand(model: nn.Module, step: int) -> None:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss(model, step), params)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def bits(model: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha1(flat.numpy().tobytes()).hexdigest()[:10]


def finish(model: nn.Module, sync: gradtide.Replica) -> str:
    sync.end_round()
    sync.flush()
    return bits(model)


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings about such steps."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in seen if "no exchange has seen" in str(w.message)]


# - exchange() -------------------------------------------------------------------------


def train(scheme: str, optimizer: str, how: str) -> str:
    """Train; returns the parameters' bits."""
    model = mlp()
    opt = OPTIMIZERS[optimizer](model.parameters())
    sync = gradtide.replicate(model, opt, scheme, check_every=1)
    with told() as said:
        for step in range(4):
            if how == "hand":
                by_hand(model, step)
                sync.exchange()
            elif how == "backward":
                loss(model, step).backward()
            else:
                with sync.no_sync():
                    loss(model, 2 * step).backward()
                    if how == "no_sync":
                        loss(model, 2 * step + 1).backward()
                if how == "no_sync":
                    sync.exchange()
                else:
                    loss(model, 2 * step + 1).backward()
            if step % 2:
                sync.clip_grad_norm_(0.1)
            opt.step()
            opt.zero_grad(set_to_none=step % 3 > 0)
    assert not said
    result = finish(model, sync)
    sync.remove()
    return result


@pytest.mark.product(each=6)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchange_does_what_the_end_of_a_backward_does(
    size: int, product: Product
) -> None:
    every = product(SCHEMES, OPTIMIZERS, (1, 2, 3))
    cases = [(scheme, optimizer) for scheme, optimizer, p in every if p == size]

    def run() -> list[Any]:
        found = []
        for scheme, optimizer in cases:
            whole = train(scheme, optimizer, "backward")
            windows = train(scheme, optimizer, "windows")
            hand = train(scheme, optimizer, "hand")
            quiet = train(scheme, optimizer, "no_sync")
            found.append((scheme, optimizer, whole, hand, windows, quiet))
        return found

    ranks = run_ranks(size, run)
    for scheme, optimizer, whole, hand, windows, quiet in ranks[0]:
        assert hand == whole, (scheme, optimizer)
        assert quiet == windows, (scheme, optimizer)
    assert all(rank == ranks[0] for rank in ranks)


def test_exchange_of_a_wrapper_with_a_scaler_and_on_ranks_without_gradients() -> None:
    def run() -> Any:
        model = mlp()
        ddp = gradtide.DistributedDataParallel(model, scheme="dear")
        opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            with ddp.no_sync():
                scaler.scale(loss(ddp, step)).backward()
            if step == 2 and dist.get_rank() == 1:
                opt.zero_grad()  # it has nothing to add
            ddp.exchange()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        ddp.replica.flush()
        first = bits(model)

        same = mlp()
        opt = torch.optim.SGD(same.parameters(), lr=0.05)
        for step in range(4):
            loss(same, step).backward()
            for p in same.parameters():
                assert p.grad is not None
                if step == 2 and dist.get_rank() == 1:
                    p.grad.zero_()
                dist.all_reduce(p.grad)
                p.grad /= 2
            opt.step()
            opt.zero_grad()
        next(model.parameters()).register_hook(lambda _: ddp.exchange())
        with pytest.raises(RuntimeError, match="during a backward pass"):
            loss(ddp, 9).backward()
        return first, bits(same)

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ranks[0][1]


# - Steps that take others -------------------------------------------------------------


def steps_until_told(scheme: str, kind: str) -> tuple[int, list[str], str]:
    """Train by gradients that are not exchanged; returns the steps that went on."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme)
    done, text = 0, ""
    with told() as said:
        try:
            for step in range(6):
                odd = kind in ("hand", "no_sync") or step == 3
                if not odd:
                    loss(model, step).backward()
                elif "hand" in kind:
                    by_hand(model, step)
                elif kind == "behind":  # of a window
                    loss(model, step).backward()
                    with sync.no_sync():
                        loss(model, step + 1).backward()
                else:
                    with sync.no_sync():
                        loss(model, step).backward()
                        if "outside" not in kind:
                            opt.step()
                    if "outside" not in kind:
                        opt.zero_grad()
                        done += 1
                        continue
                opt.step()
                opt.zero_grad()
                done += 1
        except RuntimeError as error:
            text = str(error)
    if not text:
        text = finish(model, sync)
    return done, said, text


KINDS = ["hand", "no_sync", "last by hand", "last", "last, outside", "behind"]


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.2)"])
def test_ranks_that_part_are_told_in_that_step(scheme: str) -> None:
    def run() -> list[Any]:
        return [steps_until_told(scheme, kind) for kind in KINDS]

    for rank in run_ranks(2, run):
        for kind, (done, said, text) in zip(KINDS, rank, strict=True):
            assert done == (0 if kind in ("hand", "no_sync") else 3), kind
            assert text.startswith("0.weight differs between ranks 0 and 1"), kind
            assert "sync.exchange()" in text
            assert len(said) == 1, kind
            assert "a gradient of 0.weight" in said[0]


@pytest.mark.parametrize("scheme", ["diloco(every=4)", "exdyna(0.1, schedule='local')"])
def test_where_steps_are_exchanged_any_gradient_will_do(scheme: str) -> None:
    def run() -> list[Any]:
        return [steps_until_told(scheme, kind) for kind in KINDS]

    ranks = run_ranks(2, run)
    assert ranks[0] == ranks[1]  # the bits, too
    for done, said, _ in ranks[0]:
        assert done == 6
        assert not said


def test_programs_that_average_by_themselves_go_on() -> None:
    def run() -> Any:
        found = []
        for check_every in (2, 0):
            model = mlp()
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync = gradtide.replicate(model, opt, "dear", check_every=check_every)
            with told() as said:
                for step in range(7):
                    by_hand(model, step)
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                    opt.step()
                    opt.zero_grad()
            found.append((len(said), bits(model)))
            if check_every == 0:  # ranks may differ then
                by_hand(model, 9)
                opt.step()
            sync.remove()
        return found

    first, second = run_ranks(2, run)
    assert first == second
    assert [count for count, _ in first] == [1, 1]


@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.2)"])
def test_ordinary_programs_hear_nothing(scheme: str) -> None:
    def run() -> int:
        with told() as said:
            one_optimizer()
            if scheme != "dear":
                two_optimizers()
        return len(said)

    def one_optimizer() -> None:
        model = mlp()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, scheme)
        opt.step()  # as some schedulers ask for
        for p in model.parameters():  # as torch.distributed.checkpoint does
            p.grad = torch.zeros_like(p)
        opt.step()
        for step in range(8):
            opt.zero_grad(set_to_none=step % 2 > 0)
            if step == 3:  # its gradients are not taken
                with sync.no_sync():
                    loss(model, step).backward()
                opt.zero_grad(set_to_none=False)
                opt.step()
            loss(model, step).backward()
            if step == 5:
                for p in model.parameters():
                    p.grad = p.grad / 2
            opt.step()
            if step == 6:  # again, by the same ones
                opt.step()
        sync.remove()

    def two_optimizers() -> None:
        model = mlp()
        parts = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model[::2]]
        sync = gradtide.replicate(model, None, scheme)
        for step in range(3):
            loss(model, step).backward()
            for p in model.parameters():
                p.grad = p.grad.clone()
            for opt in parts:
                opt.step()
                opt.zero_grad()
        sync.remove()

    assert run_ranks(2, run) == [0, 0]
    assert run_ranks(1, lambda: steps_until_told(scheme, "hand")[:2]) == [(6, [])]


def test_gradients_that_a_closure_writes_by_hand_are_seen() -> None:
    def run() -> list[str]:
        found = []
        for scheme in ("wfbp", "dear"):
            model = mlp()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            gradtide.replicate(model, opt, scheme)

            def closure(model: nn.Module = model) -> Tensor:
                by_hand(model, 0)
                return torch.zeros(())

            with told() as said, pytest.raises(RuntimeError, match="no exchange has"):
                opt.step(closure)
            found += said
        return found

    assert [len(said) for said in run_ranks(2, run)] == [2, 2]


def test_what_a_closure_is_about_to_clear_is_not_taken() -> None:
    """Gradients that an earlier scheme has left, in memory of its own."""

    def run() -> int:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, "dear")

        def closure() -> Tensor:
            opt.zero_grad()
            value = loss(model, 0)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with told() as said:
            for step in range(6):
                if step == 3:
                    sync.adopt("wfbp")
                opt.step(closure)
        sync.remove()
        return len(said)

    assert run_ranks(2, run) == [0, 0]


@pytest.mark.parametrize("buffers", [False, True])
def test_nobody_waits_where_one_rank_alone_makes_such_a_step(buffers: bool) -> None:
    def run() -> tuple[int, int, str]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8) if buffers else nn.Tanh()
        model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, "wfbp")
        text = ""
        with told() as said:
            try:
                for step in range(5):
                    alone = step == 3 and dist.get_rank() == 0
                    with sync.no_sync() if alone else nullcontext():
                        loss(model, step).backward()
                    opt.step()
                    opt.zero_grad()
            except RuntimeError as error:
                text = str(error)
        return step, len(said), text

    def end() -> Any:
        result = run()
        dist.destroy_process_group()
        dist.init_process_group(  # for what ends a rank of the tests
            "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        return result

    for rank, (step, count, text) in enumerate(run_ranks(2, end, limit=TIMEOUT)):
        assert (step, count) == (3, rank == 0)
        assert "All ranks have to make the same calls" in text


DROPPED = ["dear", "dear(wire='e3m0')", "topka2a(0.5, schedule='dear')"]


@pytest.mark.parametrize("call", ["state_dict", "adopt", "refresh", "attach"])
@pytest.mark.parametrize("scheme", DROPPED)
def test_gradients_that_were_dropped_hold_nothing_up(scheme: str, call: str) -> None:
    """As those that a GAN's generator leaves in its critic."""

    def run(scheme: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        sync = gradtide.replicate(model, optimizer, scheme)
        generator = torch.Generator().manual_seed(dist.get_rank())
        calls = {
            "state_dict": sync.state_dict,
            "adopt": lambda: sync.adopt(scheme),
            "refresh": sync.refresh,
            "attach": lambda: sync.attach(optimizer),
        }

        def backward() -> None:
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            model(x).square().mean().backward()

        for step in range(6):
            backward()
            optimizer.step()
            optimizer.zero_grad()
            backward()
            held = "between backward and step|after a backward whose means"
            with pytest.raises(RuntimeError, match=held):
                calls[call]()
            optimizer.zero_grad(set_to_none=bool(step % 2))
            if call == "state_dict" and scheme != "dear":  # a residual is to be saved
                with pytest.raises(RuntimeError, match=held):
                    calls[call]()
                sync.gather_gradients()
                assert all(p.grad is None for p in model.parameters())
            calls[call]()
        sync.flush()
        return [p.sum().item() for p in model.parameters()]

    found = run_ranks(2, run, scheme)
    assert found[0] == found[1]
    if scheme == "dear" and call != "state_dict":
        assert found[0] == pytest.approx(run_ranks(2, run, "wfbp")[0], rel=1e-12)


@pytest.mark.parametrize("scheme", DROPPED)
def test_what_is_saved_then_is_what_a_run_goes_on_from(scheme: str) -> None:
    def run(scheme: str) -> bool:
        def begin() -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
            torch.manual_seed(0)
            model = nn.Linear(6, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            return model, optimizer, gradtide.replicate(model, optimizer, scheme)

        def train(
            model: nn.Module, optimizer: torch.optim.Optimizer, seed: int
        ) -> None:
            generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
            for _ in range(3):
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer, sync = begin()
        train(model, optimizer, 1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.zero_grad()
        if scheme != "dear":
            sync.gather_gradients()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        state = copy.deepcopy(sync.state_dict())
        train(model, optimizer, 2)
        sync.flush()
        sync.remove()
        other, optimizer, again = begin()
        other.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        again.load_state_dict(state)
        train(other, optimizer, 2)
        again.flush()
        return torch.equal(model.weight, other.weight)

    assert run_ranks(2, run, scheme) == [True, True]


@pytest.mark.parametrize("call", ["adopt", "refresh", "attach"])
def test_gradients_can_be_read_after_calls_between_steps(call: str) -> None:
    def run(scheme: str) -> list[float]:
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, optimizer, scheme)
        for step in range(5):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(3, 6).double()).square().mean().backward()
            optimizer.step()
        calls: dict[str, Callable[[], None]] = {
            "adopt": lambda: sync.adopt(scheme),
            "refresh": sync.refresh,
            "attach": lambda: sync.attach(optimizer),
        }
        calls[call]()
        grads = [p.grad for p in model.parameters()]
        return [0.0 if g is None else g.sum().item() for g in grads]

    found, expected = run_ranks(2, run, "dear"), run_ranks(2, run, "wfbp")
    assert found[0] == found[1]
    assert any(expected[0])
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
