"""The order of a training step: what happens when, and nothing of how.

This module knows no tensors, hooks, processes or clock. Training (`runtime.training`),
the planner's virtual clock (`planner.actions`) and the tests drive the same `Step`.

A step begins with a backward pass. Buckets leave in the order of the plan as they get
full; what did not get full leaves at the end of backward, so that no rank hangs. What
follows depends on the schedule:

    update="step"     means are waited for at the end of backward, and the optimizer's
                      step changes parameters;
    update="forward"  exchanges are held at their cut until step(), which releases their
                      second halves, from the last bucket to the first; each bucket is
                      updated before a module reads its parameters, and others with it
                      whose means are here, for which nobody would wait;
    launch="step"     nothing leaves in backward; after the last step of a round (under
                      LOCAL after each) buckets leave with what its steps did. They are
                      applied at once, or some steps later. A step after which nothing
                      leaves is silent: this rank sends nothing, whatever happens in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from itertools import chain, takewhile
from typing import Any, Protocol

from gradtide.core.schedule import Schedule


class Event(IntEnum):
    """What comes next on the wire, as ranks announce it inside `join()`."""

    JOINED = 0  # nothing of this rank's own any more
    FORWARD = 1  # buffers
    BACKWARD = 2  # gradients; with a number, their order before
    RELEASE = 3  # second halves
    STEP = 4  # steps in the place of gradients, or the name of what is not finite
    PARAMETERS = 5  # parameters, where gradients stand in for steps
    END = 6  # of a backward, where several replicas may be in one


class Stage(Enum):
    """Where a bucket is in its life."""

    IDLE = "idle"  # nothing of it is under way; gradients may arrive at any stage
    SENT = "sent"  # its exchange is under way
    HELD = "held"  # its exchange waits for step()
    DUE = "due"  # step() has been called, its parameters are still to be updated


MOVES = {
    ("launch", Stage.IDLE): Stage.SENT,
    ("deliver", Stage.SENT): Stage.IDLE,
    ("hold", Stage.SENT): Stage.HELD,
    ("release", Stage.HELD): Stage.SENT,
    ("step", Stage.HELD): Stage.DUE,
    ("apply", Stage.DUE): Stage.IDLE,
}


class Bucket:
    """What leaves as one: its name, its stage, and what it still waits for."""

    keeps = False  # its mean waits for step() where updates are deferred
    owned = False  # then, owners make of it what all ranks are sent behind its cut
    fragment = 0  # of the model, where fragments leave in turn

    def __init__(self, name: str, pieces: int) -> None:
        self.name, self.pieces = name, pieces
        self.missing = pieces  # have not arrived in this backward
        self.stage = Stage.IDLE

    def rearm(self) -> None:
        """Expect every piece anew."""
        self.missing = self.pieces

    def move(self, event: str) -> None:
        """Go on to the next stage; RuntimeError if the event has no place here."""
        if (event, self.stage) not in MOVES:
            raise RuntimeError(
                f"{self.name} is {self.stage.value} and cannot {event}: a step was "
                "left half-way; end the run, or replicate() again after sync.remove()"
            )
        self.stage = MOVES[event, self.stage]


class Driver(Protocol):
    """Who carries a step out. A bucket is one of gradients, unless stated otherwise."""

    @property
    def buckets(self) -> Sequence[Any]:
        """All buckets, in the order in which they get full."""

    @property
    def recording(self) -> bool:
        """Whether this step finds out the order: it is not deferred then."""

    @property
    def eager(self) -> bool:
        """Whether this step's buckets leave in backward, and not after step()."""

    def plan(self) -> Sequence[Any]:
        """All that leaves in this step, in order; also buckets of other things."""

    def prepare(self, quiet: bool) -> None:
        """A backward begins; nothing of a `quiet` one, or of its step, is exchanged."""

    def fill(self, bucket: Any) -> None:
        """Put in what is to leave; the bucket is any of the plan."""

    def launch(self, bucket: Any, hold: bool) -> None:
        """Send any bucket of the plan to its cut (`hold`), or to its end."""

    def collect(self) -> None:
        """Backward of a step that is not silent is over: all of the plan can leave."""

    def conclude(self, hold: bool) -> None:
        """All of the plan has left; with `hold`, gradients stay away until step()."""

    def receive(self, bucket: Any) -> None:
        """Wait for a bucket's mean, if it is not there yet."""

    def deliver(self) -> None:
        """All means are there: they become the gradients."""

    def update(self, fresh: bool) -> None:
        """The optimizer's own step begins; `fresh` if gradients are."""

    def defer(self) -> None:
        """Note what the optimizer would do now."""

    def release(self, bucket: Any) -> None:
        """Let the second half of a held exchange go."""

    def refuse(self, bucket: Any) -> None:
        """Raise if an update comes too late: a gradient was made without it."""

    def needs(self, bucket: Any) -> Iterable[Any]:
        """The buckets whose means it takes to update one, beside its own mean."""

    def here(self, bucket: Any) -> bool:
        """Whether its update goes along with an earlier one, as its mean is here."""

    def apply(self, buckets: Sequence[Any]) -> None:
        """Update buckets' parameters; in a local step, add what all ranks did."""


class Step:
    """Where a step stands, and what comes next."""

    def __init__(self, driver: Driver, schedule: Schedule) -> None:
        self._driver, self.schedule = driver, schedule
        self.open = False  # between a backward's beginning and its end
        self.fresh = False  # means are gradients, and step() has not been called
        self.position = 0  # steps of the round that are over
        self._cursor = 0  # buckets of the plan that have left
        self._forwards = 0  # of the model, in this step
        self._ahead = False  # some leave in the forward, before backward begins

    @property
    def deferring(self) -> bool:
        """Whether what leaves now waits for step()."""
        return self.schedule.update == "forward" and not self._driver.recording

    @property
    def held(self) -> bool:
        """Whether exchanges wait for step()."""
        return any(bucket.stage is Stage.HELD for bucket in self._driver.buckets)

    @property
    def silent(self) -> bool:
        """Whether nothing leaves in the step that is to come, or under way."""
        if self._driver.eager:
            return False
        return self.schedule.leaving(self.position + 1) is None

    # - Forward and backward -----------------------------------------------------------

    def forward(self) -> None:
        """A forward of the model begins whose factors count.

        What the ranks send between two forwards must not depend on what each of them
        has, so all factors leave that are to leave in the first.
        """
        self._forwards += 1
        if self._forwards == 2 and self._ahead:
            self._launch(lambda bucket: not bucket.keeps)
            self._ahead = False

    def begin(self, quiet: bool = False) -> bool:
        """A backward begins, if it has not; nothing of a `quiet` one is exchanged.

        Returns whether one has begun whose `end` is to be called.
        """
        if self.open:
            return False
        self.gather()  # no step() wanted them; the other ranks may have them already
        self._driver.prepare(quiet or self.silent)
        self.open = not quiet
        return self.open

    def full(self) -> None:
        """A bucket is full: it leaves, and those after it that waited for it."""
        eager = self.schedule.launch != "backward" and self._driver.eager
        if eager and (self.open or self._ahead):
            self._launch(lambda bucket: not bucket.missing)

    def end(self, arrived: bool) -> None:
        """A backward is over; `arrived` if any gradient did."""
        self.open = False
        driver = self._driver
        if not arrived:
            return
        if not self.silent:
            driver.collect()
        if driver.eager:
            self._launch(lambda _: True)
            self._cursor = 0
            driver.conclude(self.deferring)
        for bucket in driver.buckets:
            bucket.rearm()
        if not driver.eager:
            return
        self._ahead = self._forwards == 1 and not driver.recording
        self._forwards = 0
        if self.deferring:
            for bucket in driver.buckets:
                bucket.move("hold")
        else:
            self._deliver()

    def _launch(self, ready: Callable[[Any], bool]) -> None:
        """Send what is ready and has nothing unsent before it."""
        while self._cursor < len(plan := self._driver.plan()):
            bucket = plan[self._cursor]
            if not ready(bucket):
                return
            if bucket.stage is Stage.DUE:  # no module has read it since step()
                self._driver.refuse(bucket)
                self.apply([bucket])
            self._driver.fill(bucket)
            # What leaves last is read first: nothing hides its second half.
            waits = bucket.owned or bucket is not self._driver.buckets[-1]
            self._send(bucket, bucket.keeps and self.deferring and waits)
            self._cursor += 1

    def _send(self, bucket: Any, hold: bool = False) -> None:
        bucket.move("launch")
        self._driver.launch(bucket, hold)

    def _deliver(self) -> None:
        for bucket in self._driver.buckets:
            self._driver.receive(bucket)
            bucket.move("deliver")
        self._driver.deliver()
        self.fresh = True

    def gather(self) -> None:
        """Have the gradients now that step() would have waited for."""
        if self.held:
            for bucket in reversed(self._driver.buckets):
                bucket.move("release")
                self._driver.release(bucket)
            self._deliver()

    # - Step and update ----------------------------------------------------------------

    def step(self) -> bool:
        """The optimizer's step begins; returns whether all of it is deferred."""
        self.flush()
        if not self.held:
            fresh, self.fresh = self.fresh, False
            self._driver.update(fresh)
            return False
        self._driver.defer()
        for bucket in reversed(self._driver.buckets):
            bucket.move("step")
            self._driver.release(bucket)
        return True

    def stepped(self) -> None:
        """The optimizer's step is over: of a local one, what it did may be exchanged.

        What comes late is applied first, so that its bucket can leave again.
        """
        if self._driver.eager:
            return
        self.position += 1
        self._arrive()
        fragment = self.schedule.leaving(self.position)
        self._leave([b for b in self._driver.buckets if b.fragment == fragment])
        self._arrive()
        self.position %= self.schedule.every

    def skipped(self) -> bool:
        """No step() took the last backward's gradients, on this rank perhaps alone.

        Returns whether that counts as one, of a length of zero: in a silent step ranks
        do not wait for each other. Before others all ranks skip, or none.
        """
        silent = self.silent
        self.position += silent
        return silent

    def leave_out(self, target: int) -> int:
        """Go on, in a step under way, as if it were that with the number `target`.

        That is of the round, from 1 on. No step is left out after which something
        leaves; what was to come in on the way comes in as this step ends. Returns how
        many steps are left out.
        """
        if self._driver.eager:
            return 0
        last = min(target, self.schedule.next_leaving(self.position))
        left_out = max(last - 1 - self.position, 0)
        self.position += left_out
        return left_out

    def close(self) -> None:
        """End a round before its time: all ranks together, after any step."""
        if self._driver.eager or not self.schedule.rounds:
            return
        self.apply_late()
        self._leave(self._driver.buckets)
        self.apply_late()
        self.position = 0

    def apply_late(self) -> None:
        """Apply all that steps have sent, whether it is time or not."""
        for bucket in self._under_way():
            self._apply_late(bucket)

    def _leave(self, buckets: Sequence[Any]) -> None:
        """Send what steps did to some buckets."""
        for bucket in buckets:
            if bucket.stage is Stage.SENT:  # step() was skipped when it was to come in
                self._apply_late(bucket)
            self._driver.fill(bucket)
            self._send(bucket)

    def _arrive(self) -> None:
        """Apply what was sent, of which it is time."""
        for bucket in self._under_way():
            if self.schedule.late(bucket.fragment, self.position):
                self._apply_late(bucket)

    def _under_way(self) -> list[Any]:
        return [b for b in self._driver.buckets if b.stage is Stage.SENT]

    def _apply_late(self, bucket: Any) -> None:
        self._driver.receive(bucket)
        bucket.move("deliver")
        self._driver.apply([bucket])

    def flush(self) -> None:
        """Apply all that is due, from the last bucket to the first."""
        self.apply(self._driver.buckets[::-1])

    def apply(self, buckets: Iterable[Any], along: Iterable[Any] = ()) -> None:
        """Carry out the updates of some buckets that are due.

        So are those of `along` that are due, up to the first whose mean is not here.
        """
        driver = self._driver
        due = [bucket for bucket in buckets if bucket.stage is Stage.DUE]
        while due:
            first, *due = due
            driver.receive(first)
            others = (bucket for bucket in along if bucket not in (first, *due))
            rest = (b for b in chain(due, others) if b.stage is Stage.DUE)
            more = [*takewhile(driver.here, rest)]
            for bucket in more:
                driver.receive(bucket)
            for bucket in (first, *more):
                for other in driver.needs(bucket):
                    driver.receive(other)
                bucket.move("apply")
            due = [bucket for bucket in due if bucket.stage is Stage.DUE]
            driver.apply([first, *more])
