"""Which ranks keep copies of each other's files, and how these ranks connect."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from gradtide.checkpoint.copies import Copies
from gradtide.checkpoint.files import Folder
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.transport import Transport
from gradtide.transport.channel import Channel
from gradtide.transport.hosts import network
from gradtide.transport.opening import Meeting


def keepers(hosts: Sequence[Sequence[int]], copies: int) -> list[list[int]]:
    """Who keeps copies of each rank's file: of the next hosts those in the same place.

    A host with fewer ranks begins anew with its first. There are as many copies as
    there are other hosts at the most.
    """
    found: dict[int, list[int]] = {}
    for number, host in enumerate(hosts):
        others = [*hosts[number + 1 :], *hosts[:number]][:copies]
        for place, rank in enumerate(host):
            found[rank] = [other[place % len(other)] for other in others]
    return [found[rank] for rank in sorted(found)]


def check_copies(copies: object, folder: Folder, elastic: bool) -> None:
    """Raise ValueError for no such number, and where copies cannot be, or be of use."""
    if type(copies) is not int or copies < 0:
        raise ValueError(f"copies={copies!r}: a whole number, from 0 on")
    if copies and elastic:
        raise ValueError(
            f"copies={copies}, and ranks come and go (elastic=...): those that stay "
            "have the model, and their own files. Pass copies=0"
        )
    if copies and not folder.is_local:
        raise ValueError(
            f"copies={copies} in {folder.path('')}, which is one folder for all hosts: "
            "a copy would be the same file. Pass copies=0"
        )


def copies_of(
    transport: Transport, folder: Folder, copies: int, seconds: float
) -> Copies:
    """Connect ranks to those that keep copies; all of them call this.

    `seconds`: how long a rank may keep another one waiting. Warns where there are fewer
    other hosts than `copies`, and raises ValueError on every rank where one reaches
    another one not.
    """
    to, others = keepers(transport.hosts, copies), len(transport.hosts) - 1
    made = _made(transport, folder, to, seconds)
    if others < copies and transport.group.rank == 0:
        warnings.warn(
            f"copies={copies} needs ranks on {copies + 1} hosts, and these are on "
            f"{others + 1}: copies of each rank's file: {others}. They are for hosts "
            "that may be lost, and are kept on other hosts only",
            stacklevel=3,
        )
    return made


def _made(
    transport: Transport, folder: Folder, to: Sequence[Sequence[int]], seconds: float
) -> Copies:
    """Copies that each rank has kept by those in its place of `to`; collective."""
    rank = transport.group.rank
    if not to[rank]:
        return Copies(folder, rank)
    of = [sender for sender, own in enumerate(to) if rank in own]
    # A lane for what the lower rank sends, and one for what the higher one does.
    keeping = {(peer, int(rank > peer)) for peer in to[rank]}
    kept = {(peer, int(peer > rank)) for peer in of}
    meeting = _meet(transport, seconds)
    found = _connected(transport, meeting, sorted(keeping | kept), seconds)
    mine = {peer: found[peer, lane] for peer, lane in keeping}
    theirs = {peer: found[peer, lane] for peer, lane in kept}
    return Copies(folder, rank, mine, theirs, meeting)


def _meet(transport: Transport, seconds: float) -> Meeting:
    """Doors of their own for all ranks; a collective call."""

    def listen() -> tuple[Meeting, Signature]:
        meeting = Meeting(transport.group, seconds)
        if meeting.problem:
            raise ValueError(f"no copies can be sent: {meeting.problem}")
        return meeting, {}

    meeting = check_ranks_agree(transport, listen, "")
    told = transport.gather_objects((meeting.door, network()))
    # A Unix socket's name leads nowhere on another host.
    meeting.doors = [
        door if where == network() else door._replace(name="") for door, where in told
    ]
    return meeting


def _connected(
    transport: Transport,
    meeting: Meeting,
    wanted: Sequence[tuple[int, int]],
    seconds: float,
) -> dict[tuple[int, int], Channel]:
    """Channels to ranks, by these and lanes; a collective call."""
    found = dict[tuple[int, int], Channel]()

    def connect(calls: bool) -> tuple[None, Signature]:
        way = meeting.call if calls else meeting.answer
        for peer, lane in wanted:
            if meeting.calls(peer) == calls:
                try:
                    found[peer, lane] = Channel(way(peer, lane), seconds)
                except OSError as error:
                    raise ValueError(f"no copies at rank {peer}: {error}") from error
        return None, {}

    try:
        check_ranks_agree(transport, lambda: connect(True), "")
        # Whoever is called need not wait now.
        check_ranks_agree(transport, lambda: connect(False), "")
    except BaseException:
        meeting.close()
        raise
    return found
