"""What a training step takes, as the virtual clock has it."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.plan import cost
from gradtide.plan.network import Network
from gradtide.plan.played import exchange_seconds as exchange_seconds
from gradtide.plan.trace import StepTrace
from gradtide.plan.training import Run as Run
from gradtide.plan.training import Spent
from gradtide.plan.training import with_optimizer as with_optimizer
from gradtide.plan.transport import VirtualTransport as VirtualTransport
from gradtide.scheme import Scheme


@dataclass(frozen=True)
class Prediction:
    """One step, in seconds; a mean over the steps after the first.

    `forward`, `backward` (with the loss) and `apply` (the optimizer) are the training
    thread's own; `exposed` is what it waits for the lane. `select` is what flows take
    up to their first request, and `exchange` what requests are waited for, on the lane,
    mostly hidden. `limit` is what no step of this schedule can be shorter than: compute
    and wire at full rate, without any start-up (`gradtide.lab.limits`).
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


def simulate(
    trace: StepTrace, scheme: Scheme, network: Network, steps: int = 3
) -> Prediction:
    """A step of training `trace` by `scheme` on `network`, as it goes on for long.

    `steps` are run, 2 or more; the first one is left out. Pure and deterministic.
    Raises ValueError for a collective that cannot be rehearsed, and whatever the
    scheme's fusion raises.
    """
    if steps < 2:
        raise ValueError(f"steps={steps}: the first is left out, so 2 or more")
    run = Run(trace, scheme, network)
    run.step()
    first, start = len(run.engine.records), run.transport.clock()
    sent = run.transport.payload_bytes
    run.engine.exposed_seconds = run.engine.select_seconds = 0.0
    run.spent = Spent()
    for _ in range(steps - 1):
        run.step()
    count = steps - 1
    records = list(run.engine.records)[first:]
    before = sum(r.payload_bytes for r in records if not r.second) / count
    after = sum(r.payload_bytes for r in records if r.second) / count
    spent = run.spent
    return Prediction(
        step=(run.transport.clock() - start) / count,
        forward=spent.forward / count,
        backward=spent.backward / count,
        select=run.engine.select_seconds / count,
        exchange=sum(r.end - r.start for r in records) / count,
        apply=spent.apply / count,
        exposed=run.engine.exposed_seconds / count,
        sent_bytes=(run.transport.payload_bytes - sent) / count,
        limit=_limit(trace, scheme, network, before, after),
        buckets=len(run.homes),
    )


def _limit(
    trace: StepTrace, scheme: Scheme, network: Network, first: float, second: float
) -> float:
    """As gradtide.lab.limits: compute, and the bytes of a rank at the ring's rate."""
    inter, intra = network.inter.ring.beta, (network.intra or cost.FREE).ring.beta
    beta = inter if network.hosts > 1 else intra
    first, second = first * beta, second * beta
    forward = trace.forward + trace.loss
    if scheme.schedule.update == "forward":
        forward, second = max(forward, second), 0.0
    if scheme.schedule.launch == "backward":
        return forward + trace.backward + first + second
    return forward + max(trace.backward, first + second)
