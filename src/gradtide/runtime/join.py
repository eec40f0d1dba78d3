"""Uneven inputs: a rank that ran out of batches shadows the exchanges of the others.

Inside `join()` a rank that is about to exchange something says so first, in a word of a
few bytes. A rank that has run out of batches answers that it has *joined*, learns from
the words of the others what comes, and does its part: with zeros in the place of its
gradients, and without a step of the optimizer. Its residual goes on being delivered.
When all have joined, those that shadowed take over what a rank has that trained to the
end. Outside of `join()` no word is sent, and nothing here runs. How much a rank counts
that has joined is told where every rank tells that (`weights`).

[Note: words] The word is a work item before what it announces, so the order on the wire
is still that of the program; the program of a rank that has joined is the loop in
`finish`. Who trains waits for the answer only to learn whose buffers to take, or if it
is to raise: then there is a word before every forward, too, which nobody shadows.

[Note: members] Several replicas may train inside, as the two of a GAN. Each is a member
and exchanges by an engine of its own. Words with their number travel by yet another
one, or they would stand between the exchanges of one member and wait for the other's.
One backward may go through both, so its end is announced as well: who shadows it must
not wait for the first member before the second has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather
from gradtide.core.step import Event
from gradtide.runtime.checkpoint import packed, unpacked
from gradtide.runtime.layout.broadcast import broadcast, synchronize
from gradtide.runtime.layout.parameters import shared_parameters
from gradtide.runtime.members import EVERYBODY
from gradtide.runtime.training import Training


class Join:
    """What a rank knows of the others inside `join()`; see [Note: words].

    `members` are the replicas that train inside, the same ones in the same order on
    every rank; of each also whether all ranks have the buffers of one of them.
    """

    inside: ClassVar[int] = 0  # how many are under way: ranks would wait in both

    def __init__(
        self,
        engine: Engine,
        members: Sequence[tuple[Training, bool]],
        throw: bool,
        over_all: bool,
    ) -> None:
        Join.inside += 1
        self._engine, self.throws = engine, throw
        self.counts = over_all  # the mean is over all ranks, also those that joined
        self._members = [Member(self, i, *own) for i, own in enumerate(members)]
        self.apart = len(members) > 1  # the engine is for words: [Note: members]
        self._unread: Callable[[], Any] | None = None
        self.active: list[int] = [*range(engine.group.size)]  # at the last event
        self._told = 0.0  # the number of the event that is being shadowed
        self.shadowing = False  # doing one's part of an event of others'

    def leave(self) -> None:
        """Have nobody train inside any longer."""
        Join.inside -= 1
        for member in self._members:
            member.leave()
        if self.apart:
            self._engine.transport.close()

    @property
    def source(self) -> int:
        """The first rank that still trains."""
        return self.active[0]

    @property
    def uneven(self) -> bool:
        """Whether a rank had joined at the last event."""
        return len(self.active) < self._engine.group.size

    def count(self) -> int:
        """How many ranks train, by the last event; waits for what they have said."""
        self._read()
        return len(self.active)

    def announce(self, event: Event, number: float, member: int) -> float:
        """Say what comes next; returns the number that this was announced with.

        Raises RuntimeError if ranks are about to do different things, or if a rank has
        joined and that is to be an error.
        """
        if self.shadowing:
            return self._told
        self._read()
        self._unread = self._say(event, number, member)
        soon = event in (Event.FORWARD, Event.PARAMETERS)
        if soon or self.throws:
            self._read()
        return number

    def finish(self) -> None:
        """This rank has no more batches: shadow the others until none has any."""
        self._read()
        while True:
            rows = self._say(Event.JOINED)().tolist()
            if not self._note(rows):
                break
            event, self._told, number = rows[self.source]
            self.shadowing = True
            with torch.no_grad():
                self._members[int(number)].shadow(Event(int(event)), self._told)
            self.shadowing = False
        for member in self._members:
            member.finish()

    def _say(
        self, event: Event, number: float = 0.0, member: int = 0
    ) -> Callable[[], Any]:
        word = torch.tensor(
            [float(event), number, member], dtype=torch.float64, device="cpu"
        )
        return self._engine.ask("join", AllGather(word))

    def _read(self) -> None:
        if self._unread is not None:
            rows, self._unread = self._unread().tolist(), None
            self._note(rows)

    def _note(self, rows: Sequence[Sequence[float]]) -> bool:
        """Learn who still trains; returns whether anybody does."""
        active = [rank for rank, row in enumerate(rows) if row[0] != Event.JOINED]
        if not active:
            return False
        self.active = active
        if len({(rows[rank][0], rows[rank][2]) for rank in active}) > 1:
            events = {rank: self._named(rows[rank]) for rank in active}
            raise RuntimeError(
                f"ranks are about to exchange different things in join(): {events}; "
                "all ranks that have batches have to do the same with them"
            )
        if self.throws and self.uneven:
            joined = [str(rank) for rank in range(len(rows)) if rank not in active]
            raise RuntimeError(
                f"rank {', '.join(joined)} ran out of batches before the others, and "
                "join(throw_on_early_termination=True) asks for an error then"
            )
        return True

    def _named(self, row: Sequence[float]) -> str:
        name = Event(int(row[0])).name
        return f"{name} of replica {int(row[2])}" if self.apart else name


class Member:
    """A replica that trains inside `join()`; see [Note: members]."""

    inside = True

    def __init__(
        self, join: Join, number: int, training: Training, shares_buffers: bool
    ) -> None:
        self.join, self._number = join, number
        self._shares_buffers = shares_buffers
        self._engine: Engine = training.engine
        self.follow(training)

    def follow(self, training: Training) -> None:
        """Go on with what takes the place of the training so far."""
        self._training, training.actions.members = training, self

    def leave(self) -> None:
        """Train on outside."""
        self._training.actions.members = EVERYBODY

    @property
    def counts(self) -> bool:
        return self.join.counts

    @property
    def shadowing(self) -> bool:
        return self.join.shadowing

    @property
    def source(self) -> int:
        return self.join.source

    def count(self) -> int | None:
        return self.join.count()

    def announce(self, event: Event, number: float = 0.0) -> float:
        """Say what this replica exchanges next, as `Join.announce`."""
        return self.join.announce(event, number, self._number)

    def begin(self) -> None:
        """A forward begins: RuntimeError, if a rank has joined and that is an error.

        In a backward it would leave gradients that no rank has averaged.
        """
        if self.join.throws:
            self.announce(Event.FORWARD)

    def end(self) -> None:
        """Say that a backward ends, see [Note: members]."""
        if self.join.apart:
            self.announce(Event.END)

    def send_parameters(self) -> None:
        """Have ranks that joined follow a step that they could not take themselves."""
        self.announce(Event.PARAMETERS)
        if self.join.uneven:
            broadcast(self._engine, self._parameters(), self.join.source)

    # - On a rank that has joined ------------------------------------------------------

    def shadow(self, event: Event, told: float) -> None:
        """Do one's part of an event of others'."""
        training = self._training
        if not training.actions.eager:  # others are so far in their round
            training.step.position = int(told)
        match event:
            case Event.FORWARD:
                training.tally.learn()
                training.buffers.send(self.join.source)
            case Event.BACKWARD:
                self._forget_gradients()
                if training.step.schedule.update == "forward":  # as where it is called
                    training.placement.called |= {training.model}
                training.step.begin()
                training.agree()
                if not self.join.apart:
                    training.end(arrived=True)
                self._forget_gradients()
            case Event.END:
                training.end(arrived=True)
                self._forget_gradients()
            case Event.RELEASE:
                training.step.gather()
                self._forget_gradients()
            case Event.STEP:
                training.shadow_step()
            case Event.PARAMETERS:
                broadcast(self._engine, self._parameters(), self.join.source)

    def _forget_gradients(self) -> None:
        for p in self._training.placement.places:
            p.grad = None

    def _parameters(self) -> list[Tensor]:
        return [p for _, p in shared_parameters(self._training.model)]

    # - On all ranks -------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """All have joined: go on with what a rank has that trained to the end."""
        training, engine = self._training, self._engine
        training.end_round()  # ranks may have made more steps of a round, or fewer
        if not self.join.uneven:  # but perhaps in steps in which nothing was said
            steps = engine.transport.gather_objects(training.num_steps)
            training.num_steps = max(steps)
            return
        source = self.join.source
        training.buffers.arrive()
        buffers = training.buffers.tensors() if self._shares_buffers else []
        synchronize(engine, [*self._parameters(), *buffers], source)
        optimizer, piece = training.optimizer, b""
        # Whether every rank's optimizer has a state of its own.
        apart = training.actions.chosen.apart
        if not apart and engine.group.rank == source:
            scaler = training.scales.scaler
            scaling = None if scaler is None else scaler.state_dict()
            piece = packed((optimizer.state_dict(), scaling))
        known = training.num_steps, len(piece)
        training.num_steps, length = engine.transport.gather_objects(known)[source]
        if apart:
            return
        state = torch.frombuffer(bytearray(piece or length), dtype=torch.uint8)
        broadcast(engine, [state], source)
        if engine.group.rank not in self.join.active:
            piece = state.numpy().tobytes()
            own, scaling = unpacked(piece, "the optimizer's state")
            optimizer.load_state_dict(own)
            if scaling and training.scales.scaler is not None:
                training.scales.scaler.load_state_dict(scaling)
