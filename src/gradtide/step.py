"""The order of a training step: what happens when, and nothing of how.

No tensors, hooks, processes or clock: training (`training`), the planner's virtual
clock (`plan.actions`) and tests are drivers of the same `Step`.

A step begins with a backward pass. Buckets leave in the order of the plan as they get
full; what did not get full leaves at the end of backward, so that nobody hangs. Then,
by schedule:

    at step()    means are waited for at the end of backward, and the optimizer's step
                 changes parameters;
    "forward"    exchanges are held at their cut until step(), which lets their second
                 halves go, from the last bucket to the first; each bucket is updated
                 before a module reads its parameters;
    "step"       (LOCAL) nothing leaves in backward; after the optimizer's step buckets
                 leave with what that did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

from gradtide.schedule import Schedule


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
    ("drop", Stage.HELD): Stage.IDLE,
    ("step", Stage.HELD): Stage.DUE,
    ("apply", Stage.DUE): Stage.IDLE,
}


class Bucket:
    """What leaves as one: its name, its stage, and what it still waits for."""

    keeps = False  # its mean waits for step() where updates are deferred

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
    """Who carries a step out. Buckets without a further word are those of gradients."""

    @property
    def buckets(self) -> Sequence[Any]:
        """In the order in which they get full."""

    @property
    def recording(self) -> bool:
        """Whether this step finds out the order: it is not deferred then."""

    @property
    def local(self) -> bool:
        """Whether this step exchanges what the optimizer did, and no gradients."""

    def plan(self) -> Sequence[Any]:
        """All that leaves in this step, in order; also what is not of gradients."""

    def prepare(self) -> None:
        """A backward that is exchanged begins."""

    def fill(self, bucket: Any) -> None:
        """Put in what is to leave; any bucket of the plan."""

    def launch(self, bucket: Any, hold: bool) -> None:
        """Send it on its way, to its cut or to its end; any bucket of the plan."""

    def collect(self) -> None:
        """Backward is over: see to it that all of the plan can leave."""

    def ask(self) -> None:
        """All that leaves has left: ask which parameters were used, and for alarms."""

    def follow(self, hold: bool) -> None:
        """What comes of the step's other buckets may leave, or be held back."""

    def check(self) -> None:
        """The backward of a local step is over."""

    def promise(self) -> None:
        """Gradients stay away until step()."""

    def withdraw(self, dropped: bool) -> None:
        """The promised gradients come now after all, or never."""

    def receive(self, bucket: Any) -> None:
        """Wait for its mean, if it is not there yet."""

    def learn(self) -> None:
        """Hear the answer to `ask`, if that was not heard yet."""

    def deliver(self) -> None:
        """All means are there: they are the gradients."""

    def dropped(self) -> None:
        """All means are gone."""

    def drop(self, bucket: Any) -> None:
        """Give up a held exchange."""

    def settle(self) -> None:
        """A backward begins: what waited for a step that nobody took waits no more."""

    def update(self, fresh: bool) -> None:
        """The optimizer's own step begins; `fresh` if gradients are."""

    def defer(self) -> None:
        """Note what the optimizer would do now."""

    def release(self, bucket: Any) -> None:
        """Let the second half of a held exchange go."""

    def deferred(self) -> None:
        """All second halves are on their way."""

    def refuse(self, bucket: Any) -> None:
        """Raise if an update comes too late: a gradient was made without it."""

    def needs(self, bucket: Any) -> Iterable[Any]:
        """Whose means it takes to update a bucket, beside its own."""

    def apply(self, bucket: Any) -> None:
        """Update its parameters; of a local step, put in what all ranks did."""


class Step:
    """Where a step stands, and what comes next."""

    def __init__(self, driver: Driver, schedule: Schedule) -> None:
        self._driver, self.schedule = driver, schedule
        self.open = False  # between a backward's beginning and its end
        self.fresh = False  # means are gradients, and step() has not been called
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
        self.drop()
        if quiet:
            return False
        self._driver.prepare()
        self.open = True
        return True

    def full(self) -> None:
        """A bucket is full: it leaves, and those after it that waited for it."""
        eager = self.schedule.launch != "backward" and not self._driver.local
        if eager and (self.open or self._ahead):
            self._launch(lambda bucket: not bucket.missing)

    def end(self, arrived: bool) -> None:
        """A backward is over; `arrived`: with any gradient."""
        self.open = False
        driver = self._driver
        if not arrived:
            return
        if driver.local:
            for bucket in driver.buckets:
                bucket.rearm()
            driver.check()
            return
        driver.collect()
        self._launch(lambda _: True)
        self._cursor = 0
        driver.ask()
        for bucket in driver.buckets:
            bucket.rearm()
        driver.follow(self.deferring)
        self._ahead = self._forwards == 1 and not driver.recording
        self._forwards = 0
        if self.deferring:
            for bucket in driver.buckets:
                bucket.move("hold")
            driver.promise()
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
                self.apply(bucket)
            self._driver.fill(bucket)
            # What leaves last is read first: nothing hides its second half.
            last = bucket is self._driver.buckets[-1]
            self._send(bucket, bucket.keeps and self.deferring and not last)
            self._cursor += 1

    def _send(self, bucket: Any, hold: bool = False) -> None:
        bucket.move("launch")
        self._driver.launch(bucket, hold)

    def _deliver(self) -> None:
        for bucket in self._driver.buckets:
            self._driver.receive(bucket)
            bucket.move("deliver")
        self._driver.learn()
        self._driver.deliver()
        self.fresh = True

    def gather(self) -> None:
        """Have the gradients now that step() would have waited for."""
        if self.held:
            for bucket in reversed(self._driver.buckets):
                bucket.move("release")
                self._driver.release(bucket)
            self._driver.withdraw(dropped=False)
            self._deliver()

    def drop(self) -> None:
        """Give up what no step() wanted: a GradScaler skipped it, or zero_grad()."""
        self._driver.settle()
        if self.held:
            self._driver.withdraw(dropped=True)
            for bucket in self._driver.buckets:
                self._driver.drop(bucket)
                bucket.move("drop")
            self._driver.learn()
            self._driver.dropped()

    # - Step and update ----------------------------------------------------------------

    def step(self) -> None:
        """The optimizer's step begins; where it is deferred, that is all of it."""
        self.flush()
        if not self.held:
            fresh, self.fresh = self.fresh, False
            self._driver.update(fresh)
            return
        self._driver.defer()
        for bucket in reversed(self._driver.buckets):
            bucket.move("step")
            self._driver.release(bucket)
        self._driver.deferred()

    def stepped(self) -> None:
        """The optimizer's step is over: of a local one, what it did is exchanged."""
        if not self._driver.local:
            return
        for bucket in self._driver.buckets:
            self._driver.fill(bucket)
            self._send(bucket)
        for bucket in self._driver.buckets:
            self._driver.receive(bucket)
            bucket.move("deliver")
            self._driver.apply(bucket)

    def flush(self) -> None:
        """Apply all that is due, from the last bucket to the first."""
        for bucket in reversed(self._driver.buckets):
            self.apply(bucket)

    def apply(self, bucket: Any) -> None:
        """Carry out a bucket's update, if it is due."""
        if bucket.stage is not Stage.DUE:
            return
        self._driver.receive(bucket)
        self._driver.learn()
        for other in self._driver.needs(bucket):
            self._driver.receive(other)
        bucket.move("apply")
        self._driver.apply(bucket)
