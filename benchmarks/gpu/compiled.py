"""torch.compile, the graphs of its `reduce-overhead`, and fused optimizers.

Two ranks: hooks run between compiled pieces, and exchanges beside them. Losses are
those of the same training without compilation, but for what other kernels round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpu.model import TINY, Entrant, Shape, adamw, loss_of, transformer
from gpu.ranks import Groups, joined, told_each, transports
from gpu.ranks import measure as measure_on_ranks
from gpu.results import Bar, Book, right
from gpu.setting import Setting
from gradtide.lab.cluster import Cluster
from gradtide.lab.job import from_everybody

STEPS = 12
NEAR = 2e-2  # of a loss: bf16 rounds to 4e-3
FUSED = "fused AdamW, dear as wfbp"
MODES = {"compiled": None, "graphs": "reduce-overhead"}
SCHEMES = ("wfbp", "dear", "topka2a(0.02, schedule='local', wire='e3m0')")


def names(transport: str) -> list[str]:
    found = [f"{mode}, {scheme}" for scheme in SCHEMES for mode in MODES]
    return [f"{transport} {name}" for name in (FUSED, *found)]


BARS = tuple(
    bar
    for transport in ("gloo", "nccl")
    for name in names(transport)
    for bar in (
        right(f"{name}: the same bits", name, "alike")
        if FUSED in name
        else Bar(f"{name}: losses, off eager's by", name, "off", NEAR),
        right(f"{name}: ranks alike", name, "ranks alike"),
    )
)


def measure(book: Book, setting: Setting) -> None:
    wanted = [name for t in transports(setting) for name in names(t)]
    if not setting.cuda:
        graphs = [name for name in wanted if "graphs" in name]
        book.skip(graphs, "needs a CUDA device")
        wanted = [name for name in wanted[:5] if name not in graphs]
    measure_on_ranks(book, Cluster(2), train, wanted, setting)


# - On every rank ----------------------------------------------------------------------


def train(names: Sequence[str], setting: Setting) -> None:
    torch.set_num_threads(1)
    with joined(setting) as groups:
        told_each(groups, names, partial(compared, setting, groups), 90)


def compared(setting: Setting, groups: Groups, name: str) -> dict[str, Any]:
    transport, _, rest = name.partition(" ")
    run = partial(trained, setting, groups, transport)
    if rest == FUSED:
        (_, here, one), (_, there, other) = run("wfbp", None), run("dear", None)
        return {"alike": here == there, "ranks alike": one and other}
    way, _, scheme = rest.partition(", ")
    eager, _, _ = run(scheme, None)
    losses, _, alike = run(scheme, way)
    off = max(abs(a - b) / b for a, b in zip(losses, eager, strict=True))
    return {"off": off, "ranks alike": alike, "graphs": graphs()}


def graphs() -> int:
    """How many torch has compiled since it was last told to forget them."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def trained(
    setting: Setting, groups: Groups, transport: str, scheme: str, way: str | None
) -> tuple[list[float], int, bool]:
    """Losses, a checksum of the parameters, and whether all ranks have the same."""
    from torch._dynamo.utils import counters

    from gradtide.runtime.guards.checksum import checksum

    torch._dynamo.reset()
    counters.clear()
    shape = TINY if setting.tiny else Shape(256, 4, 3, 128, 256)
    model = transformer(setting, shape)
    optimizer = adamw(setting, model)
    if way is not None:
        backend = "inductor" if setting.cuda else "aot_eager"
        model.compile(mode=MODES[way], backend=backend)
    entrant = Entrant(scheme, model, optimizer, groups.of(transport))
    rng = torch.Generator(setting.device).manual_seed(1 + groups.rank)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(
            shape.vocabulary,
            (4, shape.length + 1),
            generator=rng,
            device=setting.device,
        )
        loss = loss_of(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    entrant.flush()
    total = int(checksum(model.parameters()))
    entrant.leave()
    alike = len(set(from_everybody(total))) == 1
    return torch.stack(losses).tolist(), total, alike
