"""What of a run outlives the ranks that it was trained by.

[Note: undo] Where an exchange has failed, what it took effect in here is compared with
what it did elsewhere, by the number of buckets whose exchange has taken effect: all
ranks have these in one order. The rank that is the furthest is the source. What has
left and took effect nowhere is undone; what did elsewhere, and not here, comes with the
source's parameters. So ranks agree whatever each had heard when the exchange broke.

Where steps are exchanged, an undone one goes back into the residual, and parameters to
what ranks agreed on last: it is late, and nothing of it is lost. A gradient that is
exchanged exactly is lost with its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.payload import count_on, counts, traits
from gradtide.core.step import Stage
from gradtide.runtime.exchange.consensus import Consensus
from gradtide.runtime.layout.broadcast import synchronize
from gradtide.runtime.layout.parameters import (
    averaged,
    shared_buffers,
    shared_parameters,
)
from gradtide.runtime.own_state import heard
from gradtide.runtime.training import Training
from gradtide.transport.shards import local


@dataclass
class Remains:
    """What a rank takes along, or has from the source; `whole` if it has a run.

    Attributes:
        residuals: By parameter name.
        shared: What ranks agreed on last, where they exchange steps; else empty.
        velocity: The outer optimizer's momentum, by parameter.
        begun: Steps are exchanged already.
        widen: The optimizer has yet to expect a rank's own gradients.
        changed: What this rank's steps of a round have changed.
        counts: The numbers of steps that algorithms remember.
        numbers: Steps, skipped steps and exchanges; and the position in a round.
        scaled: Whether the source has a GradScaler with the scale of all ranks, of
            which this one has had nothing.
        compiled: Whether this rank has compiled something, whose hooks nobody calls.
        left: The square of the 2-norm of what this rank has not delivered, where that
            is asked for; of all ranks in `others`, once they have met.
    """

    whole: bool = False
    residuals: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[Tensor, Tensor] = field(default_factory=dict)
    velocity: dict[Tensor, Tensor] = field(default_factory=dict)
    begun: bool = False
    widen: bool = False
    changed: set[Tensor] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    numbers: Sequence[int] = (0, 0, 0, 0)
    scaled: bool = False
    compiled: bool = False
    left: float | None = None
    others: Sequence[float | None] = ()

    @torch.no_grad()
    def measure(self) -> None:
        """Have `left` told: a reading pass over the residuals, if there are any.

        In a round what this rank's steps have done counts with them.
        """
        done = [local(p) - shared for p, shared in self.shared.items()]
        pieces = [*self.residuals.values(), *done]
        norms = [float(torch.linalg.vector_norm(piece.float())) for piece in pieces]
        self.left = sum(norm**2 for norm in norms) if self.whole else None


@torch.no_grad()
def take(training: Training, behind: int) -> Remains:
    """Undo what is under way, and take along what is left: see [Note: undo].

    `behind`: how many exchanges of buckets have taken effect at the source, and not
    here. No queue is at work any more, and the training is of no use.
    """
    placement, actions = training.placement, training.actions
    schedule, buckets = training.step.schedule, placement.buckets
    order = buckets[::-1] if schedule.update == "forward" else buckets
    undone = [bucket for bucket in order if bucket.open]
    # A step that was counted, and of whose deferred update nothing was carried out.
    none = bool(buckets) and all(bucket.stage is Stage.DUE for bucket in buckets)
    for i, bucket in enumerate(undone):
        bucket.undo(delivered=i < behind)
    if training.spoilt:
        training.skip()
    consensus, found = actions.consensus, Remains(whole=True)
    if consensus is not None and consensus.begun:
        found.shared, found.velocity = consensus.shared, consensus.velocity
        found.begun, found.widen = True, consensus.to_widen
        late = schedule.rounds and schedule.delay > 0
        for bucket in undone if schedule.rounds else buckets:
            for slot in bucket.slots:
                shared = consensus.shared.get(slot.param)
                if shared is None or (late and schedule.mix is not None):
                    continue
                if late:
                    slot.local.sub_(consensus.moved[slot.param])
                else:
                    slot.local.copy_(shared)
        found.changed = consensus.changed
    found.residuals = {
        slot.name: bucket.residual_of(slot)
        for bucket in buckets
        if bucket.waiting or not bucket.residual_empty
        for slot in bucket.slots
    }
    found.counts = counts(buckets[0].payload.state)
    found.compiled = placement.compiled
    position = training.step.position % schedule.every
    steps = training.num_steps - none
    found.numbers = steps, training.num_skipped, training.num_exchanges, position
    return found


@torch.no_grad()
def share(
    engine: Engine,
    model: nn.Module,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
    own: Remains,
    source: int,
    late: Sequence[bool],
    first: bool,
) -> Remains:
    """Have all ranks go on from what the source has; a collective call.

    Args:
        engine: Among the ranks that are there now.
        model: The module.
        optimizer: This rank's.
        scaler: This rank's, if it is known.
        own: What this rank takes along.
        source: The rank that is the furthest.
        late: Which ranks have no run, or were behind the source.
        first: Whether no rank has a run.

    Returns what this rank goes on from.
    """
    shared, rank = own.shared, engine.group.rank
    named = [*shared_parameters(model)]
    alike = [shared.get(p, local(p)) for _, p in named]
    alike += [buffer for _, buffer in shared_buffers(model) if first]
    synchronize(engine, alike, source)
    # One that failed earlier in its step has not counted that, nor have its algorithms.
    told = engine.transport.gather_objects((own.numbers, own.counts, own.left))
    own.numbers, own.counts, _ = told[source]
    own.others = [left for *_, left in told]
    if not any(late):
        return own
    whole = own.whole
    how = source, lambda: _words(model, optimizer, scaler, own), "the run"
    run = heard(engine, *how)
    if not late[rank]:
        return own
    by_name = dict(named)
    if not whole:
        for name, buffer in shared_buffers(model):
            if name in run["buffers"]:
                buffer.copy_(run["buffers"][name])
    apart = bool(run["begun"])
    if optimizer is not None and not (whole and apart):
        optimizer.load_state_dict(run["optimizer"])
    own.scaled = bool(run["scaler"]) and not (whole or apart)
    if run["scaler"] and scaler is not None and not (whole and apart):
        scaler.load_state_dict(run["scaler"])
    own.begun, own.widen = apart, bool(run["widen"])
    own.velocity = {
        by_name[name]: torch.empty_like(local(by_name[name])).copy_(value)
        for name, value in run["velocity"].items()
    }
    if apart and not whole:
        own.shared = {p: local(p).detach().clone() for _, p in averaged(model)}
    for p, value in own.shared.items():
        local(p).copy_(value)
    own.whole = True
    return own


def _words(
    model: nn.Module,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
    own: Remains,
) -> dict[str, Any]:
    """What a rank that is late has to hear, beside parameters."""
    names: dict[Tensor, str] = {p: name for name, p in shared_parameters(model)}
    return {
        "buffers": {name: local(b).cpu() for name, b in shared_buffers(model)},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "velocity": {names[p]: x.cpu() for p, x in own.velocity.items() if p in names},
        "begun": own.begun,
        "widen": own.widen,
    }


@torch.no_grad()
def resume(training: Training, own: Remains) -> None:
    """Go on with a new training from what was taken along or heard."""
    if not own.whole:
        return
    placement, actions, step = training.placement, training.actions, training.step
    steps, skipped, exchanges, step.position = own.numbers
    training.num_steps, training.num_skipped = steps, skipped
    training.num_exchanges = exchanges
    training.engine.transport.progress.steps = steps
    for bucket in placement.buckets:
        kept = [own.residuals.get(slot.name) for slot in bucket.slots]
        if traits(bucket.collective).residual or own.residuals or own.begun:
            bucket.restart(kept, zero=True)
        count_on(bucket.payload.state, own.counts)
    placement.compiled |= own.compiled
    consensus = actions.consensus
    if own.begun and consensus is not None:
        _go_on(consensus, own)
    actions.turn_to(actions.chosen.now())


def _go_on(consensus: Consensus, own: Remains) -> None:
    """Exchange steps from what ranks agreed on last."""
    consensus.shared, consensus.velocity = own.shared, own.velocity
    consensus.changed = own.changed
    consensus.resume()
    consensus.to_widen = own.widen
