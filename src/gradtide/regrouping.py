"""Has a session train on among other ranks, as ranks are lost and come.

[Note: moments] An exchange that fails ends its step, which is none then: nothing else
is sent until the next training forward of the model begins, or the program says by
`Replica.meet` that a step is over. There, and nowhere else, ranks meet anew. It is
there, too, that a rank which has lost nothing learns that others have come: it has
asked when the last step was over that exchanged something, and so have all.

[Note: opening] Ranks that have met have the same parameters. What else belongs to a run
its script builds only when `replicate` has returned: a `Checkpointer`, a `Companion`
here. So a rank that comes has met before anybody knows what it has. All say it where
the first step of a generation begins, and only then is the generation open: a rank has
all of a run, or what was saved is loaded, if nobody has one. By then one exchange has
taken effect for each of them, so that a generation that never opened is told from one
that did (`Standing.progress`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any, Protocol

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.membership import Membership, Roster, Standing
from gradtide.core.transport import CommunicationError
from gradtide.runtime import regroup
from gradtide.runtime.regroup import Remains
from gradtide.runtime.training import Training

LOG = logging.getLogger("gradtide")
UNSCALED = (
    "the others train with a GradScaler, whose scale this rank has to have: pass its "
    "own to replicate(..., grad_scaler=scaler), or to a Checkpointer"
)
NOBODY = "no rank is left whose run is whole: load the last checkpoint"


class Awaited(CommunicationError):
    """Ranks have to meet once more, with others that have yet to come."""


class Companion(Protocol):
    """What belongs to a run beside its session, and goes where that goes."""

    def meet(self, source: int | None, late: Sequence[bool]) -> None:
        """Ranks have met that all have one; a collective call.

        `source` has a whole run, and those that are `late` have yet to hear of it. None
        if nobody has one. Raises ValueError where ranks do not go together.
        """


class Regrouped(Protocol):
    """A session, as far as it is asked here."""

    model: nn.Module
    engine: Engine
    grad_scaler: GradScaler | None  # the user's, if it is known

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


@dataclass
class Losses:
    """What was lost with ranks, as far as those that are left can tell.

    Nobody has what a rank had not delivered that is lost: its residual and, in a round,
    what its steps had done. It is told as what the others have on average.

    Attributes:
        lost_ranks: How many were lost.
        lost_residual_norm: About the 2-norm of all that they had not delivered.
        lost_residual_share: Of what all ranks had not delivered, the part (0 to 1) that
            was lost when ranks were lost last: theirs of the ranks before.
        lost_share: Of all that ranks had done by then, the order of magnitude of the
            part that was lost. An entry waits, on average, for as many steps as it
            takes for as many entries to leave as there are: what a rank has not
            delivered is worth those steps.
    """

    lost_ranks: int = 0
    lost_residual_norm: float = 0.0
    lost_residual_share: float = 0.0
    lost_share: float = 0.0

    def add(self, lost: int, before: int, others: Sequence[float], waits: float) -> str:
        """So many ranks are lost, of those that were there `before`.

        `others` are the squares of other ranks' residuals; `waits` is the share of all
        steps for which an entry waits. Returns words for the log, or "" if nothing is
        lost that was not delivered.
        """
        self.lost_ranks += lost
        norm = math.sqrt(lost * sum(others) / max(len(others), 1))
        if not norm:
            return ""
        self.lost_residual_norm = math.hypot(self.lost_residual_norm, norm)
        self.lost_residual_share = lost / before
        self.lost_share = lost / before * min(waits, 1.0)
        return (
            f"{lost / before:.0%} of what all ranks had not delivered, about {norm:.3g}"
            f" in norm, and in the order of {self.lost_share:.1g} of all that they did "
            "(the residual of a rank that is lost is not known: it is told as what "
            "others have on average)"
        )


class Regrouping:
    """A session's ranks, which change.

    Attributes:
        companion: What else belongs to the run, if something does.
        opened: Whether this rank has, or had, all of a run: see [Note: opening].
        ended: All ranks have agreed to leave: nobody meets anybody any more.
    """

    companion: Companion | None

    def __init__(self, session: Regrouped, membership: Membership) -> None:
        self._session, self._membership = session, membership
        self._roster: Roster | None = None
        self._own: Remains | None = None  # between two generations
        self._progress, self._run = -1, ""  # as in `Standing`
        self.generation = 0
        self.losses, self.lost_steps = Losses(), 0
        self.shortened_rounds = self.left_out_steps = 0
        self.companion, self.opened, self.ended = None, False, False
        self._opening = True  # of this generation, see [Note: opening]
        self._late = False  # this rank has yet to hear of all of a run
        self._unscaled = False  # it has a GradScaler that nobody knows of

    def numbers(self) -> dict[str, float]:
        """What `Replica.metrics` says of ranks."""
        return {
            "ranks": 0 if self._roster is None else len(self._roster.members),
            "generation": self.generation,
            **asdict(self.losses),
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

    @property
    def patience(self) -> float:
        """Seconds for which others are waited for."""
        return self._membership.patience

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
            progress = self._session.engine.progress
            self._membership.ask(Standing(progress, run=self._run))

    def due(self, training: Training) -> bool:
        """A training forward begins; returns whether ranks have met anew."""
        if self.ended:
            return False
        now = self._go_on(training)
        while self._opening:
            try:
                self._open()
            except CommunicationError as error:
                if not isinstance(error, Awaited):
                    LOG.warning("the ranks meet once more: %s", error)
            except ValueError as error:
                if not self.opened:
                    self.close()
                    raise
                # As where a rank comes with another model.
                LOG.warning("the ranks meet once more: %s", error)
            except BaseException:
                self.close()
                raise
            if self._opening:
                now.lose()
                now = self._meet(now, None)
        return now is not training

    def _go_on(self, training: Training) -> Training:
        """Train on, or among other ranks if they have changed."""
        roster = None
        if not training.lost:
            roster = self._membership.answer()
            before = self._roster
            if roster is None or before is None or not roster.differs(before):
                return training
            self.surviving(training, training.flush)()
            self.surviving(training, training.arrive)()
        return self._meet(training, None if training.lost else roster)

    def _open(self) -> None:
        """All ranks say what belongs to their runs: see [Note: opening]; collective."""
        engine, companion = self._session.engine, self.companion
        if self._unscaled and companion is None:
            raise ValueError(UNSCALED)
        words = companion is not None, self._late
        told = engine.transport.gather_objects(words, "what belongs to the run")
        has = [has for has, _ in told]
        if any(has) and not all(has):
            raise ValueError(
                f"rank {has.index(True)} has a Checkpointer, and rank "
                f"{has.index(False)} has none: build one on every rank, between "
                "replicate() and the first step, or on none"
            )
        if companion is not None:
            late, source = [late for _, late in told], None
            if engine.progress:
                if all(late):
                    raise RuntimeError(NOBODY)
                source = late.index(False)
            companion.meet(source, late)
        self._opening = self._late = False
        self.opened = True
        engine.progress = self._progress = max(engine.progress, 1)

    # - Anew ---------------------------------------------------------------------------

    def _meet(self, training: Training | None, roster: Roster | None) -> Training:
        """Form a group with those who are there, until one lasts."""
        quiet = training is not None and training.quiet
        if training is not None:
            self._progress = self._session.engine.progress
        while True:
            if roster is None:
                self._membership.ask(Standing(self._progress, True, self._run))
                roster = self._membership.answer()
            if roster is not None:
                try:
                    found = self._form(training, roster)
                    found.no_sync_active = quiet
                    return found
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
        rank = [member.name for member in members].index(self._membership.name)
        most = members[roster.source].standing.progress
        if most < 0 and self.generation:
            raise RuntimeError(NOBODY)
        behind = most - self._progress
        if training is not None and self._own is None:
            session.give_up()  # first: the queue may still be at work on a bucket
            self._own = regroup.take(training, behind)
            session.detach()
        own = self._own = self._own or Remains()
        self._membership.form(roster)
        session.connect()
        roster = self._now(roster)
        most, late = roster.members[roster.source].standing.progress, roster.late
        if apart := roster.apart:
            own = self._own = self._part(own, apart)
        if late[rank] and not self.opened:
            own.whole = False  # it has begun to load, at most
        own.left = None
        if self._gone(roster):
            own.measure()
        if late[rank]:
            self._progress = -1  # until it has all of it
            if own.whole and own.begun and (done := own.numbers[-1]):
                LOG.warning(
                    "others have gone on without this rank: what it did in the last %d "
                    "steps, since its round began, is lost",
                    done,
                )
        how = roster.source, late, most < 0
        if training is not None:
            session.grad_scaler = training.scales.scaler or session.grad_scaler
        known = session.engine, session.model, session.known_optimizer
        own = regroup.share(*known, session.grad_scaler, own, *how)
        self._unscaled = own.scaled and session.grad_scaler is None
        found = session.train()
        regroup.resume(found, own)
        session.engine.progress = self._progress = max(most, 0)
        self._run = roster.members[roster.source].standing.run or roster.number
        self._note(roster, rank, own, found)
        self._opening, self._late = True, self._late or late[rank]
        return found

    def _now(self, roster: Roster) -> Roster:
        """The ranks, as they stand now that they have met; a collective call.

        What a rank said when it was counted may be true no more: an update that was due
        then has been carried out before ranks met. Where others come from a group that
        had not made that step, the same number would stand for other parameters.
        """
        own = Standing(self._progress, run=self._run)
        told = self._session.engine.transport.gather_objects(own, "how ranks stand")
        pairs = zip(roster.members, told, strict=True)
        return replace(roster, members=[replace(m, standing=s) for m, s in pairs])

    def _part(self, own: Remains, apart: Sequence[str]) -> Remains:
        """Ranks have met that have trained `apart`; returns what this one goes on with.

        Two runs are not averaged: each of their ranks knows something else of steps,
        optimizers and residuals.
        """
        if self._membership.name not in apart:
            LOG.warning(
                "%s trained apart from this run: what was done there counts no more, "
                "and all go on from here",
                ", ".join(apart),
            )
            return own
        LOG.warning(
            "this rank has trained apart from the others, as they had lost sight of "
            "each other, and goes on from their run: its own, of %d steps, counts no "
            "more. A lighthouse that counts more than half of all ranks, or none "
            "(min_replicas), rules that out",
            own.numbers[0],
        )
        return Remains(compiled=own.compiled)

    def _gone(self, roster: Roster) -> list[str]:
        """The names of those who were there before, and are not now."""
        now = {member.process for member in roster.members}
        before = () if self._roster is None else self._roster.members
        return [m.name for m in before if m.process not in now]

    def _note(
        self, roster: Roster, rank: int, own: Remains, training: Training
    ) -> None:
        """Say who trains now, and what is lost with whom."""
        gone, engine = self._gone(roster), self._session.engine
        steps = engine.transport.progress.steps
        if gone and self._roster is not None:
            before = {member.process for member in self._roster.members}
            told = zip(roster.members, own.others, strict=True)
            others = [x for m, x in told if m.process in before and x is not None]
            counted = engine.telemetry.totals()
            waits = counted["offered"] / max(counted["selected"], 1)
            waits *= training.step.schedule.every / max(steps, 1)
            words = self.losses.add(len(gone), len(before), others, waits)
            if words:
                LOG.warning("lost with %s: %s", ", ".join(gone), words)
        self._roster, self._own = roster, None
        self.generation += 1
        LOG.info(
            "%d ranks train from step %d on; this is rank %d%s",
            len(roster.members),
            steps + 1,
            rank,
            f"; lost: {', '.join(gone)}" if gone else "",
        )
