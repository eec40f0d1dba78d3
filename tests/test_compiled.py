"""Compiled models train as those that are not: same bits, no break, compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.utils import counters

import gradtide
from gradtide.core.step import Stage
from gradtide.core.torch_internals.autograd import Hook
from gradtide.core.torch_internals.compilation import Compilations
from gradtide.transport.nccl import NcclTransport
from gradtide.transport.staged import StagedTransport, refuse_capture
from tests.ranks import run_ranks

SCHEMES = {
    name: f"Scheme({collective}, BySize(0.004, 0.001, 1), {schedule})"
    for name, collective, schedule in (
        ("sequential", "Dense()", "SEQUENTIAL"),
        ("wfbp", "Dense()", "WFBP"),
        ("dear", "Dense()", "DEAR"),
        ("oktopk-sequential", "OkTopk(0.1)", "SEQUENTIAL"),
        ("oktopk-dear", "OkTopk(0.1)", "DEAR"),
        ("oktopk", "OkTopk(0.1)", "WFBP"),
    )
}
SCHEMES["exdyna-local"] = "exdyna(0.1, schedule='local')"
STEPS = 5
# What torch warns of while it compiles.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute", "ignore::DeprecationWarning:torch"
)
Compile = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_torch() -> nn.Module:
    """A model whose class is torch's own: all of its hooks are traced."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), Block())


def whole(net: nn.Module) -> Any:
    return torch.compile(net, backend=backend)


def in_place(net: nn.Module) -> Any:
    net.compile(backend=backend)
    return net


def blocks(net: nn.Module) -> Any:
    for block in net.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    return net


def replaced(net: nn.Module) -> Any:
    for i, block in enumerate(net.blocks):  # type: ignore[arg-type]
        net.blocks[i] = torch.compile(block, backend=backend)  # type: ignore[index]
    return net


def function(net: nn.Module) -> Any:
    return torch.compile(lambda x: net(x), backend=backend)


def not_at_all(net: nn.Module) -> Any:
    return net


backend = "eager"


def trained(
    scheme: str,
    compile: Compile = not_at_all,
    when: str | int = "before",
    build: Callable[[], nn.Module] = Model,
    through: str = "replicate",
    buffers: Any = "broadcast",
) -> tuple[Tensor, list[int], list[str]]:
    """The parameters, the graphs that there were after each step, and graph breaks.

    The model is compiled before or after it is replicated, or after a number of steps.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(7)
    net = build().double()
    forward = compile(net) if when == "before" else net
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sync: Any
    if through == "replicate":
        sync = gradtide.replicate(forward, opt, scheme, buffers=buffers)
    else:
        own = opt if through == "ddp" else None
        forward = gradtide.DistributedDataParallel(
            forward, scheme=scheme, optimizer=own
        )
        sync = forward.replica
    if when == "after":
        forward = compile(forward)
    graphs = []
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        if when == step:
            forward = compile(net)
        x = torch.randn(6, 16).double()
        forward(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    sync.flush()
    found = torch.cat([p.detach().flatten() for p in net.parameters()])
    sync.remove()
    return found, graphs, [str(reason) for reason in counters["graph_break"]]


EVERY = [
    *((c, "before", "replicate") for c in (whole, in_place, blocks, replaced)),
    *((c, "after", "replicate") for c in (whole, blocks, function)),
    *((c, 2, "replicate") for c in (whole, blocks, function)),
    *((whole, when, "ddp") for when in ("before", "after")),
    (whole, "after", "ddp alone"),
    (blocks, "before", "ddp alone"),
]
SOME = [(whole, "before", "replicate"), (function, 2, "replicate")]
CASES = {"wfbp": [*SOME, (whole, "after", "ddp alone")], "dear": EVERY}


def every_way() -> list[str]:
    """What fails in which way to compile."""
    wrong = []
    expected, *_ = trained(SCHEMES["sequential"])
    for name, cases in CASES.items():
        for compile, when, through in cases:
            found, graphs, breaks = trained(
                SCHEMES[name], compile, when, through=through
            )
            way = f"{name}, {compile.__name__} {when} {through}"
            if not torch.equal(found, expected):
                wrong.append(f"{way}: off by {(found - expected).abs().max()}")
            first = when if isinstance(when, int) else 0
            if not graphs[first] or graphs[first] != graphs[-1]:
                wrong.append(f"{way}: graphs {graphs}")
            wrong += [f"{way}: {reason}" for reason in breaks]
    return wrong


@pytest.mark.slow
def test_every_way_to_compile_gives_the_same_bits() -> None:
    for wrong in run_ranks(2, every_way, limit=300):
        assert wrong == []


def of_torchs_own_class() -> list[tuple[str, bool, list[int], int]]:
    out = []
    for name in ("wfbp", "dear"):
        expected, *_ = trained(SCHEMES[name], build=of_torch, buffers="local")
        for compile in (whole, function):
            for buffers in ("broadcast", "local"):
                found, graphs, breaks = trained(
                    SCHEMES[name], compile, "after", of_torch, buffers=buffers
                )
                same = buffers == "broadcast" or torch.equal(found, expected)
                out.append((buffers, same, graphs, len(breaks)))
                assert all("sends buffers" in reason for reason in breaks)
    return out


@pytest.mark.slow
def test_a_model_whose_own_hooks_are_traced() -> None:
    """Only what has to be done in every forward breaks the graph, and says why."""
    for buffers, same, graphs, breaks in run_ranks(2, of_torchs_own_class, limit=300)[
        0
    ]:
        assert same
        assert graphs[0] == graphs[-1]
        assert breaks == (buffers == "broadcast")


def overlapped() -> list[tuple[str, list[int]]]:
    """How many buckets are due when each block ends, in a step that is not first."""
    out = []
    for compile in (not_at_all, blocks, whole):
        torch._dynamo.reset()
        net = Model()
        forward = compile(net)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        sync = gradtide.replicate(net, opt, SCHEMES["dear"])
        seen: list[int] = []

        def look(*_: Any, sync: Any = sync, seen: list[int] = seen) -> None:
            buckets = sync._training.placement.buckets
            seen.append(sum(bucket.stage is Stage.DUE for bucket in buckets))

        for module in (*net.blocks, net.head):
            module.register_forward_hook(Hook(look))
        for _ in range(4):
            seen.clear()
            forward(torch.randn(6, 16)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        out.append((compile.__name__, list(seen)))
        sync.remove()
    return out


def test_per_block_updates_are_carried_out_as_late_as_without() -> None:
    (_, eager), (_, per_block), (_, at_once) = run_ranks(2, overlapped, limit=300)[0]
    assert eager == per_block
    assert eager[0] > eager[-1] == 0
    assert at_once == []  # hooks inside are not called


def compiled_steps(scheme: str) -> tuple[bool, list[str]]:
    """A whole step, compiled: whether its bits are eager's; what else was compiled."""

    def train(wrap: Callable[[Any], Any]) -> Tensor:
        torch.manual_seed(0)
        net = Model()
        optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.5)
        sync = gradtide.replicate(net, optimizer, scheme)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        run = wrap(step)
        rng = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            run(torch.randn(5, 16, generator=rng))
        sync.flush()
        sync.remove()
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    torch._dynamo.reset()
    input_codes.clear()
    eager = train(lambda step: step)
    same = torch.equal(eager, train(partial(torch.compile, backend="eager")))
    files = [code().co_filename for code in input_codes.seen if code() is not None]
    assert __file__ in files  # the step itself
    return same, [file for file in files if "gradtide/runtime" in file]


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("wfbp", "topka2a(0.1)")]


@pytest.mark.parametrize("scheme", ["dear", *LONG])
def test_no_code_of_ours_is_compiled_with_a_whole_step(scheme: str) -> None:
    for same, files in run_ranks(2, compiled_steps, scheme):
        assert same
        assert not files


def by_inductor() -> dict[str, list[float]]:
    global backend
    backend = "inductor"
    torch._inductor.config.compile_threads = 1  # no pool, which forks do not survive
    out = {}
    for name in ("sequential", "wfbp", "dear"):
        out[name], *_ = trained(SCHEMES[name], whole)
    backend = "aot_eager"  # orders gradients as inductor does, and compiles sooner
    for name in ("oktopk-sequential", "oktopk", "oktopk-dear"):
        for compile in (blocks, whole):
            out[f"{name} {compile.__name__}"], *_ = trained(SCHEMES[name], compile)
    out["exdyna-local"], graphs, breaks = trained(SCHEMES["exdyna-local"], blocks)
    assert graphs[0] == graphs[-1]
    assert breaks == []
    backend = "inductor"
    torch._dynamo.reset()
    torch.manual_seed(7)
    net = Model().double()
    ddp = nn.parallel.DistributedDataParallel(whole(net))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ddp(torch.randn(6, 16).double()).square().mean().backward()
        opt.step()
        opt.zero_grad()
    out["ddp"] = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {name: found.tolist() for name, found in out.items()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler for inductor")
def test_inductor_equals_itself_without_overlap_and_ddp() -> None:
    lists, others = run_ranks(2, by_inductor, limit=400)
    first = {
        name: torch.tensor(found, dtype=torch.float64) for name, found in lists.items()
    }
    assert lists == others
    assert torch.equal(first["wfbp"], first["sequential"])
    assert torch.equal(first["dear"], first["sequential"])
    for compile in ("blocks", "whole"):
        expected = first[f"oktopk-sequential {compile}"]
        assert torch.equal(first[f"oktopk {compile}"], expected)
        assert torch.equal(first[f"oktopk-dear {compile}"], expected)
    assert (first["wfbp"] - first["ddp"]).abs().max() < 1e-6
    assert not torch.equal(first["oktopk whole"], first["wfbp"])
    assert first["exdyna-local"].isfinite().all()


def test_who_waits_for_compilations_is_not_kept_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.told: list[bool] = []

        def tell(self) -> None:
            self.told.append(torch.compiler.is_compiling())

    owner = Owner()
    compilations = Compilations(owner.tell)
    compilations.watch()
    torch._dynamo.reset()  # forgets it; torch.export begins so, and tells nobody else
    assert owner.told == [False]
    compilations.watch()
    compilations.watch()
    run = torch.compile(lambda x: x + 1, backend="eager")
    run(torch.zeros(2))
    assert owner.told == [False, False]  # optimizers ask
    del owner
    torch._dynamo.reset()
    compilations.watch()
    run(torch.zeros(3))
    compilations.remove()
    compilations.remove()


def test_a_captured_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that is replayed calls no hooks."""
    refuse_capture()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for transport in (StagedTransport, NcclTransport):
        nothing: Any = None
        with pytest.raises(RuntimeError, match=r"leave backward .* out of torch.cuda"):
            transport.submit(nothing, nothing)
