"""Has a session train on among other ranks, as ranks are lost and come.

[Note: moments] An exchange that fails ends its step, which is none then: nothing else
is sent until the next training forward of the model begins, or the program says by
`Replica.meet` that a step is over. There, and nowhere else, ranks meet anew. It is
there, too, that a rank which has lost nothing learns that others have come: it has
asked when the last step was over that exchanged something, and so have all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.membership import Membership, Roster, Standing
from gradtide.core.transport import CommunicationError
from gradtide.runtime import regroup
from gradtide.runtime.regroup import Remains
from gradtide.runtime.training import Training

LOG = logging.getLogger("gradtide")


class Regrouped(Protocol):
    """A session, as far as it is asked here."""

    model: nn.Module
    engine: Engine

    @property
    def known_optimizer(self) -> Optimizer | None:
        """The user's, if it is known."""

    def connect(self) -> None:
        """Connect to the ranks of the default group, and agree with them."""

    def train(self) -> Training:
        """Begin to train."""

    def detach(self) -> None:
        """Take the hooks from module and optimizer."""

    def give_up(self) -> None:
        """Close the connections, if there are any, and wait for nobody."""


class Regrouping:
    """A session's ranks, which change."""

    def __init__(self, session: Regrouped, membership: Membership) -> None:
        self._session, self._membership = session, membership
        self._roster: Roster | None = None
        self._own: Remains | None = None  # between two generations
        self._progress = -1  # as in `Standing`
        self.generation = 0
        self.lost_steps = self.lost_ranks = 0
        self.shortened_rounds = self.left_out_steps = 0

    def numbers(self) -> dict[str, float]:
        """What `Replica.metrics` says of ranks."""
        return {
            "ranks": 0 if self._roster is None else len(self._roster.members),
            "generation": self.generation,
            "lost_ranks": self.lost_ranks,
            "lost_steps": self.lost_steps,
            "shortened_rounds": self.shortened_rounds,
            "left_out_steps": self.left_out_steps,
        }

    def begin(self) -> None:
        """Train with those who are there; returns when training has begun."""
        try:
            self._meet(None, None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Be counted no more."""
        self._membership.close()

    # - While training -----------------------------------------------------------------

    def surviving(
        self, training: Training, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A call that ends a step, and not the run, if its exchange fails."""

        @wraps(call)
        def guarded(*args: Any) -> Any:
            if training.lost:
                return None
            try:
                return call(*args)
            except CommunicationError as error:
                LOG.warning(
                    "step %d is undone, and the ranks meet anew: %s",
                    training.num_steps + 1,
                    error,
                )
                self.lost_steps += 1
                training.lose()
                return None

        return guarded

    def shortened(self, training: Training, steps: int) -> None:
        """Others wait for this rank, which has left `steps` steps of a round out."""
        # One that is always slow is told of once for all to see.
        level = logging.INFO if self.shortened_rounds else logging.WARNING
        self.shortened_rounds += 1
        self.left_out_steps += steps
        LOG.log(
            level,
            "rank %d is slower than others, which have waited for the grace: it leaves "
            "out %d of the %d steps of its round, and goes on with step %d",
            self._session.engine.group.rank,
            steps,
            training.step.schedule.every,
            training.num_steps + 1,
        )

    def stepped(self, training: Training, silent: bool) -> None:
        """A step is over, in which something was exchanged unless it was `silent`."""
        if not (training.lost or silent):
            self._membership.ask(Standing(self._session.engine.progress))

    def due(self, training: Training) -> bool:
        """A training forward begins; returns whether ranks have met anew."""
        roster = None
        if not training.lost:
            roster = self._membership.answer()
            before = self._roster
            if roster is None or before is None or not roster.differs(before):
                return False
            self.surviving(training, training.flush)()
            self.surviving(training, training.arrive)()
        self._meet(training, None if training.lost else roster)
        return True

    # - Anew ---------------------------------------------------------------------------

    def _meet(self, training: Training | None, roster: Roster | None) -> None:
        """Form a group with those who are there, until one lasts."""
        quiet = training is not None and training.quiet
        if training is not None:
            self._progress = self._session.engine.progress
        while True:
            if roster is None:
                self._membership.ask(Standing(self._progress, lost=True))
                roster = self._membership.answer()
            if roster is not None:
                try:
                    found = self._form(training, roster)
                    found.no_sync_active = quiet
                    return
                except (CommunicationError, ValueError) as error:
                    known = isinstance(error, CommunicationError)
                    if not known and (training is None or not self._came(roster)):
                        raise
                    # A rank that came with another model or scheme ends by that, and
                    # those who were there train on.
                    LOG.warning("the ranks meet once more: %s", error)
                    self._session.give_up()
                    roster = None

    def _came(self, roster: Roster) -> bool:
        """Whether a rank is there that was not before."""
        before = () if self._roster is None else self._roster.members
        there = {member.process for member in before}
        return any(member.process not in there for member in roster.members)

    def _form(self, training: Training | None, roster: Roster) -> Training:
        session, members = self._session, roster.members
        standing = [member.standing for member in members]
        rank = [member.name for member in members].index(self._membership.name)
        most = standing[roster.source].progress
        late = [one.progress < most for one in standing]
        if most < 0 and self.generation:
            raise RuntimeError(
                "no rank is left whose run is whole: load the last checkpoint"
            )
        behind = most - self._progress
        if training is not None and self._own is None:
            session.give_up()  # first: the queue may still be at work on a bucket
            self._own = regroup.take(training, behind)
            session.detach()
        own = self._own = self._own or Remains()
        self._membership.form(roster)
        session.connect()
        if late[rank]:
            self._progress = -1  # until it has all of it
            if own.whole and own.begun and (done := own.numbers[-1]):
                LOG.warning(
                    "others have gone on without this rank: what it did in the last %d "
                    "steps, since its round began, is lost",
                    done,
                )
        how = roster.source, late, most < 0
        optimizer = session.known_optimizer
        own = regroup.share(session.engine, session.model, optimizer, own, *how)
        found = session.train()
        regroup.resume(found, own)
        session.engine.progress = self._progress = max(most, 0)
        self._note(roster, rank)
        return found

    def _note(self, roster: Roster, rank: int) -> None:
        """Say who trains now, and who is lost."""
        before = () if self._roster is None else self._roster.members
        now = {member.process for member in roster.members}
        gone = [m.name for m in before if m.process not in now]
        self.lost_ranks += len(gone)
        self._roster, self._own = roster, None
        self.generation += 1
        LOG.info(
            "%d ranks train from step %d on; this is rank %d%s",
            len(now),
            self._session.engine.transport.progress.steps + 1,
            rank,
            f"; lost, with what they had not delivered: {', '.join(gone)}"
            if gone
            else "",
        )
