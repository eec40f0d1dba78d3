"""Uneven inputs: replicas that are trained together inside `join()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gradtide.core.engine import Engine
from gradtide.core.fields import refuse
from gradtide.core.payload import traits
from gradtide.runtime.guards.validation import (
    Signature,
    check_ranks_agree,
    is_joinable,
)
from gradtide.runtime.join import Join
from gradtide.scheme import undecided
from gradtide.session import Session, find
from gradtide.transport import connect

REMEDY = "call join() with the same arguments on every rank"


class Trained(NamedTuple):
    """A session, and whether its training forwards begin with one rank's buffers."""

    session: Session
    shares_buffers: bool


@contextmanager
def join(ones: Sequence[Trained], over_all: bool, throw: bool) -> Iterator[None]:
    """As `Replica.join`, for the first of some replicas, and the others beside it."""
    sessions = [one.session for one in ones]
    first, *also = sessions

    def prepare() -> tuple[None, Signature]:
        groups = {one.engine.group for one in sessions}
        wrong = {
            "a replica is inside join() already: name all that are trained there "
            "in one call, as join(also=[...])": bool(Join.inside),
            "join(also=...) is for replicas of the same ranks": len(groups) > 1,
            "join(also=...): a replica is named twice": (
                len({*map(id, sessions)}) < len(sessions)
            ),
        }
        refuse(wrong)
        for one in sessions:
            _refuse_join(one, over_all)
        return None, {
            "join(also=)": repr([one.scheme for one in also]),
            "join(throw_on_early_termination=)": str(throw),
            "join(divide_by_initial_world_size=)": str(over_all),
        }

    check_ranks_agree(first.engine.transport, prepare, REMEDY)
    # A rank that is out of batches early meets no step of its own.
    found = [find(one) for one in sessions]
    if any(found):
        check_ranks_agree(first.engine.transport, prepare, REMEDY)
    words = first.engine
    if also:
        words = Engine(connect(first.process_group, torch.device("cpu")))
    members = [(one.training, shares) for one, shares in ones]
    joining = Join(words, members, throw, over_all)
    try:
        yield
        for one in sessions:
            one.flush()
        joining.finish()
    finally:
        joining.leave()


def _refuse_join(session: Session, over_all: bool) -> None:
    """Raise ValueError where a session cannot train uneven inputs."""
    searching = session.tuning is not None and not session.tuning.done
    local = session.scheme.schedule.launch == "step"
    exact = traits(session.scheme.collective).dense and not local
    reasons = {
        "divide_by_initial_world_size=False where a residual is kept: use a dense "
        "scheme ('wfbp', 'dear'), or leave that out": not over_all and not exact,
        "K-FAC, whose factors would miss the ranks that have joined: use a scheme "
        "without it": session.training.preconditioning is not None,
        "a scheme or a fusion that is still being searched for: adopt() a decided "
        "one before": searching or undecided(session.scheme) is not None,
        f"{type(session.optimizer).__name__}, which exchanges parameters inside its "
        "step: use a plain optimizer": is_joinable(session.optimizer),
        "ranks that come and go (elastic=...): they deal out batches": (
            session.regrouping is not None
        ),
        "another join()": session.training.actions.members.inside,
        "sharded parameters, whose parts other ranks wait for: give all ranks "
        "inside as many batches": bool(session.training.placement.shards),
    }
    refuse({f"join() does not work with {why}": t for why, t in reasons.items()})
