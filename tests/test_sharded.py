"""Sharded models: FSDP2 or tensor parallelism inside a host, gradtide between hosts.

`benchmarks/sharded.py` has the models, and takes more steps of more kinds.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gradtide
from tests.ranks import run_ranks

PATH = Path(__file__).parents[1] / "benchmarks" / "sharded.py"
SPEC = importlib.util.spec_from_file_location("sharded", PATH)
assert SPEC is not None
assert SPEC.loader is not None
sharded: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sharded)

LOCAL = "oktopk(0.2, schedule='local')"
STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, on import


def start(
    scheme: Any = "wfbp", double: bool = True, damage: Any = None, **policies: Any
) -> Any:
    """Model, optimizer, replica, and this rank's part of a batch: 2 hosts x 2 ranks."""
    from torch.distributed.fsdp import fully_shard

    outer, inner, part, parts = sharded.meshes("fsdp", 2)
    model = sharded.network() if double else sharded.network().float()
    for module in (*list(model)[1:3], model):
        fully_shard(module, mesh=inner, **policies)
    if damage is not None:  # before gradtide has the gradient
        model[3].weight.register_post_accumulate_grad_hook(damage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, optimizer, scheme, process_group=outer)
    return model, optimizer, sync, partial(sharded.batch, part=part, parts=parts)


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


# - Results ----------------------------------------------------------------------------


def equal_one_process() -> Any:
    found = {
        "fsdp": sharded.distance("fsdp", 2, "wfbp", 2 * STEPS),
        "fsdp, no overlap": sharded.distance("fsdp", 2, "sequential", STEPS),
        "tp": sharded.distance("tp", 2, "wfbp", 2 * STEPS),
    }
    return found, sharded.round_trip(2)


def test_training_equals_one_process_and_checkpoints_are_read_as_written() -> None:
    found, checkpoint = run_ranks(4, equal_one_process)[0]
    for kind, distances in found.items():
        assert max(distances.values()) < 1e-12, (kind, distances)
    assert checkpoint == dict.fromkeys(checkpoint, True)


def test_three_ranks_a_host_have_uneven_parts() -> None:
    distances = run_ranks(6, sharded.distance, "fsdp", 2, "wfbp", STEPS)[0]
    assert max(distances.values()) < 1e-12, distances


def accumulated() -> dict[str, Any]:
    """Parameters after steps of two backward passes, by how these are told apart."""
    found: dict[str, Any] = {}
    for ours, theirs in ((True, False), (True, True), (False, True)):
        model, optimizer, sync, batch = start()
        for i in range(STEPS):
            halves = list(zip(*(t.chunk(2) for t in batch(i)), strict=True))
            for last, (x, y) in enumerate(halves):
                model.set_requires_gradient_sync(bool(last) or not theirs)
                sync.be_quiet(ours and not last)
                (F.cross_entropy(model(x), y) / 2).backward()
            sync.clip_grad_norm_(sharded.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        sync.remove()
        found[f"{ours} {theirs}"] = sharded.whole(model)
    expected, _ = sharded.alone(STEPS)
    return {
        name: max(
            float((p - parameters[key]).abs().max() / p.abs().max())
            for key, p in expected.items()
        )
        for name, parameters in found.items()
    }


def policies() -> Any:
    """Under bf16 and CPU offload: the distance from torch's own two dimensions."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    given = {
        "bf16": {"mp_policy": half},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }
    found = {}
    for name, policy in given.items():
        model, optimizer, sync, batch = start(double=False, **policy)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        torchs = sharded.network().float()
        for module in (*list(torchs)[1:3], torchs):
            fully_shard(module, mesh=mesh, **policy)
        theirs = torch.optim.AdamW(torchs.parameters(), lr=0.01)
        for i in range(STEPS):
            x, y = batch(i)
            step(model, optimizer, x.float(), y)
            step(torchs, theirs, x.float(), y)
        sync.remove()
        assert next(model.parameters()).dtype is torch.float32
        pairs = zip(
            sharded.whole(model).values(), sharded.whole(torchs).values(), strict=True
        )
        found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def torchs_clipping() -> bool:
    """Whether torch's own clipping computes the same norm and the same gradients."""
    model, _optimizer, sync, batch = start()
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    norms = [float(sync.clip_grad_norm_(1e9))]
    total: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norms.append(float(total.full_tensor()))
    clipped = float(sync.clip_grad_norm_(1e9))
    sync.remove()
    return math.isclose(*norms, rel_tol=1e-12) and abs(clipped - 0.1) < 1e-5


def unused() -> list[bool]:
    """Which layers have gradients: hosts use one of two each, and none the third."""
    from torch.distributed.fsdp import fully_shard

    outer, inner, *_ = sharded.meshes("fsdp", 2)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for layer in layers:
        fully_shard(layer, mesh=inner)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    sync = gradtide.replicate(layers, optimizer, "wfbp", process_group=outer)
    used = layers[0] if outer.get_local_rank() == 0 else layers[1]
    used(torch.ones(2, 4)).sum().backward()
    present = [layer.weight.grad is not None for layer in layers]
    half = float(layers[0].weight.grad.full_tensor()[0, 0])  # used by one host of two
    sync.remove()
    return [*present, half == 1.0]


def product() -> Any:
    return accumulated(), policies(), torchs_clipping(), unused()


@pytest.mark.slow
def test_accumulation_precision_clipping_and_unused_parameters() -> None:
    added, policy, clipping, present = run_ranks(4, product)[0]
    assert max(added.values()) < 1e-12, added
    assert policy["offload"] < 1e-6, policy
    assert policy["bf16"] < 1e-2, policy
    assert clipping
    assert present == [True, True, False, True]


# - Sparse schemes and local steps -----------------------------------------------------


def losses(scheme: str) -> float:
    model, optimizer, sync, batch = start(scheme)
    for i in range(15):
        step(model, optimizer, *batch(i % 3))
    model.reshard()
    with torch.no_grad():
        found = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
    dist.all_reduce(found)
    sync.metrics(residual=True)
    sync.remove()
    return float(found / 4)


def apart_from_whole(scheme: str) -> float:
    """How far parameters are from those of whole models, where all entries travel."""
    model, optimizer, sync, batch = start(scheme)
    host = dist.get_rank() // 2
    outer = sharded.meshes("fsdp", 2)[0]
    plain = sharded.network()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    other = gradtide.replicate(plain, theirs, scheme, process_group=outer)
    for i in range(2 * STEPS):
        step(model, optimizer, *batch(i))
        step(plain, theirs, *sharded.batch(i, host, 2))
    sync.remove()
    other.remove()
    pairs = zip(sharded.whole(model).values(), plain.parameters(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def alarms() -> list[str]:
    """What each scheme says where one part alone of a gradient is not a number."""
    found = []
    for scheme in ("oktopk(0.2)", LOCAL):
        bad: list[int] = []

        def damage(p: Any, bad: list[int] = bad) -> None:
            if bad and dist.get_rank() == 3:
                p.grad.to_local()[0] = math.nan

        model, optimizer, _sync, batch = start(scheme, damage=damage)
        step(model, optimizer, *batch(0))
        bad.append(1)
        with pytest.raises(RuntimeError) as caught:
            step(model, optimizer, *batch(1))
        found.append(str(caught.value))
    return found


def edited() -> str:
    """What all ranks say where one alone has changed its part of a parameter."""
    model, optimizer, _sync, batch = start()
    step(model, optimizer, *batch(0))
    if dist.get_rank() == 2:
        with torch.no_grad():
            model[0].weight.to_local().add_(1.0)

    def go_on() -> None:
        for i in range(1, 4):
            step(model, optimizer, *batch(i))

    with pytest.raises(RuntimeError) as caught:
        go_on()
    return str(caught.value)


def resumed_local() -> bool:
    """Whether a run that exchanges steps goes on as it was, from a checkpoint."""
    model, optimizer, sync, batch = start(LOCAL)
    for i in range(STEPS):
        step(model, optimizer, *batch(i))
    saved = sync.state_dict(), model.state_dict(), optimizer.state_dict()
    before = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in part.items()}
        for part in saved[:2]
    ]
    again, other, resumed, _ = start(LOCAL)
    again.load_state_dict(before[1])
    other.load_state_dict(saved[2])
    resumed.load_state_dict(before[0])
    for i in range(STEPS, 2 * STEPS):
        step(model, optimizer, *batch(i))
        step(again, other, *batch(i))
    sync.remove()
    resumed.remove()
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def sparse() -> Any:
    schemes = ("wfbp", "oktopk(0.2)", "exdyna(0.2, schedule='local')", "powersgd")
    return (
        {scheme: losses(scheme) for scheme in schemes},
        resumed_local(),
        apart_from_whole("topk(1.0, schedule='local')"),
        edited(),
        alarms(),
    )


@pytest.mark.slow
def test_sparse_schemes_train_and_ranks_agree_on_what_is_wrong() -> None:
    ranks = run_ranks(4, sparse)
    found, resumed, apart, _, _ = ranks[0]
    assert apart < 1e-12
    assert all("infinite or NaN on rank 1" in said for r in ranks for said in r[4])
    assert all(loss < 1.1 * found["wfbp"] for loss in found.values()), found
    assert resumed
    assert all("differs between ranks" in edited for *_, edited, _ in ranks)
    assert "0.weight differs between ranks 0 and 1" in ranks[0][3]


# - Refusals and the wrapper -----------------------------------------------------------


def refusals() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        distribute_tensor,
    )
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def attach(model: nn.Module, scheme: Any = "wfbp", group: Any = None) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ranks = mesh["outer"] if group is None else group
        return gradtide.replicate(model, optimizer, scheme, process_group=ranks)

    def net(**given: Any) -> Any:
        return fully_shard(nn.Sequential(nn.Linear(4, 4)), **given)

    inside = net(mesh=mesh["inner"])
    refused(lambda: attach(inside, group=dist.group.WORLD), "0.weight", "mesh['inner']")
    refused(lambda: attach(inside, group=mesh["inner"]), "0.weight", "mesh['inner']")
    refused(lambda: attach(net(mesh=mesh)), "('outer', 'inner')", "mesh['inner']")
    refused(lambda: attach(inside, group=mesh), "0.weight", "mesh['inner']")
    refused(lambda: attach(inside, "dear"), "0.weight is sharded", "wfbp")
    refused(lambda: attach(inside, "spd_kfac"), "0.weight is sharded", "K-FAC")
    refused(lambda: attach(inside, "auto"), "0.weight is sharded", "gradtide plan")
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(plain[0], mesh=mesh["inner"])
    refused(lambda: attach(plain), "1.weight is not sharded", "fully_shard()")
    around = nn.Sequential(nn.Linear(4, 4))
    around[0].weight = nn.Parameter(
        distribute_tensor(around[0].weight, mesh["inner"], [Replicate()])
    )
    attach(around).remove()
    unfinished = DTensor.from_local(torch.ones(4, 4), mesh["inner"], [Partial()])
    around[0].weight = nn.Parameter(unfinished)
    refused(lambda: attach(around), "0.weight", "Partial")
    whole = DistributedDataParallel(nn.Linear(2, 2))
    refused(lambda: attach(nn.Sequential(inside, whole)), "DistributedDataParallel")
    divided = ZeroRedundancyOptimizer(
        plain[1].parameters(),
        optimizer_class=torch.optim.SGD,
        process_group=mesh.get_group("outer"),
        lr=0.1,
    )
    divided.param_groups[0]["params"] += list(inside.parameters())
    refused(
        lambda: gradtide.replicate(inside, divided, process_group=mesh["outer"]),
        "ZeroRedundancyOptimizer",
        "plain optimizer",
    )
    sync = attach(inside)
    refused(lambda: sync.adopt("dear"), "0.weight is sharded")
    refused(lambda: sync.join().__enter__(), "sharded")
    sync.remove()


def wrapped() -> bool:
    """Whether the wrapper does with FSDP2 inside what `replicate` does."""
    models = []
    for wrap in (False, True):
        model, optimizer, sync, batch = start()
        if wrap:
            sync.remove()
            outer = sharded.meshes("fsdp", 2)[0]
            outside: Any = gradtide.DistributedDataParallel(model, device_mesh=outer)
        for i in range(STEPS):
            step(outside if wrap else model, optimizer, *batch(i))
        models.append(sharded.whole(model))
    a, b = (list(one.values()) for one in models)
    return all(map(torch.equal, a, b))


def around() -> bool:
    refusals()
    return bool(wrapped())


def test_refusals_come_before_anything_is_sent_and_the_wrapper_works() -> None:
    assert run_ranks(4, around) == [True] * 4
