"""What was found so far, in a file that is whole at any moment.

A figure that has begun counts as failed until it is there: whatever cuts a program off,
the file says what it was at. Who goes on takes what was never begun, then what failed.
"""

from __future__ import annotations

import fcntl
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CUT_OFF = "cut off: its process was ended, or ended by itself"
BROKEN = 3  # exit code of a process whose device answers nothing any more


class Ledger(Protocol):
    """Takes figures in, whoever measures them."""

    def left(self, names: Iterable[str]) -> list[str]:
        """Those that are still to be measured."""

    def begin(self, name: str) -> None: ...
    def put(self, name: str, value: Any) -> None: ...
    def fail(self, name: str, why: str) -> None: ...


class Book:
    """The figures of one section; sections of a file may be written at once."""

    def __init__(self, path: Path, section: str) -> None:
        self._path, self._section = path, section
        self._failed = set[str]()  # by this process: not tried once more
        self._begun = dict[str, float]()
        self._lock = threading.Lock()

    @property
    def entries(self) -> dict[str, Any]:
        section = read(self._path)["sections"].get(self._section, {"figures": {}})
        found: dict[str, Any] = section["figures"]
        return found

    @property
    def values(self) -> dict[str, Any]:
        """What was measured, by the names of the figures."""
        return valued(self.entries)

    def left(self, names: Iterable[str]) -> list[str]:
        """Those that are not there: what was never begun, then what failed before."""
        there = self.entries
        names = [n for n in names if n not in self._failed]
        again = [n for n in names if n in there and "value" not in there[n]]
        return [n for n in names if n not in there] + again

    def begin(self, name: str) -> None:
        self._begun[name] = time.monotonic()
        self._write(name, {"failed": CUT_OFF})

    def put(self, name: str, value: Any) -> None:
        seconds = time.monotonic() - self._begun.get(name, time.monotonic())
        self._write(name, {"value": value, "seconds": round(seconds, 2)})
        print(f"  {self._section}, {name}: {shown(value)}", flush=True)

    def fail(self, name: str, why: str) -> None:
        self._failed.add(name)
        self._write(name, {"failed": why[-3000:]})
        print(f"  {self._section}, {name}: FAILED: {why[-1200:]}", flush=True)

    def skip(self, names: Iterable[str], why: str) -> None:
        """They are not to be had here."""
        for name in names:
            self._failed.add(name)
            if name not in self.values:
                self._write(name, {"skipped": why})
                print(f"  {self._section}, {name}: skipped: {why}", flush=True)

    def measure(self, figures: Mapping[str, Callable[[], Any]]) -> None:
        """Call what is missing of these; one that raises does not keep the others."""
        for name in self.left(figures):
            self.begin(name)
            try:
                self.put(name, figures[name]())
            except Exception as error:  # whatever it is, it is what was found
                self.fail(name, told(error))
                if is_broken(error):
                    raise SystemExit(BROKEN) from error

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        with self._lock, changing(self._path) as data:
            entry["run"] = len(data["runs"]) - 1
            section = data["sections"].setdefault(self._section, {"figures": {}})
            section["figures"][name] = entry


def valued(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were measured."""
    return {name: each["value"] for name, each in entries.items() if "value" in each}


def told(error: BaseException) -> str:
    """An error in words, with the place in which it was raised."""
    where, last = "", error.__traceback__
    while last is not None:
        code = last.tb_frame.f_code
        where = f"{Path(code.co_filename).name}:{last.tb_lineno} in {code.co_name}"
        last = last.tb_next
    return f"{type(error).__name__}: {error} ({where})"


def is_broken(error: BaseException) -> bool:
    """Whether all that this process asks of its device from now on fails, too."""
    words = "CUDA error", "illegal memory access", "device-side assert"
    return any(each in str(error) for each in words)


def shown(value: Any) -> str:
    """A figure for people, in one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}..."


# - The file ---------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"runs": [], "sections": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@contextmanager
def changing(path: Path) -> Iterator[dict[str, Any]]:
    """What is in the file, to be changed by one at a time; it is replaced whole."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = read(path)
        yield data
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)


def begin_run(path: Path, about: Mapping[str, Any]) -> None:
    """A record says first what the last run was; each figure, in which it came."""
    with changing(path) as data:
        runs, sections = [*data["runs"], dict(about)], data["sections"]
        data.clear()
        data.update({**about, "runs": runs, "sections": sections})


# - Bars -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """What a number of a figure has to be: at most, or at least, so much.

    `key` is the number's name in the figure. With `per` it is divided by the least that
    the same key is in other figures, as far as these are there. `what` says it.
    """

    what: str
    figure: str
    key: str
    most: float = math.inf
    least: float = -math.inf
    per: Sequence[str] = ()

    @property
    def exact(self) -> bool:
        """It is about what is right, and not about time or memory."""
        return self.least == self.most

    @property
    def text(self) -> str:
        if self.exact:
            return "true"
        return (
            f">= {self.least:.3g}" if self.most == math.inf else f"<= {self.most:.3g}"
        )

    def row(self, entries: Mapping[str, Any], tiny: bool) -> dict[str, Any]:
        """The bar, the number, and whether that is met, missed, open, or failed.

        In a walk-through all that is not exact is open.
        """
        values = valued(entries)
        number = self._number(values)
        verdict = "failed" if "failed" in entries.get(self.figure, {}) else "open"
        if tiny and not self.exact:
            pass
        elif number is not None:
            verdict = "met" if self.least <= number <= self.most else "missed"
        elif values.get(self.figure, {}).get(self.key, 0) is None:
            verdict = "missed"  # it did not come to that
        row = {"what": self.what, "number": number, "bar": self.text}
        return {**row, "verdict": verdict}

    def _number(self, values: Mapping[str, Any]) -> float | None:
        found = values.get(self.figure, {}).get(self.key)
        others = [values[n].get(self.key) for n in self.per if n in values]
        base = min((x for x in others if x), default=None) if self.per else 1.0
        return None if found is None or base is None else float(found) / base


def right(what: str, figure: str, key: str) -> Bar:
    """A bar of something that is true or not."""
    return Bar(what, figure, key, most=1, least=1)
