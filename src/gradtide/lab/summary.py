"""From what the ranks measured to what is reported. Pure: no clocks, no processes.

[Note: The breakdown] A step of one rank is cut into forward, backward, exposed and
apply, which sum to it. Exposed is the time that the training thread waited for
communication, wherever it did; apply is the optimizer's step (with clipping, scheduler
and zeroing of gradients), and an update that was deferred into the forward counts
there, too.

DDP does not say how long it waited. Its backward alone is taken from a reference that
trains in the same rounds without anybody to average with (from what was asked, where
compute is replayed); what DDP's backward takes beyond that is called exposed, and
contains DDP's own copying, too. So does its forward, if there are buffers to broadcast.

A step's time, and its parts, are means over the ranks. So steps add up to the time that
passed: a rank that ends one late begins the next one late, and the time of the slowest
in each would be counted twice. Of rounds of several steps, each is its round's mean.
Reported are the median of the times, and the means of the parts over the middle half of
the steps by time, which add up to the median but for rounding and skew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gradtide.core.telemetry import Interval
from gradtide.kfac.stages import Stages
from gradtide.lab.contestants import Contestant
from gradtide.lab.record import Result
from gradtide.lab.spec import Spec
from gradtide.lab.trial import Step, Trial
from gradtide.lab.workloads.workload import Timing
from gradtide.planner.clock.limits import limit_seconds


class Parts(NamedTuple):
    """Seconds of one step of one rank; the last four sum to the first."""

    step: float
    forward: float
    backward: float
    exposed: float
    apply: float


def parts(step: Step, applied: Sequence[Interval]) -> Parts:
    """The step's breakdown; `applied` are the deferred updates of any steps."""
    forward = step.forward.time - step.begin.time
    deferred = sum(
        max(0.0, min(end, step.forward.time) - max(start, step.begin.time))
        for start, end in applied
    )
    waited = step.waited()
    return Parts(
        step=step.end.time - step.begin.time,
        forward=forward - waited[0] - deferred,
        backward=step.backward.time - step.forward.time - waited[1],
        exposed=sum(waited),
        apply=step.end.time - step.backward.time - waited[2] + deferred,
    )


def computing(contestant: Contestant, reference: Sequence[Trial]) -> Timing:
    """What a step computes when nobody communicates: measured, or asked of a replay.

    `reference` holds every rank's trial of compute alone; empty for a replay.
    """
    if contestant.workload.waits is not None:
        return contestant.workload.waits
    split = _typical_parts(reference)
    return Timing(split.forward, split.backward)


def summarise(
    spec: Spec, contestant: Contestant, trials: Sequence[Trial], alone: Timing
) -> Result:
    """One contestant's row; `trials` holds every rank's. Without the speed-up."""
    every = contestant.schedule.every
    times = [step.step for step in _together(trials, every)]
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    split = _typical_parts(trials, every)
    if contestant.engine is None:
        split = _without_waits(split, contestant, alone)
    payload, gathered, interface = (
        _per_step(trials, name)
        for name in ("payload_bytes", "gathered_bytes", "interface_bytes")
    )
    limit = None
    if spec.rate is not None and spec.hosts > 1:  # ranks of one host share no link
        wire = 8 * (payload - gathered) / spec.rate, 8 * gathered / spec.rate
        limit = limit_seconds(*alone, wire, contestant.schedule)
    densities = [t.selected / t.offered for t in trials if t.offered]
    loss = float(np.mean([trial.loss for trial in trials]))
    return Result(
        scheme=contestant.name,
        step_seconds=median,
        step_seconds_p25=low,
        step_seconds_p75=high,
        payload_bytes=payload,
        interface_bytes=interface and interface / spec.ranks_per_host,
        cpu_seconds=_per_step(trials, "cpu_seconds"),
        forward_seconds=split.forward,
        backward_seconds=split.backward,
        exposed_seconds=split.exposed,
        apply_seconds=split.apply,
        select_seconds=_per_step(trials, "select_seconds"),
        density=float(np.mean(densities)) if densities else None,
        limit_seconds=limit,
        final_loss=loss if contestant.workload.waits is None else None,
        evaluation=trials[0].evaluation,
        became=contestant.became,
        stages=_stages(trials, split),
    )


def with_speedups(results: Sequence[Result]) -> list[Result]:
    """The results, each with its speed-up over `ddp`, if `ddp` took part."""
    base = next((r.step_seconds for r in results if r.scheme == "ddp"), None)
    if base is None:
        return list(results)
    return [replace(r, speedup_over_ddp=base / r.step_seconds) for r in results]


def typical(trial: Trial, num_last: int) -> Step:
    """Of the last `num_last` steps, the one whose time is nearest their median."""
    last = trial.timed[-num_last:]
    times = [step.end.time - step.begin.time for step in last]
    middle = float(np.median(times))
    return min(zip(times, last, strict=True), key=lambda pair: abs(pair[0] - middle))[1]


def _together(trials: Sequence[Trial], every: int = 1) -> list[Parts]:
    """Every timed step, or round of `every`, as the mean over it and the ranks."""
    ranks = [[parts(step, t.applied) for step in t.timed] for t in trials]
    steps = [np.mean(step, axis=0) for step in zip(*ranks, strict=True)]
    rounds = [steps[i : i + every] for i in range(0, len(steps), every)]
    return [Parts(*np.mean(each, axis=0).tolist()) for each in rounds]


def _typical_parts(trials: Sequence[Trial], every: int = 1) -> Parts:
    """Means over the middle half of the steps, or rounds, by time."""
    steps = sorted(_together(trials, every))
    cut = len(steps) // 4
    return Parts(*np.mean(steps[cut : len(steps) - cut], axis=0).tolist())


def _without_waits(split: Parts, contestant: Contestant, compute: Timing) -> Parts:
    """DDP's parts, with what it takes beyond computing alone as exposed."""
    backward = min(split.backward, compute.backward)
    # Buffers are broadcast at the start of forward; without any, forward is computing.
    buffers = any(True for _ in contestant.workload.model.buffers())
    forward = min(split.forward, compute.forward) if buffers else split.forward
    waited = split.forward - forward + split.backward - backward
    return split._replace(forward=forward, backward=backward, exposed=waited)


def _stages(trials: Sequence[Trial], split: Parts) -> dict[str, float] | None:
    """Seconds of a step in the stages of the K-FAC papers, means over the ranks.

    Factors are computed in forward and backward, and counted apart here.
    """
    found = [trial.stages for trial in trials if trial.stages is not None]
    if not found:
        return None
    sums = zip(Stages._fields, zip(*found, strict=True), strict=True)
    means = {name: float(np.mean(each)) / trials[0].num_steps for name, each in sums}
    computing = split.forward + split.backward - means["factor_comp"]
    return {"forward_backward": max(0.0, computing), **means}


def _per_step(trials: Sequence[Trial], name: str) -> Any:
    """The mean over ranks and steps of what trials sum up; None where nobody does."""
    sums = [found for t in trials if (found := getattr(t, name)) is not None]
    return float(np.mean(sums)) / trials[0].num_steps if sums else None
