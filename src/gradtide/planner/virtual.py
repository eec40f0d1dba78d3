"""What a training step takes, as the virtual clock has it.

[Note: Periods] With K-FAC not all steps are alike: those that make new inverses, those
that only take new factors in, and all others. Of each block of steps that begins with
new factors, the first three are run, and stand for the whole period. In rounds of
several steps only some exchange anything: a whole round is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradtide.planner.clock import cost
from gradtide.planner.clock.intervals import union, without
from gradtide.planner.clock.limits import limit_seconds
from gradtide.planner.network import Network
from gradtide.planner.rehearsal.rehearsal import exchange_seconds as exchange_seconds
from gradtide.planner.steps.curvature import MakeParts
from gradtide.planner.steps.parts import Parts
from gradtide.planner.steps.stages import Stages, exposed
from gradtide.planner.steps.training import Run as Run
from gradtide.planner.trace import StepTrace
from gradtide.scheme import Scheme, with_levels


@dataclass(frozen=True)
class Prediction:
    """One step, in seconds; a mean over the steps after the first.

    `forward`, `backward` (with the loss) and `apply` (the optimizer, and K-FAC's
    preconditioning) are the training thread's own; `exposed` is what it waits for the
    queue. `select` is what flows take up to their first request, and `exchange` what
    requests are waited for, on the queue, mostly hidden. `processor` is what a rank's
    processor works, hidden or not: where ranks share too few to do that within a step,
    it is `crowded` seconds longer, which count as exposed. `limit` is what no step of
    this schedule can be shorter than: compute and wire at full rate, without any
    start-up ([Note: Limits]); with K-FAC, none is known but 0.

    With K-FAC, `breakdown` says what a step consists of and `busy` how long each stage
    was at work, hidden or not; of inversions, those of the rank that has most.
    """

    step: float
    forward: float
    backward: float
    select: float
    exchange: float
    apply: float
    exposed: float
    sent_bytes: float  # of payload, by a rank
    limit: float
    buckets: int
    processor: float = 0.0
    crowded: float = 0.0
    breakdown: Stages | None = None
    busy: Stages | None = None


def simulate(
    trace: StepTrace,
    scheme: Scheme,
    network: Network,
    steps: int = 3,
    *,
    parts: MakeParts = Parts,
) -> Prediction:
    """A step of training `trace` by `scheme` on `network`, as it goes on for long.

    `steps` are run, 2 or more (with K-FAC or rounds: periods, of rounds two); the first
    one is left out. Pure and deterministic. `parts` has another program's K-FAC in the
    place of gradtide's. Raises ValueError for K-FAC where the trace or the network does
    not know what it needs, and whatever the scheme's fusion raises.
    """
    if steps < 2:
        raise ValueError(f"steps={steps}: the first is left out, so 2 or more")
    # As `replicate` would find them on such a network.
    scheme = with_levels(scheme, network.members)
    run = Run(trace, scheme, network, parts)
    if scheme.preconditioner is not None:
        run.step()  # by which K-FAC is planned
    if scheme.schedule.rounds:
        steps = 2
    period = _period(scheme)
    found = [_measured(run, step) for _ in range(steps) for step, _ in period]
    weights = [weight / (steps - 1) for _, weight in period] * (steps - 1)
    return _summary(run, found[len(period) :], weights)


Measures: TypeAlias = dict[str, float]


def _measured(run: Run, step: int) -> tuple[Measures, Measures, Measures]:
    """Seconds and bytes of one step; of stages, shares and how long they are busy.

    `step` is K-FAC's; without it there are no stages.
    """
    actions, transport, trace = run.actions, run.transport, run.trace
    second, seen = actions.second, actions.engine.telemetry
    # What the first forward waits for may have been sent in the step before.
    sent_before, inverted = list(seen.records), []
    seen.clear()
    if second is not None:
        inverted = second.queues.clear()
        second.kfac.jump(step)
        second.kfac.clear()
    actions.spent = spent = dict.fromkeys(actions.spent, 0.0)
    start, sent = transport.clock(), transport.payload_bytes
    worked = transport.processor
    run.step()
    end = transport.clock()
    seconds = {
        "step": end - start,
        **spent,
        "select": seen.select_seconds,
        "exchange": sum(r.end - r.start for r in seen.records),
        "exposed": seen.exposed_seconds,
        "processor": trace.processor + transport.processor - worked,
        "idle": actions.idle,
        "sent_bytes": transport.payload_bytes - sent,
        "before": sum(r.payload_bytes for r in seen.records if not r.second),
        "after": sum(r.payload_bytes for r in seen.records if r.second),
    }
    if second is None:
        return seconds, {}, {}
    told, ffbp = second.told, trace.forward + trace.loss + trace.backward
    own = {"ffbp": ffbp, "factor_comp": told.seconds - told.slowed}
    own |= exposed(
        seen.waited,
        without([(start, end)], union(seen.waited)),
        spent["forward"] + spent["backward"] - ffbp + told.slowed,
        [*sent_before, *seen.records],
        [*inverted, *second.queues.busy],
    )
    told.slowed = 0.0
    return seconds, own, {"ffbp": ffbp, **second.kfac.stages()._asdict()}


def _mean(found: Sequence[Measures], weights: Sequence[float]) -> Measures:
    return {
        name: sum(w * one[name] for w, one in zip(weights, found, strict=True))
        for name in found[0]
    }


def _summary(
    run: Run,
    found: Sequence[tuple[Measures, Measures, Measures]],
    weights: Sequence[float],
) -> Prediction:
    mean, own, busy = (_mean(part, weights) for part in zip(*found, strict=True))
    before, after, idle = (mean.pop(name) for name in ("before", "after", "idle"))
    breakdown, at_work = (
        Stages(**part, update=mean["apply"]) if part else None for part in (own, busy)
    )
    # Ranks that share processors leave them idle at the same time.
    needed = idle + run.transport.network.occupied(mean["processor"])
    crowded = mean["crowded"] = max(needed - mean["step"], 0.0)
    for name in ("step", "exposed"):
        mean[name] += crowded
    return Prediction(
        **mean,
        limit=_limit(run, before, after, busy.get("factor_comp")),
        buckets=len(run.actions.buckets),
        breakdown=breakdown,
        busy=at_work,
    )


def _period(scheme: Scheme) -> list[tuple[int, float]]:
    """Steps of K-FAC or of a round, and their shares of all: see [Note: Periods]."""
    config, every = scheme.preconditioner, scheme.schedule.every
    if config is None:
        return [(0, 1 / every)] * every
    length, every = config.inverse_every, config.factor_every
    blocks = [(0, 1)] if length == every else [(0, 1), (every, length // every - 1)]
    return [
        (first + i, times * (1 if i < 2 else every - 2) / length)
        for first, times in blocks
        for i in range(min(every, 3))
    ]


def _limit(run: Run, first: float, second: float, factors: float | None) -> float:
    """See [Note: Limits]; a rank sends its bytes at the ring's rate.

    With K-FAC, whose factors take so long, both may hide behind anything: the longer.
    """
    trace, network = run.trace, run.transport.network
    link = network.inter if network.hosts > 1 else network.intra or cost.FREE
    wire = first * link.ring.beta, second * link.ring.beta
    forward = trace.forward + trace.loss
    if factors is not None:
        return max(forward + trace.backward + factors, sum(wire))
    return limit_seconds(forward, trace.backward, wire, run.scheme.schedule)
