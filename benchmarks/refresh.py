"""Parameters that begin, end and change, twenty times in 420 steps, by every schedule.

    torchrun --nproc-per-node 2 benchmarks/refresh.py \
        --out benchmarks/records/refresh_p2.json

Layers are frozen and unfrozen, an adapter comes and goes, and all parameters are put in
others' place, by one run of each scheme: after each change `sync.refresh()` is called.
Reported is by how much any residual of what stays differs from what it was before
("lost"; 0 is the law), how much is kept, and whether all ranks end with the same bits.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.lab.record import commit, machine, versions

STEPS, CHANGES = 400, 20  # as many steps between two changes follow the last
SMALL = "fusion=BySize(0.002, 0.001, 1)"
SCHEMES = {
    "sequential": f"Scheme(TopK(0.05), {SMALL}, schedule=SEQUENTIAL)",
    "wfbp": f"Scheme(OkTopk(0.05), {SMALL})",
    "dear": f"Scheme(OkTopk(0.05), {SMALL}, schedule=DEAR)",
    "local": f"Scheme(TopK(0.05), {SMALL}, schedule=LOCAL)",
    "int8": f"Scheme(Dense('int8'), {SMALL})",
    "momentum": f"Scheme(MomentumCorrection(TopK(0.05)), {SMALL})",
    "warmup": f"Scheme(Warmup(TopK(0.05), 5), {SMALL}, schedule=DEAR)",
    "late_warmup": f"Scheme(Warmup(TopK(0.05), 5), {SMALL}, schedule=LOCAL)",
    "rounds": f"Scheme(TopK(0.05), {SMALL}, schedule=Schedule('step', every=4), "
    "outer=OuterSGD(0.7, momentum=0.9, nesterov=True))",
    "streaming": f"Scheme(Dense('e3m0'), {SMALL}, schedule=Schedule('step', every=4, "
    "delay=1, fragments=2, mix=0.5), outer=OuterSGD(0.7, momentum=0.9, nesterov=True))",
}


class Adapted(nn.Module):
    """A layer, and a thin one beside it that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(24, 24)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        return found if self.adapter is None else found + self.adapter(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 24), nn.Tanh(), Adapted(), nn.Tanh(), nn.Linear(24, 5)
    )


class Run:
    def __init__(self, scheme: str, **named: Any) -> None:
        self.model = network()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.sync = gradtide.replicate(self.model, self.opt, scheme, **named)
        self.number = 0

    def step(self, count: int = 3) -> None:
        for _ in range(count):
            self.number += 1
            draw = torch.Generator().manual_seed(100 * self.number + dist.get_rank())
            x = torch.randn(4, 24, generator=draw)
            self.model(x).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()

    @property
    def adapted(self) -> Any:
        return self.model[2]

    # - Changes ------------------------------------------------------------------------

    def freeze(self) -> None:
        self.model[0].requires_grad_(False)

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)

    def add(self) -> None:
        torch.manual_seed(dist.get_rank())  # each rank draws other numbers
        self.adapted.adapter = nn.Sequential(nn.Linear(24, 2), nn.Linear(2, 24))
        self.opt.add_param_group({"params": [*self.adapted.adapter.parameters()]})

    def remove(self) -> None:
        gone = {*self.adapted.adapter.parameters()}
        self.adapted.adapter = None
        for group in self.opt.param_groups:
            group["params"] = [p for p in group["params"] if p not in gone]

    def assign(self) -> None:
        with self.sync.shared_parameters():
            state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=True)

    CHANGES = (freeze, add, unfreeze, assign, remove)

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has not delivered, of what is trained."""
        self.sync.flush()
        places = self.sync._training.placement.places.values()
        found = {p.slot.name: p.bucket.residual_of(p.slot).clone() for p in places}
        for p, residual in self.aside.items():
            names = {other: name for name, other in self.model.named_parameters()}
            found[names[p]] = residual.clone()
        return found

    @property
    def aside(self) -> dict[nn.Parameter, Tensor]:
        kept = self.sync._session.aside
        return {} if kept is None else kept._residuals

    def ends(self) -> list[float]:
        """The parameters, when all is applied."""
        self.sync.end_round()
        self.sync.flush()
        return [x for p in self.model.parameters() for x in p.flatten().tolist()]


def law(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """By how much the residuals of what is in both differ."""
    both = before.keys() & after.keys()
    assert len(both) >= 4
    return max(float((before[n] - after[n]).abs().max()) for n in both)


def walk(scheme: str, each: int, changes: int) -> dict[str, Any]:
    """Change what is trained so often, after so many steps each."""
    run = Run(scheme)
    lost, kept = 0.0, 0.0
    for number in range(changes):
        run.step(each)
        run.sync.end_round()
        before, steps = run.residuals(), run.sync.metrics()["step"]
        run.CHANGES[number % len(run.CHANGES)](run)
        run.sync.refresh()
        assert run.sync.metrics()["step"] == steps == run.number
        after = run.residuals()
        lost = max(lost, law(before, after))
        kept += sum(float(x.abs().sum()) for x in after.values())
    run.step(each)
    ends = run.ends()
    run.sync.remove()
    return {"steps": run.number, "lost": lost, "kept": kept, "ends": ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    size, found = dist.get_world_size(), {}
    for name, scheme in SCHEMES.items():
        own = walk(scheme, STEPS // CHANGES, CHANGES)
        ranks: list[Any] = [None] * size
        dist.all_gather_object(ranks, own)
        found[name] = {
            "scheme": scheme,
            "steps": own["steps"],
            "lost": max(rank["lost"] for rank in ranks),
            "kept": min(rank["kept"] for rank in ranks),
            "alike": all(rank["ends"] == own["ends"] for rank in ranks),
        }
        if dist.get_rank() == 0:
            print(name, json.dumps(found[name]), flush=True)
    record = {
        "command": f"torchrun --nproc-per-node {size} benchmarks/refresh.py",
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "ranks": size,
        "changes": CHANGES,
        "lost": max(each["lost"] for each in found.values()),
        "alike": all(each["alike"] for each in found.values()),
        "schemes": found,
    }
    if dist.get_rank() == 0 and args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
