"""The wrapper inside `join()`, its optimizer not passed, and behind `no_sync`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import gradtide
from tests.ranks import run_ranks

SCHEMES = [
    "wfbp",
    "dear",
    "exdyna(0.2, schedule='dear')",
    "topka2a(0.2, schedule='local', warmup=6)",
    "diloco(every=2)",
]


def digits(module: nn.Module, buffers: bool = False) -> list[float]:
    """Parameters, and perhaps statistics of norms."""
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    return [x for t in tensors for x in t.flatten().tolist()]


class Run:
    """A model with statistics, wrapped, and an optimizer that nobody passes."""

    def __init__(self, scheme: str) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8)
        self.model = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 2))
        self.wrapped = (
            Torchs(self.model)
            if scheme == "ddp"
            else gradtide.DistributedDataParallel(self.model, scheme=scheme)
        )
        self.optimizer: torch.optim.Optimizer
        self.optimizer = torch.optim.Adam(self.wrapped.parameters(), 0.01)

    def backward(self, number: int) -> None:
        seed = 10 * number + dist.get_rank()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.wrapped(x).square().sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, batches: int, window: int = 1) -> None:
        """Uneven on ranks; with a window, gradients of the last one may be left."""
        with self.wrapped.join():
            for i in range(batches):
                last = i % window == window - 1
                with nullcontext() if last else self.wrapped.no_sync():
                    self.backward(i)
                if last:
                    self.step()
        self.optimizer.zero_grad()


@pytest.mark.product(each=12)
@pytest.mark.parametrize("batches", [(1, 2), (0, 2), (2, 5), (3, 0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_optimizer_that_nobody_passed_is_known_inside_join(
    scheme: str, batches: tuple[int, int]
) -> None:
    """One rank may have no step of its own before it is out of batches."""

    def trained(kind: str) -> tuple[list[list[float]], int]:
        run, found = Run(kind), []
        for _ in range(2):
            run.epoch(batches[dist.get_rank()])
            found.append(digits(run.model, buffers=True))
        for i in range(4):
            run.backward(50 + i)
            run.step()
        if kind != "ddp":
            run.wrapped.replica.end_round()
        found.append(digits(run.model))
        steps = len(run.optimizer.state) and int(
            max(float(s["step"]) for s in run.optimizer.state.values())
        )
        return found, steps

    first, second = run_ranks(2, trained, scheme)
    assert first[0] == second[0]
    if scheme in SCHEMES[:3]:  # else the optimizer's state is each rank's own
        assert first[1] == second[1]
    if scheme in ("wfbp", "dear"):
        # After an epoch, ranks of DDP have other states. Its statistics are those of
        # the last rank.
        (expected, _), _ = run_ranks(2, trained, "ddp")
        size = len(first[0][-1])
        got, wanted = (torch.tensor(found[0][:size]) for found in (first[0], expected))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_exchanges_something_itself_is_refused_inside_join() -> None:
    """Ranks that are out of batches would be waited for in its step."""

    def refused() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit's, where it is imported
            from torch.distributed.optim import ZeroRedundancyOptimizer
        run = Run("wfbp")
        params = run.wrapped.parameters()
        run.optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01)
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer, which exchang"):
            run.epoch(2 + dist.get_rank())

    run_ranks(2, refused)


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_last_window_may_be_cut_short(scheme: str) -> None:
    """On one rank, whose last forward is inside `no_sync`, and not on the other."""

    def trained() -> list[float]:
        run = Run(scheme)
        for _ in range(3):
            run.epoch((6, 8)[dist.get_rank()], window=4)
        return digits(run.model)

    first, second = run_ranks(2, trained)
    assert first == second


@pytest.mark.product
@pytest.mark.parametrize("call", ["end_round", "refresh", "adopt"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_behind_no_sync_ranks_may_do_what_is_between_steps(
    scheme: str, call: str
) -> None:
    """The gradients of a window that was cut short are gone, and nothing is open."""

    def trained() -> list[float]:
        run = Run(scheme)
        for i in range(7):
            with run.wrapped.no_sync():
                run.backward(i)
            if i % 3 == 2:
                run.backward(10 + i)
                run.step()
        run.optimizer.zero_grad()
        sync = run.wrapped.replica
        how = [sync.scheme] if call == "adopt" else []
        with run.wrapped.no_sync():
            run.backward(20)
            if call != "end_round":
                with pytest.raises(RuntimeError, match="inside no_sync"):
                    getattr(sync, call)(*how)
        run.optimizer.zero_grad()
        getattr(sync, call)(*how)
        for i in range(4):
            run.backward(30 + i)
            run.step()
        sync.end_round()
        return digits(run.model)

    first, second = run_ranks(2, trained)
    assert first == second
