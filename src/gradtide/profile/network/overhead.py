"""What sparse exchanges cost a processor beside what is counted: found by training.

[Note: Left out] The virtual clock counts what flows do to memory and what requests
cost, and each was timed alone. Hooks, the engine, thresholds that are looked for, and
memory that others have pushed out of the caches are left out. So a made-up model is
trained by each of `SCHEMES`, with all that training brings, and the processor's seconds
are held against the predicted ones. If ranks keep their processors busier there than
requests and work in turn did, they can: the network's `occupancy` grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist

from gradtide.lab.job import Tell, from_everybody
from gradtide.lab.workloads.replay import Layer, Pace, Pool, carrier
from gradtide.lab.workloads.shapes import Unit
from gradtide.lab.workloads.workload import Timing
from gradtide.planner.measuring.medians import across
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.profile.trace.run import Effort, trace
from gradtide.profile.trace.subject import Subject
from gradtide.replica import replicate
from gradtide.scheme import parse

SCHEMES = ("topk", "topka2a", "oktopk")
NUMELS = (1 << 8, 1 << 16, 1 << 8, 1 << 18, 1 << 12, 1 << 20)  # of tensors, in turn
TURNS = 12  # 96 tensors, 16 million elements: far more than caches hold
WARM, TIMED = 3, 6  # steps
LONGEST = 20.0  # seconds of a scheme's steps: on slower links it is left out
LEAST, MOST = 0.5, 4.0  # factors beyond are accidents


def made(rank: int, turns: int = TURNS) -> Layer:
    """Tensors of all sizes, and gradients that are partly alike on all ranks."""
    shapes = tuple((f"tensor{i}", (n,)) for i, n in enumerate(NUMELS * turns))
    pool = Pool(max(NUMELS), seed=0, rank=rank)
    return Layer(Unit("made up", shapes, 0), Timing(0.0, 0.0), 0, pool, Pace())


def with_overhead(network: Network, tell: Tell, turns: int = TURNS) -> Network:
    """`network` with the `overhead` and `occupancy` of training; a collective call.

    Of ranks that have processors enough nothing is measured.
    """
    if network.processors is None or network.processors >= 1:
        return network
    model = made(dist.get_rank(), turns)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    subject = Subject(
        "made up", model, optimizer, lambda step: model(carrier(step)[0]).sum()
    )
    tell("training a made-up model, alone")
    traces = from_everybody(trace(subject, Effort(TIMED, WARM)))
    found: dict[str, float] = {}
    busiest = network.occupancy
    for name in SCHEMES:
        tell(f"training a made-up model by {name}")
        if trained := _trained(name, subject, traces, network):
            factor, busy = trained
            kind = type(parse(name).collective).__name__
            found[kind] = min(max(factor, LEAST), MOST)
            busiest = max(busiest, min(busy / network.processors, 1.0))
    device = replace(network.device, overhead=found)
    return replace(network, device=device, occupancy=busiest)


def _trained(
    name: str, subject: Subject, traces: list[StepTrace], network: Network
) -> tuple[float, float] | None:
    """What training by a scheme shows, or None if it takes too long.

    Measured over predicted seconds of an exchange, and the share of a processor that a
    rank used.
    """
    alone = across(traces)
    told = simulate(alone, parse(name), network)
    # Two machines may round alike numbers differently: rank 0's count.
    step, predicted = from_everybody((told.step, told.processor - alone.processor))[0]
    if step * (WARM + TIMED) > LONGEST:
        return None
    # Traces were taken alone: the ranks' optimizers remember different gradients.
    sync = replicate(subject.model, subject.optimizer, name, check_every=0)
    try:
        _steps(subject, WARM, sync.flush)
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        _steps(subject, TIMED, sync.flush)
        end = time.perf_counter(), time.process_time()
    finally:
        sync.remove()
    passed, worked = (
        fmean(from_everybody((b - a) / TIMED)) for a, b in zip(begin, end, strict=True)
    )
    measured = worked - fmean(t.processor for t in traces)
    return from_everybody((measured / predicted, worked / passed))[0]


def _steps(subject: Subject, count: int, flush: Callable[[], None]) -> None:
    for step in range(count):
        subject.loss(step).backward()  # type: ignore[no-untyped-call]
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    flush()
