"""What a training step takes, as the virtual clock has it.

[Note: Periods] With K-FAC not all steps are alike: those that make new inverses, those
that only take new factors in, and all others. Of each block of steps that begins with
new factors, the first three are run, and stand for the whole period.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from gradtide.kfac import KFAC
from gradtide.plan import cost
from gradtide.plan.actions import Spent
from gradtide.plan.curvature import MakeParts
from gradtide.plan.intervals import union, without
from gradtide.plan.network import Network
from gradtide.plan.parts import Parts
from gradtide.plan.played import exchange_seconds as exchange_seconds
from gradtide.plan.stages import Stages, exposed
from gradtide.plan.trace import StepTrace
from gradtide.plan.training import Run as Run
from gradtide.plan.transport import VirtualTransport as VirtualTransport
from gradtide.scheme import Scheme


@dataclass(frozen=True)
class Prediction:
    """One step, in seconds; a mean over the steps after the first.

    `forward`, `backward` (with the loss) and `apply` (the optimizer, and K-FAC's
    preconditioning) are the training thread's own; `exposed` is what it waits for the
    lane. `select` is what flows take up to their first request, and `exchange` what
    requests are waited for, on the lane, mostly hidden. `processor` is what a rank's
    processor works, hidden or not: where ranks share too few to do that within a step,
    it is `crowded` seconds longer, which count as exposed. `limit` is what no step of
    this schedule can be shorter than: compute and wire at full rate, without any
    start-up (`gradtide.lab.limits`); with K-FAC, none is known but 0.

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

    `steps` are run, 2 or more (with K-FAC: periods); the first one is left out. Pure
    and deterministic. `parts` has another program's K-FAC in the place of gradtide's.
    Raises ValueError for a collective that cannot be rehearsed, for K-FAC where the
    trace or the network does not know what it needs, and whatever the scheme's fusion
    raises.
    """
    if steps < 2:
        raise ValueError(f"steps={steps}: the first is left out, so 2 or more")
    run = Run(trace, scheme, network, parts)
    run.step()
    if run.actions.second is None:
        found = [_measured(run, None) for _ in range(steps - 1)]
        return _summary(run, found, [1 / (steps - 1)] * (steps - 1))
    period = _period(run.actions.second.kfac.config)
    found = [_measured(run, step) for _ in range(steps) for step, _ in period]
    weights = [weight / (steps - 1) for _, weight in period] * (steps - 1)
    return _summary(run, found[len(period) :], weights)


Measures: TypeAlias = dict[str, Any]


def _measured(run: Run, step: int | None) -> Measures:
    """Seconds and bytes of one step; `step`: of K-FAC."""
    actions, clock = run.actions, run.transport.clock
    second, seen = actions.second, actions.engine.telemetry
    # What the first forward waits for may have been sent in the step before.
    sent_before, inverted = list(seen.records), []
    if second is not None and step is not None:
        inverted = second.queues.clear()
        second.kfac.jump(step)
        second.kfac.clear()
    else:
        seen.clear()
    actions.spent, start, sent = Spent(), clock(), run.transport.payload_bytes
    worked = run.transport.processor
    run.step()
    seconds = {
        "step": clock() - start,
        **vars(actions.spent),
        "select": seen.select_seconds,
        "exchange": sum(r.end - r.start for r in seen.records),
        "exposed": seen.exposed_seconds,
        "processor": run.trace.processor + run.transport.processor - worked,
        "idle": actions.idle,
        "sent_bytes": run.transport.payload_bytes - sent,
        "before": sum(r.payload_bytes for r in seen.records if not r.second),
        "after": sum(r.payload_bytes for r in seen.records if r.second),
    }
    if second is None:
        return seconds
    busy = second.kfac.stages()._asdict()
    whole, told, trace = (start, clock()), second.told, run.trace
    ffbp = trace.forward + trace.loss + trace.backward
    slowed = actions.spent.forward + actions.spent.backward - ffbp + told.slowed
    own = {"ffbp": ffbp, "factor_comp": told.seconds - told.slowed}
    own |= exposed(
        seen.waited,
        without([whole], union(seen.waited)),
        slowed,
        [*sent_before, *seen.records],
        [*inverted, *second.queues.busy],
    )
    busy["ffbp"], told.slowed = own["ffbp"], 0.0
    seconds |= {f"busy {name}": value for name, value in busy.items()}
    return seconds | {f"own {name}": value for name, value in own.items()}


def _summary(run: Run, found: list[Measures], weights: list[float]) -> Prediction:
    mean = {
        name: sum(w * one[name] for w, one in zip(weights, found, strict=True))
        for name in found[0]
    }
    before, after = mean.pop("before"), mean.pop("after")
    told = {}
    if run.actions.second is not None:
        for name, kind in (("breakdown", "own "), ("busy", "busy ")):
            keys = [key for key in mean if key.startswith(kind)]
            stages = {key.removeprefix(kind): mean.pop(key) for key in keys}
            told[name] = Stages(**stages, update=mean["apply"])
    limit = _limit(run, before, after, told)
    # Ranks that share processors leave them idle at the same time.
    idle = mean.pop("idle")
    needed = idle + run.transport.network.occupied(mean["processor"])
    crowded = mean["crowded"] = max(needed - mean["step"], 0.0)
    for name in ("step", "exposed"):
        mean[name] += crowded
    return Prediction(
        **mean,
        limit=limit,
        buckets=len(run.actions.buckets),
        breakdown=told.get("breakdown"),
        busy=told.get("busy"),
    )


def _period(config: KFAC | None) -> list[tuple[int, float]]:
    """Steps of K-FAC, and their shares of all: see [Note: Periods]."""
    if config is None:
        return [(0, 1.0)]
    length, every = config.inverse_every, config.factor_every
    blocks = [(0, 1)] if length == every else [(0, 1), (every, length // every - 1)]
    return [
        (first + i, times * (1 if i < 2 else every - 2) / length)
        for first, times in blocks
        for i in range(min(every, 3))
    ]


def _limit(run: Run, first: float, second: float, told: dict[str, Stages]) -> float:
    """As gradtide.lab.limits: compute, and the bytes of a rank at the ring's rate.

    With K-FAC both halves of it may hide behind anything: the longer of both.
    """
    trace, network = run.trace, run.transport.network
    inter, intra = network.inter.ring.beta, (network.intra or cost.FREE).ring.beta
    beta = inter if network.hosts > 1 else intra
    first, second = first * beta, second * beta
    forward = trace.forward + trace.loss
    if told:
        computed = forward + trace.backward + told["busy"].factor_comp
        return max(computed, first + second)
    if run.scheme.schedule.update == "forward":
        forward, second = max(forward, second), 0.0
    if run.scheme.schedule.launch != "ready":
        return forward + trace.backward + first + second
    return forward + max(trace.backward, first + second)
