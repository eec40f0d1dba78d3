"""What every rank of a comparison does, and what rank 0 makes of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from gradtide.lab.contestants import Contestant, enter
from gradtide.lab.devices import backend
from gradtide.lab.job import Tell, gathered, joined, silent
from gradtide.lab.record import Result
from gradtide.lab.spec import Spec
from gradtide.lab.summary import computing, summarise, typical, with_speedups
from gradtide.lab.timeline import Span, spans
from gradtide.lab.trial import Trial, compete
from gradtide.lab.workloads.workload import Timing


class Outcome(NamedTuple):
    """What rank 0 hands to whoever reports; `compute` is what a step takes alone."""

    results: list[Result]
    timelines: dict[str, list[Span]]
    compute: Timing


def measure(spec: Spec, tell: Tell) -> Outcome | None:
    """Run the comparison on this rank; the outcome on rank 0, None elsewhere.

    Expects torchrun's environment. Rank 0 tells after each step whose it was.
    """
    with joined(backend(spec.device)) as (rank, size):
        contestants = [enter(name, spec.build(rank), size) for name in spec.schemes]
        if contestants[0].workload.waits is None:
            # Nobody to average with: the compute that the others are held against.
            own = spec.build(rank)
            contestants.append(Contestant("compute alone", own, own.model))
        # The shaped link's name; nothing is shaped, or counted, on loopback.
        shaped = os.environ.get("GRADTIDE_LAB_RATE")
        interface = os.environ.get("GRADTIDE_LAB_INTERFACE", "") if shaped else ""
        report = silent if rank else tell
        trials = compete(contestants, spec.warmup, spec.blocks(), interface, report)
        by_rank = gathered(trials)
        for contestant in contestants:
            contestant.leave()
    return None if by_rank is None else _outcome(spec, contestants, by_rank)


def _outcome(
    spec: Spec, contestants: Sequence[Contestant], by_rank: Sequence[Sequence[Trial]]
) -> Outcome:
    """`by_rank` holds every rank's trials in the order of the contestants."""
    by_contestant = list(zip(*by_rank, strict=True))
    compute = computing(contestants[0], by_contestant[-1])
    results, timelines = [], {}
    # Compute alone, where it was measured, is the last: no row of its own.
    rows = zip(spec.schemes, contestants, by_contestant, strict=False)
    for name, contestant, trials in rows:
        results.append(summarise(spec, contestant, trials, compute))
        seen, step = trials[0], typical(trials[0], spec.blocks()[-1])
        alone = compute.backward if contestant.engine is None else None
        timelines[name] = spans(step, seen.applied, seen.records, alone)
    return Outcome(with_speedups(results), timelines, compute)
