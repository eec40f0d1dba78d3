"""Misuse is refused by name, on every rank, and no rank hangs."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.core.ops import AllReduce
from tests.ranks import TIMEOUT, run_ranks

pytestmark = pytest.mark.waits

DEAR = "Scheme(Dense(), fusion=BySize(0.004, 0.001, 1), schedule=DEAR)"


def net(width: int = 8, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width, **options), nn.ReLU(), nn.Linear(width, 2))


def attach(model: nn.Module, scheme: str = "wfbp", **options: Any) -> gradtide.Replica:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return gradtide.replicate(model, opt, scheme, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 4)).square().sum().backward()


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


# - Agreement ------------------------------------------------------------------------


def test_whatever_one_rank_raises_is_told_on_all() -> None:
    run_ranks(2, _raises_alone)


class Odd(torch.optim.SGD):
    """Fails where it is looked at, in a way that nobody foresaw."""

    def __init__(self, params: Any, error: Exception | None) -> None:
        super().__init__(params, lr=0.1)
        self._error = error

    @property
    def param_groups(self) -> Any:
        if getattr(self, "_error", None) is not None:
            raise self._error  # type: ignore[misc]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._groups = groups


def _raises_alone() -> None:
    rank = dist.get_rank()
    for error in (AttributeError("odd"), RuntimeError(), MemoryError("none left")):
        model = net()
        opt = Odd(model.parameters(), error if rank == 1 else None)
        words = [f"rank 1 cannot take part: {type(error).__name__}", ""][rank]
        with pytest.raises(type(error) if rank else RuntimeError) as caught:
            gradtide.replicate(model, opt)
        assert words in str(caught.value)
    sync = attach(net())  # nothing is left of what was refused
    backward(sync.model)
    assert sync.num_exchanges == 1


# - After remove() -------------------------------------------------------------------

AFTER = {
    "attach": lambda sync: sync.attach(sync.optimizer),
    "no_sync": lambda sync: sync.no_sync().__enter__(),
    "join": lambda sync: sync.join().__enter__(),
    "send_buffers": lambda sync: sync.send_buffers(),
    "clip_grad_norm_": lambda sync: sync.clip_grad_norm_(1.0),
    "gather_gradients": lambda sync: sync.gather_gradients(),
    "flush": lambda sync: sync.flush(),
    "end_round": lambda sync: sync.end_round(),
    "shared_parameters": lambda sync: sync.shared_parameters().__enter__(),
    "adopt": lambda sync: sync.adopt("dear"),
    "use_comm_hook": lambda sync: sync.use_comm_hook(None, lambda *_: None),
    "state_dict": lambda sync: sync.state_dict(),
    "load_state_dict": lambda sync: sync.load_state_dict({}),
    "a request of the engine's": lambda sync: sync.engine.ask(
        "late", AllReduce(torch.ones(1))
    ),
}


def test_calls_after_remove_are_refused_at_once() -> None:
    run_ranks(2, _after_remove)


def _after_remove() -> None:
    for scheme in ("wfbp", "diloco(every=4)"):
        model = nn.Sequential(net(), nn.BatchNorm1d(2))
        sync = attach(model, scheme)
        backward(model)
        sync.optimizer.step()
        steps = sync.metrics()["step"]
        sync.remove()
        for call in AFTER.values():
            refused(partial(call, sync), "sync.remove()", "replicate() again")
        sync.remove()  # once more does nothing
        assert sync.metrics()["step"] == steps
        backward(model)  # a plain module
        sync.optimizer.step()


# - At construction --------------------------------------------------------------------


def test_no_process_group() -> None:
    refused(lambda: attach(net()), "init_process_group", "torchrun")


def test_refused_at_construction() -> None:
    run_ranks(2, _construction)


def _construction() -> None:
    rank = dist.get_rank()
    refused(lambda: attach(net(8 + rank)), "0.weight", "(8, 4)", "(9, 4)", "rank 1")
    refused(lambda: attach(net().to([torch.float32, torch.float64][rank])), "0.weight")
    refused(lambda: attach(net(), ["wfbp", "dear"][rank]), "scheme differs", "rank 1")
    refused(
        lambda: attach(nn.Sequential(net(), *[nn.ReLU(), nn.Linear(2, 2)][: 2 * rank])),
        "parameter 2.weight",
        "not there",
    )
    refused(lambda: attach(net(), ["wfbp", "wfbq"][rank]), "'wfbq'")
    refused(lambda: attach(net(), "Dense(wire='int3')"), "'bf16'", "'fp16'")
    refused(lambda: attach(net(), buffers="none"), "'broadcast'", "'local'")
    refused(lambda: attach(DistributedDataParallel(net())), "plain module")
    refused(lambda: attach(net().requires_grad_(False)), "requires a gradient")
    refused(
        lambda: attach(nn.Sequential(nn.Embedding(4, 2, sparse=True))), "sparse=False"
    )
    refused(lambda: attach(nn.Sequential(nn.LazyLinear(2))), "lazy")
    refused(
        lambda: gradtide.replicate(net(), torch.optim.SGD(net().parameters(), 0.1)),
        "none of the model's parameters",
    )
    model = net()
    some = torch.optim.SGD(list(model.parameters())[:2], 0.1)
    refused(lambda: gradtide.replicate(model, some, "dear"), "2.weight", "'wfbp'")
    refused(
        lambda: gradtide.replicate(model, some, "topk(schedule='local')"), "2.weight"
    )
    whole = torch.optim.LBFGS(model.parameters())
    refused(lambda: gradtide.replicate(model, whole, "dear"), "LBFGS", "'wfbp'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    shards = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    refused(lambda: gradtide.replicate(model, shards, "dear"), "inside its step")
    refused(
        lambda: gradtide.replicate(model, shards, "topk(schedule='local')"),
        "inside its step",
    )
    gradtide.replicate(model, shards, "wfbp").remove()
    sync = attach(model)
    refused(lambda: attach(model), "0.weight", "sync.remove()")
    sync.remove()
    attach(model).remove()


@pytest.mark.filterwarnings("ignore")  # torch's own, on import
def test_torchs_own_ways_to_exchange_gradients_are_refused() -> None:
    def run() -> None:
        from torch.distributed._composable.replicate import replicate
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        inner = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(net()))
        refused(lambda: attach(inner), "1 is a DistributedDataParallel", "plain module")
        refused(lambda: attach(replicate(net())), "the model is a DDP", "plain module")
        refused(lambda: attach(fully_shard(net())), "0.weight", "mesh['inner'] alone")
        cpu = torch.device("cpu")
        flat = FullyShardedDataParallel(net(), use_orig_params=True, device_id=cpu)
        refused(lambda: attach(flat), "FullyShardedDataParallel", "plain module")

    run_ranks(2, run)


def test_torchs_own_averaging_around_a_replica_is_refused() -> None:
    def run() -> None:
        from torch.distributed._composable.replicate import replicate

        for first in (True, False):
            model = net()
            around = DistributedDataParallel(model) if first else None
            sync = attach(model)
            around = around or DistributedDataParallel(model)
            refused(lambda m=around: backward(m), "inside DistributedDataParallel")
            backward(model)
            sync.remove()
            backward(around)
        model = net()
        sync = attach(model)
        replicate(model)
        refused(lambda: backward(model), "inside DistributedDataParallel")

    run_ranks(2, run)


class Complex(nn.Module):
    """A complex parameter among real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex64) @ self.turn).abs())  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["wfbp", "sequential", "dear"])
def test_complex_parameters_train_as_under_ddp(scheme: str) -> None:
    def run() -> list[list[float]]:
        trained = []
        for own in (True, False):
            model = Complex()
            opt = torch.optim.Adam(model.parameters(), lr=0.01)
            sync = gradtide.replicate(model, opt, scheme) if own else None
            around = model if own else DistributedDataParallel(model)
            for step in range(4):
                torch.manual_seed(10 * step + dist.get_rank())
                around(torch.randn(5, 4)).square().mean().backward()
                if sync is not None:
                    sync.clip_grad_norm_(0.5)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
            if sync is not None:
                sync.remove()
            trained.append(torch.view_as_real(model.turn.detach()).flatten().tolist())
        return trained

    first, second = run_ranks(2, run)
    assert first[0] == second[0]
    assert first[0] == pytest.approx(first[1], abs=1e-5)


def test_complex_parameters_are_refused_where_numbers_are_compared() -> None:
    schemes = (
        "topk",
        "oktopk(schedule='dear')",
        "powersgd",
        "wfbp(wire='bf16')",
        "topk(schedule='local')",
        "auto",
    )

    def run() -> None:
        for scheme in schemes:
            refused(lambda s=scheme: attach(Complex(), s), "turn is complex", "'wfbp'")
        sync = attach(Complex())
        refused(lambda: sync.adopt("topk"), "turn is complex")
        sync.remove()

    run_ranks(2, run)


# - While training ---------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["wfbp", DEAR, "topk", "topk(schedule='local')"])
def test_parameters_that_come_later_are_refused(scheme: str) -> None:
    def grow(model: Any, opt: torch.optim.Optimizer) -> None:
        model.append(nn.Linear(2, 2))
        opt.add_param_group({"params": model[3].parameters()})

    def exchange(model: Any, opt: torch.optim.Optimizer) -> None:
        model[2] = nn.Linear(8, 2)
        opt.param_groups[0]["params"][-2:] = model[2].parameters()

    def stray(model: Any, opt: torch.optim.Optimizer) -> None:
        opt.add_param_group({"params": nn.Linear(2, 2).parameters()})

    def thaw(model: Any, opt: torch.optim.Optimizer) -> None:
        model[0].bias.requires_grad_(True)

    def swap(model: Any, opt: torch.optim.Optimizer) -> None:
        model[2].weight = nn.Parameter(torch.zeros(2, 8))

    def assign(model: Any, opt: torch.optim.Optimizer) -> None:
        model[2].load_state_dict(nn.Linear(8, 2).state_dict(), assign=True)

    def run() -> None:
        for change, name in (
            (swap, "2.weight"),
            (assign, "2.weight"),
            (grow, "3.weight"),
            (exchange, "2.weight"),
            (stray, "a parameter of the optimizer's group 1"),
            (thaw, "0.bias"),
            (lambda model, _: model.append(nn.Linear(2, 2)), "3.weight"),
        ):
            model = net()
            model[0].bias.requires_grad_(False)  # type: ignore[index]
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = gradtide.replicate(model, opt, scheme)
            for _ in range(2):
                backward(model)
                opt.step()
                opt.zero_grad()
            change(model, opt)

            def train(model: Any = model, opt: torch.optim.Optimizer = opt) -> None:
                backward(model)
                opt.step()

            refused(train, f"{name} was added or unfrozen", "sync.refresh()")
            sync.remove()
            opt.step()

    run_ranks(2, run)


@pytest.mark.parametrize("scheme", ["wfbp", DEAR, "topk", "topk(schedule='local')"])
def test_another_dtype_than_at_replicate_is_refused(scheme: str) -> None:
    def run() -> None:
        for large in (8, 40_000):  # gradients that are copied alone, too
            model = net(large)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = gradtide.replicate(model, opt, scheme)
            for _ in range(2):
                backward(model)
                opt.step()
                opt.zero_grad()
            sync.flush()
            model.double()

            def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
                model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
                opt.step()

            words = "torch.float32", "torch.float64", "sync.remove()"
            refused(partial(step, model, opt), *words)

    run_ranks(2, run)


def test_sparse_gradients_are_refused_by_name() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 2))

        def forward(self, i: Tensor) -> Tensor:
            return nn.functional.embedding(i, self.weight, sparse=True)

    def run() -> None:
        model = Table()
        attach(model)
        index = torch.tensor([1, 2])
        refused(lambda: model(index).sum().backward(), "weight is torch.sparse_coo")

    run_ranks(2, run)


def test_wrapped_optimizers_are_refused_with_the_one_inside() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner  # and no super().__init__(), as Accelerate's

        param_groups = property(lambda self: self.optimizer.param_groups)

    class Bare:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._optimizer = inner

    def run() -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for kind, name in ((Wrapper, ".optimizer"), (Bare, "._optimizer")):
            wrapped: Any = kind(inner)
            refused(lambda w=wrapped: gradtide.replicate(model, w), "inside", name)
        gradtide.replicate(model, inner).remove()

    run_ranks(2, run)


def test_known_parameters_may_change_groups() -> None:
    def run() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt)
        backward(model)
        opt.step()
        opt.add_param_group({"params": [opt.param_groups[0]["params"].pop()]})
        backward(model)
        opt.step()
        sync.remove()

    run_ranks(2, run)


def test_what_needs_no_averaging_may_come_later() -> None:
    def run() -> None:
        model, other = net(), net()
        opt = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], 0.1)
        sync = gradtide.replicate(model, opt)
        opt.add_param_group({"params": other.parameters()})
        second = gradtide.replicate(other, opt)
        model.append(nn.Linear(2, 2).requires_grad_(False))  # type: ignore[operator]
        for _ in range(2):
            backward(model)
            backward(other)
            opt.step()
            opt.zero_grad()
        second.remove()
        sync.remove()

    run_ranks(2, run)


def times(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class Reaches(nn.Module):
    """Reads a parameter of a module past torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.direct = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own
            self.read = torch.jit.script(times)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out: Tensor = self.read(x, self.head.weight) if self.direct else self.head(x)
        return out


def test_a_stale_read_is_found() -> None:
    run_ranks(2, _stale)


def _stale() -> None:
    model = Reaches()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheme = "Scheme(Dense(), fusion=PerTensor(), schedule=DEAR)"
    sync = gradtide.replicate(model, opt, scheme)
    for _ in range(3):
        backward(model)
        opt.step()
        opt.zero_grad()
    model.direct = True
    refused(lambda: backward(model), "head.weight", "sync.flush()")
    del sync


def test_a_norm_that_is_not_finite_is_refused_on_demand() -> None:
    run_ranks(2, _not_finite)


def _not_finite() -> None:
    model = net()
    sync = attach(model)
    backward(model)
    next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
    refused(lambda: sync.clip_grad_norm_(1.0, error_if_nonfinite=True), "nan")
    sync.remove()


# - Failures ---------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", DEAR, "wfbp(wire='bf16')"])
def test_a_dead_peer_is_named_in_time(scheme: str) -> None:
    named = r"CommunicationError: rank [02]: .*rank 1 is gone"
    with pytest.raises(AssertionError, match=named):
        run_ranks(3, _peer_dies, scheme)


def _peer_dies(scheme: str) -> None:
    model = net(64)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gradtide.replicate(model, opt, scheme)

    def train() -> None:
        for step in range(20):
            if step == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
            backward(model)
            opt.step()

    start = time.monotonic()
    with pytest.raises(gradtide.CommunicationError) as caught:
        train()
    assert time.monotonic() - start < TIMEOUT
    time.sleep(1)
    raise caught.value


def test_an_error_in_one_ranks_training_reaches_the_others() -> None:
    with pytest.raises(AssertionError, match="bad batch"):
        run_ranks(2, _one_fails)


def _one_fails() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    gradtide.replicate(model, opt, DEAR)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            raise OSError("bad batch")
        try:
            backward(model)
            opt.step()
        except gradtide.CommunicationError:
            time.sleep(1)
            raise
