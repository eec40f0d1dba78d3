"""One step on the virtual clock: what the training thread does when, and the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradtide.planner.clock.intervals import Interval, union, without
from gradtide.planner.network import Network
from gradtide.planner.steps.training import Run
from gradtide.planner.trace import StepTrace
from gradtide.scheme import Scheme, with_levels

STEPS = 3  # of a run: what its first forward waits for was sent in the step before


@dataclass(frozen=True)
class Timeline:
    """A step, in seconds from its begin; stretches of one kind do not overlap.

    Attributes:
        seconds: How long the step is.
        forward: When the training thread runs the model's forward.
        backward: When it runs the loss and backward.
        update: When it applies means and steps the optimizer.
        waiting: When it waits for an exchange.
        working: When the queue selects, encodes or adds up, and has no request.
        exchange: When requests are on their way, those of the step before included.
    """

    seconds: float
    forward: Sequence[Interval]
    backward: Sequence[Interval]
    update: Sequence[Interval]
    waiting: Sequence[Interval]
    working: Sequence[Interval]
    exchange: Sequence[Interval]


def timeline(trace: StepTrace, scheme: Scheme, network: Network) -> Timeline:
    """A step of training `trace` by `scheme` on `network`, as it goes on for long.

    In rounds it is the step that ends one. Where ranks share processors, what they wait
    for these is left out (`Prediction.crowded`). Raises ValueError as `simulate` does.
    """
    run = Run(trace, with_levels(scheme, network.members), network)
    for _ in range(max(STEPS, 2 * scheme.schedule.every)):
        run.step()
    seen, (begin, backward, update, end) = run.actions.engine.telemetry, run.marks
    waited = union(seen.waited)
    applied = without(union([*seen.applied, (update, end)]), waited)
    taken = union([*waited, *applied])
    requests = union((record.start, record.end) for record in seen.records)
    busy = union([*run.transport.busy, *run.transport.inside])

    def told(stretches: Iterable[Interval]) -> list[Interval]:
        own = ((max(a, begin), min(b, end)) for a, b in union(stretches))
        return [(a - begin, b - begin) for a, b in own if a < b]

    return Timeline(
        end - begin,
        told(without([(begin, backward)], taken)),
        told(without([(backward, update)], taken)),
        told(applied),
        told(waited),
        told(without(busy, requests)),
        told(requests),
    )
