"""A session that trains on with other parameters, or another optimizer."""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.runtime.layout.broadcast import synchronize
from gradtide.runtime.layout.parameters import shared_parameters
from gradtide.runtime.refresh import Aside, in_place, refuse_reshaped, staying
from gradtide.session import Session

LOG = logging.getLogger("gradtide")

REMEDY = "change the same parameters in the same way on every rank"


def refresh(session: Session, optimizer: Optimizer | None) -> None:
    """As `Replica.refresh`; collective."""
    session.meet()
    session.refuse_moment("refresh")
    session.apply_pending(end_round=False)
    model, before = session.model, session.training
    stays, known = staying(before), optimizer or session.known_optimizer

    def prepare() -> tuple[None, Signature]:
        if session.scheme.schedule.rounds:
            refuse_reshaped(before)
        return None, session.look(session.scheme, known, session.owner)

    # Those that were not passed are known by their steps.
    moving = [*before.unexchanged.taken] if known is None else [known]
    with in_place(moving, stays):
        check_ranks_agree(session.engine.transport, prepare, REMEDY)
        before.end_round()
    before.resolve_loads()
    session.detach()
    synchronize(session.engine, [p for _, p in shared_parameters(model)])
    aside = session.aside = session.aside or Aside()
    changes = aside.take(before, stays)
    session.go_on(before, known)
    session.training.unexchanged.taken |= before.unexchanged.taken
    aside.carry(before, session.training, stays)
    if changes.gone or session.engine.group.rank == 0:
        LOG.info("from step %d on: %s", before.num_steps + 1, changes)
