"""Other threads read a model while it is trained; nothing of the training changes."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.core.step import Stage
from gradtide.core.torch_internals.autograd import apart, is_traced, is_watched
from gradtide.core.transport import Progress
from gradtide.runtime import turns
from gradtide.runtime.turns import Turns

SMALL = "Scheme(Dense(), BySize(0.004, 0.001, 1), {})"
EXACT = [SMALL.format("WFBP"), SMALL.format("DEAR")]
ROUNDS = ["diloco(every=4)", "streaming_diloco(every=6, delay=2, fragments=3)"]
SCHEMES = [*EXACT, *ROUNDS, "spd_kfac(schedule='dear')", "micro"]

Read = Callable[[nn.Module, gradtide.Replica], object]


def model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    middle = nn.BatchNorm1d(32) if norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(12, 32), middle, nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)
    )


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(6, 12, generator=rng), torch.randint(0, 4, (6,), generator=rng)


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).view(2, 12)


def evaluate(net: nn.Module, _: gradtide.Replica) -> None:
    with torch.no_grad():
        net(x())


def infer(net: nn.Module, _: gradtide.Replica) -> None:
    with torch.inference_mode():
        net(x())


def act(net: nn.Module, _: gradtide.Replica) -> None:
    """A forward as if to train."""
    net(x())


def save(net: nn.Module, _: gradtide.Replica) -> None:
    assert all(t.isfinite().all() for t in map(torch.clone, net.state_dict().values()))


def read_grads(net: nn.Module, _: gradtide.Replica) -> None:
    for p in net.parameters():
        grad = p.grad
        if grad is not None:
            grad.norm()
            grad.clone()


def flush(_: nn.Module, sync: gradtide.Replica) -> None:
    sync.flush()


def trace(net: nn.Module, _: gradtide.Replica) -> None:
    torch.jit.trace(net, x(), check_trace=False)


STEPS = 12
READS = [evaluate, infer, act, save, read_grads, flush, trace]
# Where gradients stay a rank's own nobody stands between torch and who reads `.grad`
# beside zero_grad(): plain torch ends such a process by a segmentation fault, too.
OWN = [read for read in READS if read is not read_grads]


def reads(scheme: str) -> list[Read]:
    return OWN if scheme in ROUNDS or "local" in scheme else READS


def steps(net: nn.Module, opt: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        inputs, labels = data(step)
        cross_entropy(net(inputs), labels).backward()
        opt.step()
        opt.zero_grad()


def trained(scheme: str, read: Read | None, norm: bool = False) -> Any:
    """The trained parameters, with a thread that goes on reading, and its errors."""
    warnings.simplefilter("ignore")  # of what is late because it was read
    net, errors, done = model(norm), list[str](), threading.Event()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(net, opt, scheme)

    def go_on() -> None:
        while read is not None and not (errors or done.is_set()):
            try:
                read(net, sync)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

    reader = threading.Thread(target=go_on)
    alone = int("kfac" in scheme)  # all forwards of the first step may count there
    steps(net, opt, 0, alone)
    reader.start()
    try:
        steps(net, opt, alone, STEPS)
    finally:
        done.set()
        reader.join()
    sync.remove()
    return [p.tolist() for p in net.parameters()], errors


def every(scheme: str, norm: bool) -> list[Any]:
    return [trained(scheme, read, norm) for read in (None, *reads(scheme))]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_thread_that_reads_changes_nothing(scheme: str) -> None:
    for first, *others in run_ranks(2, every, scheme, False):
        for read, (params, errors) in zip(reads(scheme), others, strict=True):
            if "kfac" in scheme and read is read_grads:  # who trains must not, either
                assert all("K-FAC has to have it first" in error for error in errors)
            else:
                assert not errors, read.__name__
            assert params == first[0], read.__name__


def with_buffers(scheme: str) -> list[Any]:
    """Statistics see the forwards of all threads, so values are the readers' affair."""
    return [trained(scheme, read, norm=True)[1] for read in (evaluate, act, trace)]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", EXACT)
def test_a_thread_that_reads_sends_no_buffers(scheme: str) -> None:
    assert run_ranks(2, with_buffers, scheme) == [[[], [], []]] * 2


def asked_at_once(scheme: str) -> list[Any]:
    """What another thread reads right after step(), while the trainer waits for it."""
    net, found = model(), []
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = gradtide.replicate(net, opt, scheme)
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            inputs, labels = data(step)
            cross_entropy(net(inputs), labels).backward()
            grads = pool.submit(lambda: [p.grad.tolist() for p in net.parameters()])
            found.append(grads.result() if step % 2 else None)
            opt.step()
            if step % 3 == 0:
                found.append(pool.submit(lambda: net(x()).tolist()).result())
            if step % 3 == 1:
                found.append(pool.submit(lambda: net[0].weight.tolist()).result())
            if step % 3 == 2:
                state = pool.submit(lambda: copy.deepcopy(net.state_dict())).result()
                found.append([value.tolist() for value in state.values()])
            opt.zero_grad()
    sync.remove()
    return found


def test_a_thread_reads_what_a_step_has_done() -> None:
    wfbp, dear = (run_ranks(2, asked_at_once, scheme) for scheme in EXACT)
    assert wfbp == dear


def elsewhere(scheme: str) -> Any:
    """Trained in another thread than the one that has called replicate()."""
    net = model(norm=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(net, opt, scheme)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, torch.get_num_threads()).result()
        pool.submit(steps, net, opt, 0, 8).result()
    sync.remove()
    return [t.tolist() for t in net.state_dict().values()]


def here(scheme: str) -> Any:
    net = model(norm=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(net, opt, scheme)
    steps(net, opt, 0, 8)
    sync.remove()
    return [t.tolist() for t in net.state_dict().values()]


@pytest.mark.product
@pytest.mark.parametrize("scheme", [*EXACT, "spd_kfac(schedule='dear')"])
def test_who_trains_is_found_out(scheme: str) -> None:
    assert run_ranks(2, elsewhere, scheme) == run_ranks(2, here, scheme)


# - What traces ------------------------------------------------------------------------


def by_trace(net: nn.Module) -> str:
    return str(torch.jit.trace(net, x()).inlined_graph)


def by_fx(net: nn.Module) -> str:
    return str(make_fx(net)(x()).graph)


def by_export(net: nn.Module) -> str:
    return str(torch.export.export(net, (x(),)).graph)


def strictly(net: nn.Module) -> str:
    return str(torch.export.export(net, (x(),), strict=True).graph)


TRACERS = {"trace": by_trace, "fx": by_fx, "export": by_export, "strict": strictly}
UPDATES = ("addcdiv", "lerp", "_foreach", "sqrt")


def traced(scheme: str, tracer: str, alone: bool) -> Any:
    """Rank 0 alone traces, while an update is due; buffers are there, too."""
    net = model(norm=True)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    sync = gradtide.replicate(net, opt, scheme, check_every=1)
    graph, kept = "", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            inputs, labels = data(step)
            cross_entropy(net(inputs), labels).backward()
            opt.step()
            if step == 3 and alone and dist.get_rank() == 0:
                buckets = sync._training.placement.buckets
                due = sum(b.stage is Stage.DUE for b in buckets)
                assert (due > 0) == ("DEAR" in scheme)
                kept = [b.clone() for b in net.buffers()]
                graph = TRACERS[tracer](net)
                for buffer, before in zip(net.buffers(), kept, strict=True):
                    buffer.copy_(before)  # statistics of the trace
            opt.zero_grad()
    sync.remove()
    assert not any(name in graph for name in UPDATES), graph
    return [p.tolist() for p in net.parameters()]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_trace_has_no_update_in_it_and_sends_nothing(tracer: str) -> None:
    if tracer in ("trace", "fx"):  # with export it would be the same
        assert run_ranks(2, traced, EXACT[0], tracer, True)
    without = run_ranks(2, traced, EXACT[1], tracer, False)
    assert run_ranks(2, traced, EXACT[1], tracer, True) == without


def test_who_is_traced_or_watched() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((is_traced(), is_watched()))
        apart(lambda: seen.append((is_traced(), is_watched())))
        return x + 1

    look(torch.ones(1))
    with torch.device("cpu"):
        look(torch.ones(1))
    assert seen == [(False, False)] * 4
    seen.clear()
    make_fx(look)(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(look, torch.ones(1), check_trace=False)
    assert seen == [(True, True), (False, False)] * 2
    seen.clear()
    torch.func.vmap(look)(torch.ones(1))
    assert seen == [(True, True), (False, False)]


# - Turns ------------------------------------------------------------------------------


def other(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_reader_waits_for_the_end_of_a_step() -> None:
    turn, order = Turns(Progress()), list[str]()

    def read() -> None:
        with turn:
            order.append("read")

    with turn:
        turn.begin_step(alone=True)
    reader = other(read)
    reader.join(0.1)
    with turn:
        order.append("stepped")
        turn.end_step()
    reader.join()
    assert order == ["stepped", "read"]


def test_a_step_that_has_raised_lets_readers_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    turn, order = Turns(Progress()), list[str]()

    def read() -> None:
        with turn:
            order.append("read")

    with turn:
        turn.begin_step(alone=True)
    other(read).join(20)
    assert order == ["read"]


def test_what_runs_out_of_sight_has_the_turn_of_who_sent_it() -> None:
    progress = Progress()
    turn, seen = Turns(progress), list[tuple[bool, bool]]()

    def inside() -> None:
        with turn:  # would wait for ever for the one that waits for it
            seen.append((turn.trains, is_traced()))

    def traced(x: Tensor) -> Tensor:
        with turn:
            turn.unwatched(inside)
        return x + 1

    turn.begin_step(alone=False)
    make_fx(traced)(torch.ones(1))
    other(lambda: make_fx(traced)(torch.ones(1))).join()
    assert seen == [(True, False), (False, False)]


def test_what_fails_out_of_sight_is_raised() -> None:
    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        apart(fail)
