"""The thread that writes what was copied, and what of earlier generations stays.

A save begins when the one before is over. What was saved before stays until it is known
that all ranks have a later generation whole: one of them may be slower, may have been
killed while it was writing, or its disk may be full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from gradtide.checkpoint.copies import Copies
from gradtide.checkpoint.files import NEW, Folder
from gradtide.checkpoint.generations import (
    folder_of,
    mark,
    name_of,
    steps_in,
)

LATEST = 2  # saves that were given up, and may be whole


class Writer:
    """Writes a rank's files in the background, and removes what is not to stay.

    `begun`, `torn` and `failures` are what ranks tell each other (`runtime.notices`).

    Attributes:
        begun: How many saves have begun.
        reasons: Why saves failed.
        closed: It takes no more.
    """

    def __init__(
        self, folder: Folder, rank: int, keep: int, copies: Copies | None = None
    ) -> None:
        self._folder, self._rank, self._keep = folder, rank, keep
        self._copies = Copies(folder, rank) if copies is None else copies
        # Whoever ends without close() waits for it, too.
        self._pool = ThreadPoolExecutor(1, "gradtide checkpoint")
        self._last: Future[None] | None = None
        self._saved: list[tuple[int, int]] = []  # numbers of saves, and their steps
        self._given_up: list[tuple[int, int]] = []  # likewise, see `give_up`
        self._own, self._whole = 0, 0  # the last whole one here, and on all ranks
        self.begun, self.reasons = 0, list[str]()
        self.closed = False

    @property
    def torn(self) -> int:
        """How many of the last two saves are not whole, yet or for ever."""
        return min(self.begun - self._own, 2)

    @property
    def failures(self) -> int:
        """How many saves have failed."""
        return len(self.reasons)

    @property
    def whole(self) -> list[int]:
        """The steps of which all ranks are known to have all."""
        return [step for number, step in self._saved if number <= self._whole]

    def begin_among(self, rank: int, whole: Iterable[int], told: int) -> None:
        """Save on among other ranks, where some were lost or have come.

        Steps that are `whole` stay; what else was saved never counts. Of failures so
        many were `told`.
        """
        self._rank, self.reasons = rank, self.reasons[told:]
        self.begun = self._own = self._whole = 0
        self._saved = [(0, step) for step in sorted(whole)]
        self._given_up = []

    def begin_at(self, step: int) -> None:
        """All ranks have gone on from a generation: it stays, as it is whole."""
        self._saved = [(self.begun, step)]
        self._pool.submit(mark, self._folder, self._rank)

    def restore(self, step: int, fetched: Mapping[str, bytes]) -> None:
        """Have what all have gone on from where a save would have put it.

        `fetched` are files that were on other hosts, and are to be in this folder. What
        cannot be written now comes with the next save.
        """
        self._copies.expect()
        self._last = self._pool.submit(self._restore, folder_of(step), fetched)

    def save(
        self, about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Write files, each named by its kind, once the last ones are written."""
        self.wait()
        self.begun += 1
        self._copies.expect()
        self._saved.append((self.begun, about["step"]))
        self._last = self._pool.submit(self._write, self.begun, dict(about), files)

    def wait(self) -> None:
        """Wait for the save that is under way; what it fails by stays in `reasons`."""
        if self._last is not None:
            with suppress(Exception):
                self._last.result()

    def close(self) -> None:
        """Wait, also for what others have kept here, and take no more."""
        self.closed = True
        self._pool.shutdown(wait=True)
        self._copies.close()

    def confirm(self, whole: int) -> None:
        """All ranks have a save whole: what is not to stay is removed, later."""
        if whole <= self._whole:
            return
        self._whole = whole
        self._saved += [one for one in self._given_up if one[0] == whole]
        self._given_up = [one for one in self._given_up if one[0] > whole]
        steps = kept(self._saved, whole, self._keep)
        self._saved = [one for one in self._saved if one[1] in steps]
        if steps:
            newest = max(step for number, step in self._saved if number <= whole)
            self._pool.submit(self._tidy, frozenset(steps), newest)

    def give_up(self) -> None:
        """A save has failed on some rank: what may not be whole does not count.

        The latest may turn out to be. Of earlier ones this rank's own files go, or a
        disk that is full elsewhere would fill this one, too.
        """
        self._given_up += [one for one in self._saved if one[0] > self._whole]
        self._saved = [one for one in self._saved if one[0] <= self._whole]
        before, self._given_up = self._given_up[:-LATEST], self._given_up[-LATEST:]
        if before:
            self._pool.submit(self._drop, [step for _, step in before])

    def _write(
        self,
        number: int,
        about: Mapping[str, Any],
        files: Mapping[str, Mapping[str, Any]],
    ) -> None:
        under = folder_of(about["step"])
        try:
            try:
                self._sweep()
                for kind, state in files.items():
                    name = f"{under}/{name_of(kind, self._rank)}"
                    self._folder.write(name, state, {**about, "kind": kind})
            except BaseException:
                self._copies.skip()
                raise
            self._copies.send(f"{under}/{name_of('rank', self._rank)}")
        except BaseException as error:
            self.reasons.append(f"{type(error).__name__}: {error}")
            raise
        self._own = number

    def _restore(self, under: str, fetched: Mapping[str, bytes]) -> None:
        for name, data in fetched.items():
            with suppress(OSError), self._folder.new(f"{under}/{name}") as file:
                file.write(data)
        self._copies.send(f"{under}/{name_of('rank', self._rank)}", old=True)

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            for kind in ("rank", "common"):
                name = f"{folder_of(step)}/{name_of(kind, self._rank)}"
                self._folder.remove(name)
            self._folder.remove_empty(folder_of(step))

    def _sweep(self) -> None:
        """Remove what an interrupted save of this rank's has left."""
        own = {f"{name_of(kind, self._rank)}{NEW}" for kind in ("rank", "common")}
        for step in steps_in(self._folder):
            for name in own & set(self._folder.names(folder_of(step))):
                self._folder.remove(f"{folder_of(step)}/{name}")

    def _tidy(self, steps: frozenset[int], newest: int) -> None:
        """Remove generations before the newest whole one that are not to stay.

        Any rank may: others that share the folder find nothing more to do.
        """
        mark(self._folder, self._rank)
        for step in steps_in(self._folder):
            if step < newest and step not in steps:
                self._folder.remove(folder_of(step))


def kept(saved: list[tuple[int, int]], whole: int, keep: int) -> set[int]:
    """The steps that stay: of whole generations the newest, and those to come."""
    done = sorted(step for number, step in saved if number <= whole)
    return {*done[-keep:], *(step for number, step in saved if number > whole)}
