"""A rank vanishes at any request of any collective: what becomes of the others.

Each of P ranks has an engine and a queue, as in training; what it asks for is answered
in this process, as soon as all have asked whom it is asked of. Who asks one that is not
there any more has the transport's error, and so has who waits for such a one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtide.collectives import (
    COLLECTIVES,
    PARTITIONS,
    Dense,
    MomentumCorrection,
    OkTopk,
    PartitionedTopK,
    Warmup,
)
from gradtide.collectives.levels import TwoLevel
from gradtide.core import ops
from gradtide.core.engine import Engine
from gradtide.core.ops import Group, Op
from gradtide.core.payload import Collective, Payload, hands_over
from gradtide.core.transport import CommunicationError, Job, Progress, Ticket
from gradtide.testing import answer
from gradtide.transport.comm_queue import CommQueue

STEPS = 2  # the first is not like others: boundaries, rankings
LONGEST = 20.0  # seconds after which a rank waits for ever
ROWS = 12


class Vanished(BaseException):
    """A rank's process has ended."""


class Table:
    """What ranks have asked for, and the answers; who is not there any more."""

    def __init__(self, size: int) -> None:
        self.size, self.changed = size, threading.Condition()
        self.gone: set[int] = set()
        self.asked: dict[object, dict[int, Op]] = {}
        self.answers: dict[object, dict[int, Any]] = {}

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def ask(self, rank: int, key: object, ranks: Sequence[int], op: Op) -> None:
        with self.changed:
            row = self.asked.setdefault(key, {})
            row[rank] = op
            if len(row) == len(ranks):
                found = answer([ops.message_of(row[r]) for r in ranks])
                self.answers[key] = dict(zip(ranks, found, strict=True))
                self.changed.notify_all()

    def wait(self, rank: int, key: object, ranks: Sequence[int]) -> Any:
        with self.changed:
            while key not in self.answers:
                if missing := [r for r in ranks if r in self.gone - {*self.asked[key]}]:
                    raise CommunicationError(f"rank {missing[0]} is gone")
                assert self.changed.wait(LONGEST), f"rank {rank} waits for ever"
            return self.answers[key][rank]


class OneOf:
    """A rank's transport; it vanishes in the place of the request of number `at`."""

    delay = 0.0
    hosts = ()

    def __init__(self, table: Table, rank: int, at: int | None = None) -> None:
        self.group, self.progress = Group(rank, table.size), Progress()
        self.payload_bytes, self.number, self._at = 0, 0, at
        self._table, self._count = table, Counter[tuple[int, ...]]()
        self._queue, self._lock = (
            CommQueue(f"{rank} of {id(table)}", 3),
            threading.Lock(),
        )

    def submit(self, job: Job) -> Ticket:
        return self._queue.submit(job)

    def issue(self, op: Op) -> Any:
        with self._lock:  # lanes of hosts ask beside each other
            if self.number == self._at or isinstance(self._queue.error, Vanished):
                raise Vanished
            self.number += 1
            if isinstance(op, ops.ToHost):
                return op.tensor
            alike = op.ranks if isinstance(op, ops.Among) else range(self.group.size)
            ranks = tuple(alike)
            self._count[ranks] += 1
            key = ranks, self._count[ranks]
        self._table.ask(self.group.rank, key, ranks, op)
        return key, ranks

    def wait(self, pending: Any) -> Any:
        if isinstance(pending, Tensor):
            return pending
        key, ranks = pending
        return self._table.wait(self.group.rank, key, ranks)

    def close(self) -> None:
        self._table.leave(self.group.rank)
        self._queue.close()


def gradient(rank: int, step: int, numel: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(numel, generator=rng).pow(3)


def parts(flat: Tensor) -> list[Tensor]:
    middle = len(flat) // 2
    return [flat[:middle].view(ROWS, -1), flat[middle:]]


def train(
    collective: Collective,
    payload: Payload,
    transport: OneOf,
    hold: bool,
    steps: Sequence[int],
) -> list[Tensor]:
    """The means of some steps; what of a bucket is not delivered stays in it."""
    engine, found = Engine(transport), []  # type: ignore[arg-type]
    over, flat = hands_over(collective, transport.group.size), payload.flat
    for step in steps:
        flat += gradient(transport.group.rank, step, len(flat))
        flow = collective.reduce(payload, transport.group)
        flight = engine.launch("bucket", flow, hold=hold, hands_over=over)
        if hold:
            engine.wait(flight)
            engine.release(flight)
        mean = engine.finish(flight)
        found.append(mean.clone())
        if mean.data_ptr() == flat.data_ptr():
            flat.zero_()
    return found


def run(
    collective: Collective,
    loads: Sequence[Payload],
    hold: bool,
    steps: Sequence[int] = range(STEPS),
    dead: int = -1,
    at: int | None = None,
) -> tuple[list[Any], list[int]]:
    """What each rank's steps came to, a list or an error; and its requests."""
    table, outcomes = Table(len(loads)), list[Any]([None] * len(loads))
    ranks = [OneOf(table, r, at if r == dead else None) for r in range(len(loads))]

    def work(rank: int) -> None:
        own = loads[rank], ranks[rank]
        try:
            outcomes[rank] = train(collective, *own, hold, steps)
        except BaseException as error:
            outcomes[rank] = error
        finally:
            ranks[rank].close()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(loads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, [rank.number for rank in ranks]


def fresh(size: int, numel: int) -> list[Payload]:
    flats = [torch.zeros(numel) for _ in range(size)]
    return [Payload(flat, parts(flat)) for flat in flats]


def restart(payload: Payload) -> None:
    """Leave nothing of what was, as a bucket does that starts anew."""
    payload.flat.zero_()
    payload.state.clear()
    payload.num_sent, payload.nonfinite, payload.left = 0, 0.0, None


def collectives() -> Iterator[Collective]:
    make: Any
    for make in COLLECTIVES:
        own = make(density=0.05) if "density" in names_of(make) else make()
        if make is PartitionedTopK:
            yield from (replace(own, partition=one()) for one in PARTITIONS)
        else:
            yield own


def on_wires_and_wrapped() -> Iterator[Collective]:
    make: Any
    for make in COLLECTIVES:
        if "wire" in names_of(make):
            own = make(density=0.05) if "density" in names_of(make) else make()
            yield replace(own, wire="int8")
    yield Dense("bf16")
    yield MomentumCorrection(OkTopk(0.05))
    yield Warmup(OkTopk(0.05, wire="e3m0"), 1, (1.0, 0.3))


def names_of(make: Any) -> set[str]:
    return {field.name for field in fields(make)}


def cases() -> Iterator[Any]:
    for collective, long in (
        *((one, False) for one in collectives()),
        *((one, True) for one in on_wires_and_wrapped()),
    ):
        for size, local in ((2, 1), (3, 1), (4, 1), (4, 2)):
            made = collective if local == 1 else TwoLevel(collective, local)
            marks = [pytest.mark.slow] * (long or size == 2 or (size, local) == (4, 1))
            name = f"{collective}-{size}-{local}"
            yield pytest.param(made, size, id=name, marks=marks)


@pytest.mark.product(each=6)
@pytest.mark.parametrize(("collective", "size"), [*cases()])
def test_others_have_the_transports_error_and_can_begin_anew(
    collective: Collective, size: int
) -> None:
    numel = 96 * size
    loads = fresh(size, numel)
    outcomes, requests = run(collective, loads, hold=False)
    expected = outcomes[0]
    assert not isinstance(expected, BaseException), expected
    for at in range(max(requests)):
        dead, hold = at % size, bool(at // size % 2)
        for payload in loads:
            restart(payload)
        outcomes, _ = run(collective, loads, hold, dead=dead, at=at)
        late = at >= max(requests) // STEPS
        if isinstance(outcomes[dead], list):  # it asks for less than others
            continue
        assert isinstance(outcomes.pop(dead), Vanished)
        for outcome in outcomes:
            if late and isinstance(outcome, list):  # it had all it needed
                assert all(map(torch.equal, outcome, expected))
            else:
                assert isinstance(outcome, CommunicationError), (at, outcome)
                assert "is gone [bucket]" in str(outcome)
        for payload in loads:
            restart(payload)
        loads[dead] = fresh(size, numel)[dead]  # of another process
        again, _ = run(collective, loads, hold, range(1))
        for means in again:
            assert not isinstance(means, BaseException), means
            assert torch.equal(means[0], expected[0]), f"after request {at}"
