"""What only a GPU can show of the transports: two ranks share one.

A device that is far behind the host is what shows wrong orders: with two or three
kernels under way every order looks right.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.test_transport import requests, row
from tests.transport.test_nccl import odd
from torch import nn
from torch.nn import functional as F

import gradtide
from gradtide.core.ops import Op, ToHost
from gradtide.core.transport import Job
from gradtide.testing import answer
from gradtide.transport import connect

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
BACKENDS = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
RECIPES = (
    "wfbp",
    "dear",
    "dear(wire='bf16')",
    "wfbp(wire='e3m0')",
    "topka2a(0.02)",
    "topk(0.02, schedule='dear')",
    "oktopk(0.02)",
    "exdyna(0.02)",
    "exdyna(0.02, schedule='local')",
    "powersgd(4)",
    "diloco(every=3)",
    "pad_kfac(factor_every=1, inverse_every=2)",
)
DELAY, LONG = 4_000_000, 1_000_000_000  # cycles: 2 and 600 ms


def on_gpu(name: str, work: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    """Run ranks, which are new processes: this one uses the device, too."""
    torch.cuda.init()
    return run_ranks(size, work, *args, limit=280, backend=BACKENDS[name])


def alone_on_its_host() -> torch.device:
    """NCCL refuses two ranks of one GPU, unless they are on hosts of their own."""
    os.environ.update(NCCL_HOSTID=f"rank{dist.get_rank()}", NCCL_IB_DISABLE="1")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_MAX_NCHANNELS="1")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits in each run
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


# - Requests ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers(backend: str) -> None:
    on_gpu(backend, _answers)


def asked(rank: int, size: int) -> list[Any]:
    every = [*requests(rank, size), *odd(rank, size)]
    return [*every, *[type(op)(row(rank, 4_000_000)) for op in every[:2]]]


def moved(op: Any, device: torch.device) -> Any:
    """A request of tensors on a device, where they share memory as they did."""
    into = getattr(op, "into", None)
    if 0 in op.tensor.stride():  # many places that are one in memory
        return replace(op, tensor=op.tensor[0].to(device).expand(op.tensor.shape))
    if into is None:
        return replace(op, tensor=op.tensor.to(device))
    there = into.to(device)
    if op.tensor.untyped_storage().data_ptr() != into.untyped_storage().data_ptr():
        return replace(op, tensor=op.tensor.to(device), into=there)
    begin = op.tensor.storage_offset()
    return replace(op, tensor=there[begin : begin + op.tensor.numel()], into=there)


def _answers() -> None:
    """All are asked before the device has filled any, and used up as they arrive."""
    device = alone_on_its_host()
    rank, size = dist.get_rank(), dist.get_world_size()
    everybodys = [asked(r, size) for r in range(size)]
    transport: Any = connect(None, device)
    main = torch.cuda.current_stream()
    under_way = []
    for op in asked(rank, size):
        mine, known = moved(op, device), op.tensor.clone().to(device)
        alone = 0 not in mine.tensor.stride()
        if alone:
            mine.tensor.zero_()
            torch.cuda._sleep(DELAY)
            mine.tensor.copy_(known)
        found: list[Any] = []

        def work(mine: Op = mine, found: list[Any] = found) -> None:
            found.append(transport.wait(transport.issue(mine)))

        ticket = transport.submit(Job(lambda: None, work))
        under_way.append((ticket, found, mine.tensor if alone else known))
    results = []
    for ticket, found, used in under_way:
        ticket.join()
        results.append(found[0].clone())
        used.zero_()
    assert torch.cuda.current_stream() == main
    for i, (op, result) in enumerate(zip(everybodys[rank], results, strict=True)):
        expected = answer([ops[i] for ops in everybodys])[rank]
        where = torch.device("cpu") if isinstance(op, ToHost) else device
        assert result.device == where
        torch.testing.assert_close(result.cpu(), expected, msg=f"request {i}: {op}")
    transport.close()


# - Training ---------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(128), nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def built(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(4)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def batches(device: torch.device) -> Iterator[torch.Tensor]:
    rng = torch.Generator().manual_seed(dist.get_rank())
    while True:
        yield torch.randn(64, 128, generator=rng).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [0, 1])
def test_steps_are_the_same_however_far_the_device_is_behind(
    backend: str, half: int
) -> None:
    for found in on_gpu(backend, _train, RECIPES[half::2]):
        assert not found, found


def test_steps_are_the_same_with_nccl_inside_hosts_alone() -> None:
    recipes = "wfbp", "dear", "exdyna(0.02)"
    for found in on_gpu("gloo", _train, recipes, True, size=4):
        assert not found, found


def by_hosts() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of four ranks, two on each host: those at this place, and those of this host."""
    host, place = divmod(dist.get_rank(), 2)
    between = [dist.new_group([i, i + 2], backend="gloo") for i in (0, 1)]
    inside = [dist.new_group([i, i + 1], backend="nccl") for i in (0, 2)]
    return between[place], inside[host]


def _train(recipes: tuple[str, ...], hosts: bool = False) -> dict[str, Any]:
    """The recipes whose weights differ between ranks, or between three ways of running.

    The host waits for the device after each step; or never; or there are delays.
    """
    device = alone_on_its_host()
    groups = by_hosts() if hosts else None
    wrong, ways = {}, ("waiting", "plain", "delays")
    for recipe in recipes:
        own = [_digest(recipe, way, device, groups) for way in ways]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        if len({digest for digests in everybody for digest in digests}) > 1:
            wrong[recipe] = everybody
    return wrong


def _digest(recipe: str, way: str, device: torch.device, groups: Any) -> str:
    model, optimizer = built(device)
    if way == "delays":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_full_backward_hook(lambda *_: torch.cuda._sleep(DELAY))
        optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(5 * DELAY))
    sync = gradtide.replicate(model, optimizer, recipe, process_group=groups)
    main, coming = torch.cuda.current_stream(), batches(device)
    for _ in range(7):
        model(next(coming)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.current_stream() == main
        if way == "waiting":
            torch.cuda.synchronize()
    sync.flush()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    sync.remove()
    return hashlib.sha1(weights.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("size", [1, 2])
def test_no_host_waits_for_its_device_over_nccl(size: int) -> None:
    on_gpu("nccl", _unwaited, size=size)


@contextmanager
def refused_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _unwaited() -> None:
    device = alone_on_its_host()
    for recipe in ("wfbp", "dear", "wfbp(wire='bf16')", "dear(wire='bf16')"):
        model, optimizer = built(device)
        sync = gradtide.replicate(model, optimizer, recipe, check_every=0)
        data = [batch for batch, _ in zip(batches(device), range(12), strict=False)]
        for i, batch in enumerate(data):
            if i == 4:
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG)
                behind = torch.cuda.Event()
                behind.record()
            with refused_waits():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if i == 5:
                assert not behind.query(), f"{recipe}: a step waits for the device"
        sync.remove()


PROGRAM = """
import sys
import torch.distributed as dist
from tests.transport.test_gpu import BACKENDS, train_until_killed
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group(BACKENDS["nccl"], init_method=store, rank=rank, world_size=2)
train_until_killed()
"""


def test_a_program_whose_kernels_wait_for_the_dead_ends(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].wait(200) == -signal.SIGKILL
        _, said = ranks[0].communicate(timeout=30)
        assert ranks[0].returncode > 0, said
        assert re.search(r"CommunicationError: .*rank 1 .*", said), said
    finally:
        for process in ranks:
            process.kill()


def train_until_killed() -> None:
    device = alone_on_its_host()
    model, optimizer = built(device)
    gradtide.replicate(model, optimizer, "wfbp")
    for i, batch in enumerate(batches(device)):
        if i == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_on_several_devices_are_refused() -> None:
    on_gpu("gloo", _several, size=1)


def _several() -> None:
    device = alone_on_its_host()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"1\.weight is on cuda:0, and others are on"):
        gradtide.replicate(model, optimizer)
