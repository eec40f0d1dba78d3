"""What papers state of their systems, and what the virtual clock says of the same.

    python benchmarks/papers.py

Each section below is one paper's cluster and model, put on the clock as papers_clusters
says: what is not known is assumed there, and nothing is fitted to what the paper
states. The values go to the record, and papers_page makes docs/papers.md of the record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import crossovers
import papers_page
import published_curvature as curvature
import torch
import typer
from as_published import as_published
from papers_clusters import (
    ARIES,
    BISECTION,
    DDP,
    ETHERNET,
    INFINIBAND,
    MEMORY,
    NVLINK,
    STAGING,
    START_UPS,
    TOPK,
    WHOLE,
    TopkA,
    bert,
    cluster,
    device,
    gpt2,
    log2_topk,
    rounded,
    seconds,
    selecting,
    single,
    tuned,
    with_own_head,
)

from gradtide.collectives import (
    ByNorm,
    Dense,
    Dynamic,
    Even,
    GTopK,
    OkTopk,
    PartitionedTopK,
    TopK,
    TopKA2A,
    TopkDSA,
)
from gradtide.core.ops import Group
from gradtide.core.payload import Collective, Payload
from gradtide.core.schedule import DEAR, SEQUENTIAL, WFBP
from gradtide.fusion import Fusion, MgWfbp, PerTensor
from gradtide.kfac import KFAC
from gradtide.lab.record import commit, versions
from gradtide.planner.data.presets import SLOWED
from gradtide.planner.network import Line, Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.scheme import Scheme, parse
from gradtide.selectors import Exact
from gradtide.simulate.grid import replayed
from gradtide.testing import lockstep

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/records/papers_202611.json"
PAGE = ROOT / "docs/papers.md"
Values = dict[str, float]
LI = as_published(TopKA2A, indices=False)  # the mean travels with its zeros


def topka2a() -> Values:
    """32 GPUs of 8 hosts on 10 GbE, density .02, against DDP and other top-k."""
    own, density = device("2080 Ti"), 0.02
    there = cluster(ETHERNET, 8, 4, own)
    alone = cluster(ETHERNET, 32, 1, own)
    trace, scheme = bert("large", 8 * 64, "2080 Ti"), Scheme(LI(density))
    ddp = seconds(trace, Scheme(Dense(), DDP), there)
    step = tuned(trace, scheme, there)
    found = {"ddp": ddp, "topka2a": step, "bert": ddp / step}
    found["bert_25mb"] = ddp / seconds(trace, replace(scheme, fusion=DDP), there)
    found["bert_own_cards"] = seconds(trace, Scheme(Dense(), DDP), alone) / tuned(
        trace, scheme, alone
    )
    slow = device("2080 Ti", log2_topk("V100", trace.numel))
    found["bert_sorting"] = ddp / tuned(trace, scheme, replace(there, device=slow))
    scan = selecting(trace, 4 * BISECTION / MEMORY["2080 Ti"])
    found["topka"] = tuned(scan, Scheme(TopkA(density)), there)
    rivals: dict[str, Collective] = {
        "topk": TopK(density),
        "gtopk": GTopK(density),
        "topkdsa": TopkDSA(density),
        "oktopk": OkTopk(density),
    }
    found |= {k: tuned(trace, Scheme(c), there) for k, c in rivals.items()}
    merging = device("2080 Ti", sort=log2_topk("V100", trace.numel))
    merging = replace(merging, select=slow.select)
    found["gtopk_sorting"] = tuned(
        trace, Scheme(GTopK(density)), replace(there, device=merging)
    )
    gains = []
    for tokens in (512, 1024, 2048, 4096):
        other = gpt2(tokens, "2080 Ti")
        dense = seconds(other, Scheme(Dense(), DDP), there)
        gains.append(dense / tuned(other, scheme, there))
    found |= {"gpt2_least": min(gains), "gpt2_most": max(gains)}
    found["most"] = max(found["bert"], *gains)
    sent = simulate(trace, replace(scheme, levels=1), there).sent_bytes / 4
    whole = (2 * density + 1) * trace.numel * 31 / 32
    return found | {"words": sent / whole}


def topka2a_where() -> Values:
    """Densities at which TopKA2A gets faster than gathering, slower than dense."""
    size, low, high = 32, 0.3, 0.8
    for _ in range(10):
        middle = (low + high) / 2
        faster = crossovers.seconds("topka2a", middle, size) < crossovers.seconds(
            "dense", middle, size
        )
        low, high = (middle, high) if faster else (low, middle)
    above = crossovers.crossover(("topk", "topka2a"), size)
    return {"above": above, "below": (low + high) / 2}


def oktopk() -> Values:
    """BERT on 256 P100, one a host; no overlap, one bucket, host memory: as theirs."""
    size, density = 256, 0.01
    trace = with_own_head(bert("base", 8 * 128, "P100"))
    numel, scan = trace.numel, 4 / MEMORY["P100"]
    sort = TOPK["P100"]
    # Selections are charged after backward; the clock's own would hide nothing either.
    free = replace(device("P100"), select={}, request=0.0)
    staged = replace(free, take_in=replace(free.take_in, each=8 / STAGING))
    merging = replace(free, sort=Line(each=sort))
    there = partial(Network, size, 1, ARIES, None, one_hop_ranks=0)

    def step(collective: Collective, select: float, own: Any = free) -> float:
        scheme = Scheme(collective, WHOLE, SEQUENTIAL)
        return seconds(selecting(trace, select), scheme, there(own))

    ours = step(OkTopk(density), 2 * scan + sort / 128)  # of 128 steps one sorts
    alike = step(OkTopk(density), BISECTION * scan)
    slow = replace(there(staged), inter=replace(ARIES, ring=ARIES.stretched(2).ring))
    dense = Scheme(Dense(), WHOLE, SEQUENTIAL)
    found = {
        "seconds": ours,
        "dense": step(Dense(), 0.0, staged) / ours,
        "dense_half_rate": seconds(trace, dense, slow) / ours,
        "dense_gpu": step(Dense(), 0.0) / ours,
    }
    rivals: dict[str, Collective] = {
        "topka": TopkA(density),
        "topkdsa": TopkDSA(density),
        "gtopk": GTopK(density),
    }
    for name, rival in rivals.items():
        found[name] = step(rival, sort, merging) / ours
        found[f"{name}_alike"] = step(rival, BISECTION * scan) / alike
    sent = simulate(
        trace, Scheme(OkTopk(density), WHOLE, SEQUENTIAL, levels=1), there(free)
    ).sent_bytes
    words = sent / 4 / (density * numel * (size - 1) / size)
    sparse = [found[name] for name in rivals]
    return found | {
        "words": words,
        "slowest": max(sparse),
        "fastest": min(found["dense"], *sparse),
    }


def dear_models() -> dict[str, StepTrace]:
    """Batches and models of DeAR's benchmarks on a 2080 Ti."""
    return {
        # What SPD-KFAC's authors measured for half of these batches.
        "resnet50": replayed("resnet50", 2 * 132.0),
        "densenet201": replayed("densenet201", 2 * 178.0),
        "bert_base": bert("base", 64 * 64, "2080 Ti"),
        "bert_large": bert("large", 32 * 64, "2080 Ti"),
    }


# How WFBP is fused: not at all, as MG-WFBP, as messages of Horovod, and DDP's default.
FUSIONS: Mapping[str, Fusion] = {
    "unfused": PerTensor(),
    "mg": MgWfbp(),
    "4mb": curvature.FUSED,
    "25mb": DDP,
}


def dear(model: str) -> Values:
    """One model on 64 GPUs of 16 hosts: rivals' steps in those of DeAR, tuned."""
    trace, found = dear_models()[model], {}
    for name, link in (("ethernet", ETHERNET), ("infiniband", INFINIBAND)):
        there = cluster(link, 16, 4, device("2080 Ti"))
        step = tuned(trace, Scheme(Dense(), schedule=DEAR), there)
        for rival, fusion in FUSIONS.items():
            taken = seconds(trace, Scheme(Dense(), fusion, WFBP), there)
            found[f"{name}_{rival}"] = taken / step
        found[f"{name}_tuned"] = tuned(trace, Scheme(Dense()), there) / step
        found[f"{name}_seconds"] = step
        unfused = seconds(trace, Scheme(Dense(), PerTensor(), DEAR), there)
        found[f"{name}_both_unfused"] = found[f"{name}_unfused"] * step / unfused
    theirs = Network(64, 1, START_UPS, None, device("2080 Ti"), SLOWED, one_hop_ranks=0)
    step = tuned(trace, Scheme(Dense(), schedule=DEAR), theirs)
    for rival in ("unfused", "4mb", "25mb"):
        taken = seconds(trace, Scheme(Dense(), FUSIONS[rival], WFBP), theirs)
        found[f"start_ups_{rival}"] = taken / step
    return found


def kfac(architecture: str, ffbp: float, factors: float) -> Values:
    """Distributed K-FAC, 64 GPUs: the cluster and the rivals of published_curvature."""
    trace = curvature.trace(architecture, ffbp, factors)
    there = curvature.network()

    def step(config: KFAC | None, method: str = "") -> float:
        scheme = Scheme(Dense(), curvature.FUSED, WFBP, config, levels=1)
        if not method:
            return simulate(trace, scheme, there).step
        parts = partial(curvature.Published, method)
        return simulate(trace, scheme, there, parts=parts).step

    d, mpd, spd = (step(config, name) for name, config in curvature.SCHEMES.items())
    pad, sgd = step(KFAC("pad", workers=1.0)), step(None)
    rare = step(KFAC("mpd", factor_every=10, inverse_every=100))
    return {
        "spd_d": d / spd,
        "spd_mpd": mpd / spd,
        "pad_d": d / pad,
        "pad_mpd": mpd / pad,
        "pad_spd": spd / pad,
        "rare_sgd": rare / sgd,
        # Of SGD's steps, where K-FAC takes 82 and 75 % of SGD's time.
        "steps_most": 0.82 * sgd / rare,
        "steps_least": 0.75 * sgd / rare,
    }


def selection() -> Values:
    """VGG-16 on 8 V100 of one host: the share of the selection, and who searches."""
    numel, density = 14_728_266, 0.001
    forward, backward, rest = 8.73e-3, 24.29e-3, 41.67e-3
    trace = single(numel, forward, backward, rest)
    own = device("V100")
    sort = Line(each=log2_topk("V100", numel))
    own = replace(own, select={**own.select, "Exact": sort})
    there = Network(1, 8, NVLINK, NVLINK, own, one_hop_ranks=0)

    def step(collective: Collective) -> tuple[float, float]:
        scheme = Scheme(collective, WHOLE, SEQUENTIAL, levels=1)
        found = simulate(trace, scheme, there)
        return found.step, found.select

    dense, _ = step(Dense())
    taken, select = step(TopK(density, select=Exact()))
    found = {"share": select / taken, "slower": taken / dense}
    rows = {"micro": Even(), "exdyna": Dynamic(), "deft": ByNorm()}
    for name, partition in rows.items():
        taken, select = step(PartitionedTopK(density, partition=partition))
        found[f"{name}_share"], found[f"{name}_slower"] = select / taken, taken / dense
    return found


def build_up() -> Values:
    """How many entries all ranks together deliver, in k: real flows in lockstep."""
    numel, density = 1 << 16, 0.01
    found = {}
    for size in (4, 16):
        rivals: dict[str, Collective] = {
            "topk": TopK(density),
            "micro": PartitionedTopK(density, partition=Even()),
            "exdyna": PartitionedTopK(density, partition=Dynamic()),
            "deft": PartitionedTopK(density, partition=ByNorm()),
        }
        for name, collective in rivals.items():
            union = _delivered(collective, size, numel)
            found[f"{name}_{size}"] = union / (density * numel)
    return found


def _delivered(collective: Collective, size: int, numel: int) -> int:
    """Entries of the mean in the fourth step; every rank has gradients of its own."""
    groups = [Group(rank, size) for rank in range(size)]
    draws = [torch.Generator().manual_seed(rank) for rank in range(size)]
    flats = [torch.zeros(numel) for _ in groups]
    loads = [Payload(flat, [flat]) for flat in flats]
    for _ in range(4):
        for flat, draw in zip(flats, draws, strict=True):
            flat += torch.randn(numel, generator=draw).pow(3)
        rows = zip(loads, groups, strict=True)
        means = lockstep([collective.reduce(*row) for row in rows])
    return int(means[0].count_nonzero())


def rounds() -> Values:
    """Bytes of rounds and of one bit; no clock is needed for a ratio of them."""
    trace, size = replayed("bert-base", 300.0), 8
    there = Network.ideal(size, 1, 1e9)

    def sent(text: str) -> float:
        return simulate(trace, parse(text), there).sent_bytes

    dense, half = sent("wfbp"), sent("wfbp(wire='fp16')")
    message = 30 * sent("sparseloco(every=30)") / (size - 1)
    sign = half / sent("wfbp(wire='sign')")
    return {
        "diloco": dense / sent("diloco(every=500)"),
        "streaming": half / sent("streaming_diloco(every=100, fragments=5)"),
        "sparseloco": 4 * trace.numel / message,
        "sign": sign,
        "onebit": 1 / (0.15 + 0.85 / sign),  # after 15 % of dense steps
    }


def lab() -> Values:
    """What records of the lab, of fewer ranks, say of the same."""
    volume = _results("volume_resnet50_8x1gbit")
    sparse, mlp = (
        _results("sparse_resnet50-300ms_8x100mbit"),
        _results("sparse_mlp_4x100mbit"),
    )
    late = _results("dear_resnet50-4300ms_8x250mbit")
    numel, share = 25_557_032, 7 / 8
    words = {name: row["interface_bytes"] / 4 / share for name, row in volume.items()}
    learning = json.loads(_record("curvature_learning").read_text())["best"]["digits"]
    contest = json.loads(_record("curvature_contest_4x1gbit").read_text())["results"]
    steps = {
        name: contest[f"{name})"]["step_seconds"]
        for name in (f"mpd_kfac({PLAIN}", f"pad_kfac({PLAIN}, workers=1.0")
    }
    mpd, pad = steps.values()
    return {
        "topka2a_words": words["topka2a"] / (1.02 * numel),
        "oktopk_words": words["oktopk"] / (0.01 * numel),
        "topka2a_ddp": sparse["topka2a"]["speedup_over_ddp"],
        "oktopk_ddp": sparse["oktopk"]["speedup_over_ddp"],
        "dear_ddp": late["dear"]["speedup_over_ddp"],
        "pad_mpd": mpd / pad,
        "kfac_steps": learning["kfac"]["median"] / learning["sgd"]["median"],
        **{f"{n}_density": mlp[n]["density"] / 0.01 for n in ("micro", "exdyna")},
        "deft_density": mlp["deft"]["density"] / 0.01,
    }


PLAIN = "damping=0.003, decay=0.95, kl_clip=0.001"


def _record(name: str) -> Path:
    return RECORD.with_name(f"{name}_202611.json")


def _results(name: str) -> dict[str, Any]:
    """The rows of a comparison, by scheme."""
    found = json.loads(_record(name).read_text())["results"]
    return {row["scheme"]: row for row in found}


SECTIONS: Mapping[str, Callable[[], Values]] = {
    "topka2a": topka2a,
    "topka2a_where": topka2a_where,
    "oktopk": oktopk,
    "dear_resnet50": partial(dear, "resnet50"),
    "dear_densenet201": partial(dear, "densenet201"),
    "dear_bert_base": partial(dear, "bert_base"),
    "dear_bert_large": partial(dear, "bert_large"),
    # Forward and backward, and factors, as their authors measured them.
    "kfac_resnet50": partial(kfac, "resnet50", 0.132, 0.2115),
    "kfac_resnet152": partial(kfac, "resnet152", 0.114, 0.1927),
    "selection": selection,
    "build_up": build_up,
    "rounds": rounds,
    "lab": lab,
}


def values(names: tuple[str, ...] = tuple(SECTIONS)) -> dict[str, Values]:
    """Every section's values, as a record has them."""
    return {name: rounded(SECTIONS[name]()) for name in names}


def main(
    out: Annotated[Path, typer.Option(help="Where the record goes.")] = RECORD,
    page: Annotated[Path, typer.Option(help="Where the page goes.")] = PAGE,
    again: Annotated[bool, typer.Option(help="Run, or take the record.")] = True,
) -> None:
    """Run all sections, write the record, and the page that is made of it."""
    if again:
        head: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
        head |= {"commit": commit(), "versions": versions(), "values": values()}
        out.write_text(json.dumps(head, indent=1) + "\n")
    page.write_text(papers_page.page(json.loads(out.read_text())["values"]))


if __name__ == "__main__":
    typer.run(main)
