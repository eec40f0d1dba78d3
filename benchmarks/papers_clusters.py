"""The clusters and models of papers, as the virtual clock takes them: see papers.py.

Every constant stands here once, with where it is from. None was chosen for a row of
papers.py: those of 10 GbE, InfiniBand and PCIe, of a request and of interference are
those with which published.py meets other figures, the rest is from data sheets, from
measurements that others published, or a round number that is said to be assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtide.core.ops import AllGather, Flow, Group
from gradtide.core.payload import Payload, Traits
from gradtide.fusion import BinarySearch, BySize, best, search
from gradtide.planner import trace as traces
from gradtide.planner.data.presets import SLOWED, STARVED
from gradtide.planner.network import Device, Line, Link, Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.scheme import Scheme
from gradtide.simulate.grid import replayed

# - Links ------------------------------------------------------------------------------

# Seconds of a message's start, and of a byte. 10 GbE carries 92 % of its rate.
ETHERNET = Link.of(38e-6, 1.08 / 1.25e9)
INFINIBAND = Link.of(5.2e-6, 1 / 12.5e9)
PCIE = Link.of(5.2e-6, 2.11e-10)
# Cray Aries by its data sheet, 10 GB/s a node; the start is that of a call from Python.
ARIES = Link.of(5e-6, 1 / 10e9)
# One NVLink 2 by its data sheet; the start is that of NCCL's kernels, assumed.
NVLINK = Link.of(10e-6, 1 / 25e9)

# 64 GPUs on 10 GbE as the authors of DeAR had it in their program: an all-reduce, 126
# messages in a row, begins with 7.04 ms. (Their seconds of a byte are fewer than the
# wire allows, so these stay ours.)
START_UPS = Link.of(7.04e-3 / 126, 1.08 / 1.25e9)

# - Devices ----------------------------------------------------------------------------

# Data sheets: bytes a second of memory; operations a second in fp32.
MEMORY = {"2080 Ti": 616e9, "V100": 900e9, "P100": 732e9}
PEAK = {"2080 Ti": 13.45e12, "V100": 14.0e12, "P100": 9.3e12}
STAGING = 11e9  # bytes a second over PCIe 3.0 x 16, each way
LAUNCH = 1e-5  # seconds of a kernel's start: assumed
REQUEST = 1.2e-4  # seconds of the software for a request
BISECTION = 25  # passes over a bucket: a threshold by bisection, as MSTopK has it
SORTED = 1e-9  # seconds to put an entry in order: a billion a second, assumed
# Seconds of an element in torch.topk of those years: a fit of the authors of OMGS-SGD
# on a V100, times log2 of the length; and a report on a P100 (pytorch#22812).
TOPK = {"V100": 5.0e-10, "P100": 12.8e-9}


def device(name: str, selecting: float | None = None, sort: float = SORTED) -> Device:
    """A GPU; `selecting` is seconds for each element, without it that of bisection."""
    memory = MEMORY[name]
    if selecting is None:
        selecting = 4 * BISECTION / memory
    return Device(
        take_in=Line(LAUNCH, 8 / memory),
        select={"Threshold": Line(each=selecting)},
        scatter=Line(each=64 / memory),  # a sector that is read, and written
        sort=Line(each=sort),
        optimizer=Line(each=11 * 4 / memory),
        request=REQUEST,
    )


def cluster(link: Link, hosts: int, local: int, own: Device) -> Network:
    """One ring through all GPUs, as NCCL has it; no messages of one hop."""
    there = Network(hosts, local, link, PCIE, own, SLOWED, one_hop_ranks=0)
    return replace(there, starved=STARVED)


# - Models -----------------------------------------------------------------------------

# Seconds of forward and backward on one V100 in fp32 (ddl-benchmarks, as in
# published.py), and the tokens of a batch.
V100 = {"bert-base": (0.3008, 64 * 64), "bert-large": (0.1633, 8 * 64)}


def on(name: str, seconds: float) -> float:
    """What takes so many seconds on a V100 takes this elsewhere: by peak rates."""
    return seconds * PEAK["V100"] / PEAK[name]


def bert(size: str, tokens: int, gpu: str) -> StepTrace:
    """BERT with its heads, with a batch of so many tokens."""
    seconds, known = V100[f"bert-{size}"]
    milliseconds = 1e3 * on(gpu, seconds) * tokens / known
    return replayed(f"bert-{size}-pretraining", milliseconds)


def gpt2(tokens: int, gpu: str) -> StepTrace:
    """GPT-2 of 124 M, as fast as BERT-Large by parameters times tokens."""
    seconds, known = V100["bert-large"]
    large = replayed("bert-large-pretraining", 1.0).numel
    each = on(gpu, seconds) / known * replayed("gpt2", 1.0).numel / large
    return replayed("gpt2", 1e3 * each * tokens)


def with_own_head(trace: StepTrace) -> StepTrace:
    """BERT-Base whose output matrix is not its table of words: 133,547,324 elements."""
    numel = 30522 * 768
    head = traces.Unit("decoder", numel, 4, 0.0, 0.0, 0.0, (30522, 768))
    order = (*(i + 1 for i in trace.forward_order), 0)
    return replace(trace, units=(head, *trace.units), forward_order=order)


def single(numel: int, forward: float, backward: float, rest: float) -> StepTrace:
    """A model whose gradients travel in one piece, after backward."""
    unit = traces.Unit("all", numel, 4, forward, backward, 0.0)
    return StepTrace("one piece", (unit,), 0.0, loss=rest)


# - Runs -------------------------------------------------------------------------------

WHOLE = BySize(1e6, ends=1e6, pieces=1)  # everything in one bucket
DDP = BySize(25.0, ends=25.0, pieces=1)  # PyTorch's default


def seconds(trace: StepTrace, scheme: Scheme, network: Network) -> float:
    return simulate(trace, replace(scheme, levels=1), network).step


def tuned(trace: StepTrace, scheme: Scheme, network: Network) -> float:
    """The step with buckets of the best size that the binary search finds."""

    def of(fusion: Any) -> float:
        return seconds(trace, replace(scheme, fusion=fusion), network)

    return best(search(BinarySearch(12), trace.nbytes, of)).seconds


@dataclass(frozen=True)
class TopkA:
    """Everybody's k entries for everybody as published, also where that does not pay.

    An entry is a word of index and one of value. (gradtide's `TopK` sends a bucket
    densely that would not get shorter.)
    """

    density: float
    traits = Traits(depends_on="size")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat = payload.flat
        k = round(self.density * len(flat))
        found = yield AllGather(flat.new_empty(2 * k))
        where = torch.empty(group.size * k, dtype=torch.int64, device=flat.device)
        flat.index_add_(0, where, found.flatten()[: len(where)])
        return flat


def selecting(trace: StepTrace, each: float) -> StepTrace:
    """The same step, and after backward a selection of so long for each element."""
    return replace(trace, loss=trace.loss + each * trace.numel)


def log2_topk(name: str, numel: int) -> float:
    """Seconds of an element of torch.topk among `numel`, as it was."""
    return TOPK[name] * math.log2(numel)


def rounded(found: Mapping[str, float]) -> dict[str, float]:
    """As a record has them: ten digits, which no order of sums moves."""
    return {name: float(f"{value:.10g}") for name, value in found.items()}
