"""Copies of ranks' own files in the folders of ranks on other hosts.

Where each host has a disk of its own, or keeps its files in memory, what a rank alone
has is lost with its host. So its file is also kept by a rank of the next host, or of
several. There it lies beside that rank's own files: whoever looks for files finds it,
and it goes when the others of its step go.

[Note: beside training] A rank says to each of its keepers, once for every save, whether
there is a file to keep, and sends it from the thread that has written it. A keeper
reads in other threads, whatever its training does. So training waits for no copy, but
for the one before where the next save is due, and no copy for training.

[Note: shared folders] A keeper that finds the very file in its folder says so, and
nothing is sent. That it is the very file is told by its end; a copy of an earlier
process, which may have been damaged since, is read as a whole (`old`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, TypeAlias

from gradtide.checkpoint import files
from gradtide.checkpoint.files import UNREADABLE, Folder
from gradtide.checkpoint.generations import folder_of, name_of, spoken
from gradtide.transport.channel import PIECE, Channel
from gradtide.transport.opening import Meeting

State: TypeAlias = dict[str, Any]


class NotKeptError(RuntimeError):
    """A rank on another host has no copy of what was saved."""


class Copies:
    """What this rank keeps for others, and others for it.

    For every save the thread that trains calls `expect`, and then the one that writes
    `send` or `skip`.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        keeping: Mapping[int, Channel] | None = None,
        kept: Mapping[int, Channel] | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """`keeping`: the ranks that keep this one's file; it keeps that of `kept`.

        A rank that is both has two channels.
        """
        self._folder, self._rank, self._meeting = folder, rank, meeting
        self._keeping, self._kept = dict(keeping or {}), dict(kept or {})
        self._expected, self._since = 0, 0.0  # of saves, and since the last one
        self._arrived: dict[int, float] = dict.fromkeys(self._kept, 0)
        self._changed = Condition()
        for sender in self._kept:
            name = f"gradtide copies of rank {sender}"
            Thread(target=self._attend, args=[sender], name=name, daemon=True).start()

    def expect(self) -> None:
        """Each rank whose file is kept here has begun a save, or soon will."""
        self._expected, self._since = self._expected + 1, time.monotonic()

    def send(self, name: str, old: bool = False) -> None:
        """Have a file kept by all who are to; NotKeptError says who does not, and why.

        It takes as long as the bytes do, or until a keeper is silent for as long as
        exchanges may take.
        """
        try:
            size, seal = self._folder.seal(name)
        except UNREADABLE:
            self.skip()
            raise
        failed = []
        for keeper, channel in self._keeping.items():
            try:
                told = {"size": size, "seal": seal.hex(), "old": old}
                self._hand(name, told, channel)
            except (OSError, NotKeptError) as error:
                failed.append(f"rank {keeper} keeps no copy of it: {error}")
        if failed:
            raise NotKeptError("; ".join(failed))

    def skip(self) -> None:
        """There is no file of this save."""
        for channel in self._keeping.values():
            with suppress(ConnectionError):
                channel.tell({})

    def close(self) -> None:
        """Wait for what others are sending, and end all connections.

        Who has been silent for as long as exchanges may take is not waited for.
        """
        with self._changed:
            while late := [s for s, n in self._arrived.items() if n < self._expected]:
                own = [self._kept[sender] for sender in late]
                last = max(self._since, *(channel.moved for channel in own))
                left = last + own[0].seconds - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        for channel in (*self._keeping.values(), *self._kept.values()):
            channel.close()
        if self._meeting is not None:
            self._meeting.close()

    def _hand(self, name: str, told: State, channel: Channel) -> None:
        """Send a file to one rank, unless that has it."""
        channel.tell(told)
        answer = channel.hear()
        if answer.get("send"):
            try:
                for piece in self._folder.pieces(name, PIECE):
                    channel.send(piece)
            except OSError as error:
                channel.close(f"the file could not be read: {error}")
                raise
            answer = channel.hear()
        if "failed" in answer:
            raise NotKeptError(answer["failed"])

    def _attend(self, sender: int) -> None:
        """Keep what a rank sends, save by save, until its connection ends."""
        channel, arrived = self._kept[sender], 0
        try:
            while True:
                told = channel.hear(ever=True)
                if told:
                    channel.tell(self._keep(sender, channel, told))
                arrived += 1
                self._note(sender, arrived)
        except Exception as error:
            channel.close(f"{type(error).__name__}: {error}")
            self._note(sender, math.inf)

    def _note(self, sender: int, arrived: float) -> None:
        with self._changed:
            self._arrived[sender] = arrived
            self._changed.notify_all()

    def _keep(self, sender: int, channel: Channel, told: State) -> State:
        """Keep the file that a rank tells of; the answer, once it is kept or is not."""
        size, seal = told["size"], bytes.fromhex(told["seal"])
        generation, own = spoken(files.said(seal, size))
        if own != name_of("rank", sender):
            raise ValueError(f"{own} is no file of rank {sender}")
        name = f"{folder_of(generation.step)}/{own}"
        if self._has(name, size, seal, told["old"]):  # see [Note: shared folders]
            return {"there": True}
        channel.tell({"send": True})
        pieces = channel.pieces(size)
        try:
            with self._folder.new(name, f".copy{self._rank}") as file:
                files.copy(file, pieces, size, seal)
        except Exception as error:
            for _ in pieces:  # what comes behind it are words
                pass
            return {"failed": f"{type(error).__name__}: {error}"}
        return {"there": True}

    def _has(self, name: str, size: int, seal: bytes, old: bool) -> bool:
        try:
            if old:
                read = self._folder.pieces(name, PIECE)
                pieces = (memoryview(piece) for piece in read)
                with open(os.devnull, "wb") as nowhere:
                    files.copy(nowhere, pieces, size, seal)
            return self._folder.seal(name) == (size, seal)
        except UNREADABLE:
            return False
