"""The stages, in order: meet, compare, reach, transfer, Gloo, network, advice.

[Note: No rank is left waiting] A stage that needs all ranks is entered only if the one
before it found all of them able to; rank 0 decides that, and tells it. Every wait has a
deadline. Should one fail to hold (a library that waits for ever), a watch ends the
process, and says in which stage that was.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from gradtide.doctor import checks, pairs
from gradtide.doctor.advice import gain, rule
from gradtide.doctor.checks import Finding, failure
from gradtide.doctor.facts import Facts, Host, facts, hosts
from gradtide.doctor.meeting import ROOT, Meeting
from gradtide.doctor.pairs import Heard, Listener
from gradtide.doctor.trial import Tried, tried
from gradtide.lab.place import NONE, Place
from gradtide.planner.trace import StepTrace
from gradtide.transport.distance import FAR

ROUND = 0.4  # seconds of a transfer, at most
TRIPS = 40  # round trips of one, at the least: a connection has to find the rate
ROUNDS = 16  # of transfers: with more hosts not every pair has one
SHARE = 0.3  # of the seconds: transfers
BEYOND = 120.0  # seconds above all that was asked for, until the watch ends it all


@dataclass(frozen=True)
class Asked:
    """What the user wants: seconds to wait for others, and to measure; a model."""

    wait: float = 30.0
    seconds: float = 10.0
    model: StepTrace | None = None


@dataclass
class Found:
    """All that rank 0 reports; stages that were not entered have left nothing."""

    place: Place | None
    everybody: list[Facts] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    # Of pairs of hosts; what is within a host is of it and itself.
    round_trips: dict[tuple[int, int], float] = field(default_factory=dict)
    rates: dict[tuple[int, int], float] = field(default_factory=dict)  # bits/s
    clocks: dict[int, float] = field(default_factory=dict)  # of hosts, beside host 0's
    tried: Tried | None = None
    predicted_steps: dict[str, float] | None = None  # seconds, by scheme
    advice: str = ""

    @property
    def failed(self) -> bool:
        return any(finding.level == "failure" for finding in self.findings)


def between(of_pairs: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Without what is within a host."""
    return {pair: value for pair, value in of_pairs.items() if pair[0] != pair[1]}


def alone() -> Found:
    """What a process can say that no launcher has started."""
    own = facts(None)
    return Found(None, [own], hosts([own]), checks.alone(own), advice=NONE)


def among(place: Place, asked: Asked, tell: Callable[[Found], None]) -> bool:
    """Examine the ranks that have been started: whether training would fail.

    `tell` is called on rank 0, with what was found, before any rank leaves: a launcher
    ends all others as soon as one has failed. Raises Unmet where this rank does not
    find the others.
    """
    with watched(asked) as stage:
        stage("meeting")
        meeting = Meeting(place, asked.wait)
        examined = Examined(meeting, asked, stage)
        failed = examined.run()
        stage("leaving")
        if place.rank == ROOT:
            tell(examined.found)
        meeting.tell(None, BEYOND)
        meeting.part()
    return failed


class Examined:
    """The stages on one rank; `found` is whole on rank 0 alone."""

    def __init__(
        self, meeting: Meeting, asked: Asked, stage: Callable[[str], None]
    ) -> None:
        self.meeting, self.asked, self.stage = meeting, asked, stage
        self.rank, self.found = meeting.place.rank, Found(meeting.place)

    def run(self) -> bool:
        """Whether training would fail."""
        if not self._compared() or not self._reached():
            return True
        if self.asked.seconds:
            self._transferred()
        return self._trained()

    def _goes_on(self, extra: float = 0.0) -> bool:
        """Whether rank 0 found nothing that ends the examination; on every rank."""
        return bool(self.meeting.tell(not self.found.failed, extra))

    def _all_came(self, came: Sequence[int], doing: str) -> bool:
        missing = sorted(set(range(self.meeting.place.size)) - set(came))
        if missing:
            names = ", ".join(map(str, missing))
            words = (
                f"rank {names} did not come within {self.asked.wait:g} seconds to "
                f"{doing}: was it started, and with the same MASTER_ADDR and "
                "MASTER_PORT?"
            )
            self.found.findings.append(failure(words))
        return not missing

    def _compared(self) -> bool:
        self.stage("comparing facts")
        self.own = facts(self.meeting.place)
        came = self.meeting.gather(asdict(self.own))
        everybody = [Facts(**each) for each in self.meeting.tell(list(came.values()))]
        self.hosts = hosts(everybody)
        self.found.everybody, self.found.hosts = everybody, self.hosts
        self.number = {rank: host.number for host in self.hosts for rank in host.ranks}
        if self.rank == ROOT and self._all_came(list(came), "the meeting"):
            self.found.findings += checks.together(everybody)
        # Who cannot be reached is still worth knowing where versions differ.
        usable = [each.rank for each in everybody if each.address]
        return bool(self.meeting.tell(len(usable) == self.meeting.place.size))

    def _reached(self) -> bool:
        self.stage("reaching others")
        word = self.meeting.tell(secrets.token_hex(8))
        self.listener = Listener(self.rank, word, self.own.address)
        gathered = self.meeting.gather([self.own.address, self.listener.port])
        doors = self.meeting.tell(list(gathered.items()))
        self.doors = {rank: tuple(door) for rank, door in doors}
        self.host = self.hosts[self.number[self.rank]]
        heads = [host.head for host in self.hosts]
        asked = heads if self.rank == self.host.head else [self.host.head]
        others = [rank for rank in asked if rank != self.rank and rank in self.doors]
        heard = self.heard = pairs.reach(self.listener, self.doors, others)
        longest = pairs.PATIENCE * (2 + len(heads) // pairs.AT_ONCE)
        told = [[other, asdict(what)] for other, what in heard.items()]
        answers = self.meeting.gather(told, longest)
        if self.rank == ROOT and self._all_came(list(answers), "say whom it reaches"):
            rows = answers.items()
            self._note({rank: {i: Heard(**h) for i, h in own} for rank, own in rows})
        return self._goes_on(longest)

    def _note(self, heard: dict[int, dict[int, Heard]]) -> None:
        """What connections have told, by hosts."""
        found = self.found
        found.findings += checks.reached(found.hosts, heard)
        for asker, answers in heard.items():
            for other, told in answers.items():
                if not told.error:
                    pair = self.number[asker], self.number[other]
                    found.round_trips[pair] = told.round_trip
                    if pair[1] == 0 != pair[0]:
                        found.clocks[pair[0]] = -told.clock
        far = between(found.round_trips)
        found.findings += checks.ungoverned(found.everybody, found.hosts, far)

    def _transferred(self) -> None:
        """In turn, each host sends to the next but so many; and within each host."""
        self.stage("transferring")
        count, inside = len(self.hosts), any(len(h.ranks) > 1 for h in self.hosts)
        shifts = range(1, count, -(-(count - 1) // ROUNDS) or 1)
        rounds = [*shifts, *([0] if inside else [])]
        each = min(ROUND, SHARE * self.asked.seconds / max(len(rounds), 1))
        longest = max(self.found.round_trips.values(), default=0.0)
        each = self.meeting.tell(max(each, TRIPS * longest))
        for shift in rounds:
            other = self._receiver(shift)
            self.listener.rates.clear()
            self.meeting.gather(None)
            self.meeting.tell()
            if other is not None:
                far = self.heard[other].round_trip > 2 * FAR
                pairs.send(self.listener, self.doors[other], other, each, far)
            self.meeting.gather(None, each + 3 * pairs.PATIENCE)
            self.meeting.tell(None, each + 3 * pairs.PATIENCE)
            got = self.meeting.gather(list(self.listener.rates.items()))
            for receiver, rates in got.items():  # only ROOT has gathered any
                for sender, rate in rates:
                    pair = self.number[sender], self.number[receiver]
                    self.found.rates[pair] = rate
            self.meeting.tell()
        self.found.findings += checks.slow(self.hosts, between(self.found.rates))

    def _receiver(self, shift: int) -> int | None:
        """To whom this rank sends: from head to head, or from the second of a host."""
        senders = self.host.ranks[:1] if shift else self.host.ranks[1:2]
        other = self.hosts[(self.host.number + shift) % len(self.hosts)]
        return other.head if self.rank in senders else None

    def _trained(self) -> bool:
        """Whether Gloo fails where plain connections did not; measures on it."""
        self.listener.close()
        spent = (1 - SHARE) * self.asked.seconds
        alike = {len(host.ranks) for host in self.hosts}
        layout = (len(self.hosts), alike.pop()) if len(alike) == 1 else None
        own = tried(self.meeting, layout, spent, self.stage)
        told = self.meeting.gather(own.error, BEYOND)
        if self.rank == ROOT:
            self.found.tried = own
            self._all_came(list(told), "finish an exchange over Gloo")
            failed = [f"rank {rank}: {error}" for rank, error in told.items() if error]
            if failed:
                self.found.findings.append(failure(f"Gloo fails on {failed[0]}"))
            self._advise(own)
        return not self._goes_on(2 * BEYOND)

    def _advise(self, own: Tried) -> None:
        self.stage("planning")
        if self.found.failed or own.network is None:
            return
        if self.asked.model is None:
            self.found.advice = rule(own.network)
        else:
            told = gain(self.asked.model, own.network)
            self.found.advice, self.found.predicted_steps = told


@contextmanager
def watched(asked: Asked) -> Iterator[Callable[[str], None]]:
    """End this process where the stage that it is told of never ends."""
    now = ["starting"]

    def end() -> None:
        print(f"error: ended while {now[0]}: no progress", file=sys.stderr, flush=True)
        os._exit(1)

    watch = threading.Timer(6 * asked.wait + 8 * asked.seconds + 4 * BEYOND, end)
    watch.daemon = True
    watch.start()
    try:
        yield lambda words: now.__setitem__(0, words)
    finally:
        watch.cancel()
