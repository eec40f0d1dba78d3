"""Fusions that are searched for while a model trains.

[Note: who decides] Rank 0 takes times and decides; after every step it sends the others
a word of 16 bytes, for which nobody waits: it is acted upon after the next step, by all
ranks alike. So a decision is a step late, costs the step nothing, and cannot differ
between ranks; the order of requests stays a function of the program.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

import torch

from gradtide.core.engine import Engine
from gradtide.core.grouped import grouped
from gradtide.core.ops import Broadcast
from gradtide.fusion import BySize, Search, Trial, best
from gradtide.planner.watch import Clock as Moments

START = 4  # steps before the first word: they are recorded, and everything is cold
SETTLE = 2  # steps after a change that are not measured: caches and thresholds are cold
HOPELESS = 1.3  # times the best: a trial whose steps all take longer is cut short
ENOUGH = 2  # measured steps before a trial can be cut short
CLOSE = 1.05  # times the best: what is within, and the first, is tried again at the end
AGAIN = 3  # sizes at most that are tried a second time

Tried: TypeAlias = tuple[list[Trial], bool]

log = logging.getLogger(__name__)


class Tuner:
    """Where a search stands. The same on every rank, but for the times under way."""

    def __init__(
        self,
        engine: Engine,
        fusion: Search,
        whole: int,
        device: torch.device,
        adopt: Callable[[BySize], None],
    ) -> None:
        """Begin to search for a model of `whole` bytes.

        `adopt(fusion)` cuts the buckets anew; it is called on every rank, between
        step() and backward.
        """
        self.fusion, self.tried, self.done = fusion, list[Trial](), False
        self._engine, self._whole, self._adopt = engine, whole, adopt
        self._clock = Clock(device)
        self._word: Callable[[], Any] | None = None  # rank 0's, on its way
        self._wait = START
        first = fusion.propose(whole, ())
        self._begin(fusion.smallest if first is None else first)

    @property
    def best(self) -> Trial | None:
        """The fastest size so far; of one that was tried twice, the shorter time."""
        return best([*map(best, _by_size(self.tried))]) if self.tried else None

    def __str__(self) -> str:
        """A line for each trial, and one for what came out."""
        lines = [
            f"{i + 1:3d}  {trial.megabytes:9.3g} MB  {1e3 * trial.seconds:10.2f} ms"
            for i, trial in enumerate(self.tried)
        ]
        found = self.best
        if found is not None:
            end = "best" if self.done else "best so far"
            lines.append(f"{end}: {self.fusion.at(found.megabytes)!r}")
        return "\n".join(lines) or "nothing tried yet"

    def stepped(self) -> None:
        """A step has been taken: act upon the last word, and send the next one."""
        if self._wait:
            self._wait -= 1
            self._clock.reset()
            return
        self._act()
        if not self.done:
            word = torch.zeros(2, dtype=torch.float64, device="cpu")
            if self._engine.group.rank == 0:
                word[0], word[1] = self._judge()
            self._word = self._engine.ask("tune", Broadcast(word, 0))

    def drain(self) -> None:
        """Wait for the word that is on its way, and forget it."""
        if self._word is not None:
            self._word()
            self._word = None

    def save(self, saved: dict[str, Any]) -> None:
        """Add what there is to remember: a single text, as its length changes."""
        saved["tuning"] = json.dumps(
            {"fusion": repr(self.fusion), "tried": self.tried, "done": self.done}
        )

    def blank(self, saved: dict[str, Any]) -> None:
        """The text is that of all ranks."""
        self.save(saved)

    def read(self, saved: Mapping[str, Any]) -> Tried | None:
        """The trials of another run of the same search, and whether it had ended.

        None for a search for something else, or of another number of ranks, of which
        nothing is taken over.
        """
        state = json.loads(saved.get("tuning") or "{}")
        if state.get("fusion") != repr(self.fusion):
            return None
        tried = [Trial(float(mb), float(s)) for mb, s in state["tried"]]
        alike = int(saved["world_size"]) == self._engine.group.size
        return (tried, bool(state["done"])) if alike else None

    def confirm(self, found: Tried | None) -> Tried | None:
        """Times are those of rank 0, and travelled."""
        return found

    def load(self, found: Tried | None) -> None:
        """Go on after what was `read`, with the best of it.

        A search that had not ended goes on with the next trial.
        """
        if found is None:
            return
        self.drain()
        self.tried, self.done = found
        best = self.best
        self._begin(self._size if best is None else best.megabytes)
        if best is not None and not self.done:
            # The others hear from rank 0 what is next; the best is the best until then.
            self._left = 0

    # - On every rank ------------------------------------------------------------------

    def _act(self) -> None:
        if self._word is None:
            return
        seconds, size = self._word().tolist()
        self._word = None
        if math.isnan(seconds):
            return
        if seconds > 0:
            self.tried.append(Trial(self._size, seconds))
            words = f"trial {len(self.tried)}, {self._size:g} MB"
            self._tell(f"{words}: {1e3 * seconds:.2f} ms")
        if math.isnan(size):
            self.done = True
            assert self.best is not None
            size = self.best.megabytes
            self._tell(f"{self.fusion.at(size)!r} is kept")
        self._begin(size)

    def _begin(self, size: float) -> None:
        """Begin a trial of `size` MB."""
        self._size = size
        self._adopt(self.fusion.at(size))
        self._clock.reset()
        self._laps: list[float] = []
        self._left = self.fusion.steps

    def _tell(self, words: str) -> None:
        if self._engine.group.rank == 0:
            log.info("fusion: %s", words)

    # - On rank 0 ----------------------------------------------------------------------

    def _judge(self) -> tuple[float, float]:
        """The word after this step: a trial's seconds, and the size to go on with.

        NaN seconds: the trial goes on; 0: there is none to be told. NaN MB: that was
        the last one.
        """
        if not self._left:  # a search that was stopped between two trials
            return 0.0, self._next(self.tried)
        lap = self._clock.lap()
        if lap is not None:
            self._laps.append(lap)
        measured = self._laps[SETTLE:]
        limit = HOPELESS * min((t.seconds for t in self.tried), default=math.inf)
        hopeless = len(measured) >= ENOUGH and min(measured) > limit
        if len(measured) < self._left and not hopeless:
            return math.nan, 0.0
        seconds = median(measured)
        return seconds, self._next([*self.tried, Trial(self._size, seconds)])

    def _next(self, tried: Sequence[Trial]) -> float:
        """The next size, in MB; NaN if enough is known."""
        trials = _by_size(tried)
        size = self.fusion.propose(self._whole, [first for first, *_ in trials])
        if size is not None:
            return size
        counts = [trial.megabytes for trial in tried]
        ranked = sorted(map(best, trials), key=lambda trial: trial.seconds)
        limit = CLOSE * ranked[0].seconds
        finalists = [t.megabytes for t in ranked[:AGAIN] if t.seconds <= limit]
        # The first was tried while all else in the training was cold, too.
        for size in (*finalists, tried[0].megabytes):
            if counts.count(size) == 1 and len(ranked) > 1:
                return size
        return math.nan


def _by_size(tried: Sequence[Trial]) -> list[list[Trial]]:
    """The trials of each size. The shortest counts: what disturbs one lengthens it."""
    return [*grouped(tried, lambda trial: trial.megabytes).values()]


class Clock:
    """Laps of a training thread, in seconds.

    Where work is only queued, on an accelerator, times are those of the device, and
    known one lap later: nothing waits for the step that was just queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._moments = Moments(device)
        self._marks = deque[Any](maxlen=2 if device.type == "cpu" else 3)

    def reset(self) -> None:
        """Begin the first lap now."""
        self._marks.clear()
        self._marks.append(self._moments.now())

    def lap(self) -> float | None:
        """End a lap; the seconds of the last one that is known, once there is one."""
        self._marks.append(self._moments.now())
        if len(self._marks) != self._marks.maxlen:
            return None
        return self._moments.between(self._marks[0], self._marks[1])
