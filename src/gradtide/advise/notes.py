"""What a program that is recorded leaves in a folder, for who started it.

A stage is a file that is there or not. The trace comes last, whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gradtide.planner import trace as traces
from gradtide.planner.trace import StepTrace

VARIABLE = "GRADTIDE_ADVISE"  # names the folder, also in `startup.sitecustomize`


@dataclass(frozen=True)
class Wanted:
    """How many steps are timed, and how many go before."""

    steps: int = 5
    warmup: int = 2


@dataclass(frozen=True)
class Told:
    """What was seen besides the trace. `between`: seconds of a step in no trace."""

    script: str
    models: tuple[str, ...]
    optimizer: str
    others: tuple[str, ...]  # optimizers that step less
    wrapped: bool  # by torch's DistributedDataParallel
    ranks: int
    passes: int  # backward passes of a step
    between: float
    closes: bool = False  # the passes are those of its closure


class Notes:
    """One folder's; every method is that of either side."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def ask(self, wanted: Wanted) -> None:
        (self.folder / "wanted.json").write_text(json.dumps(asdict(wanted)))

    def wanted(self) -> Wanted:
        return Wanted(**json.loads((self.folder / "wanted.json").read_text()))

    def note(self, stage: str, text: str = "") -> None:
        """Say that a stage is reached; where nobody asks any more, nothing happens."""
        with suppress(OSError):
            self._whole(stage, lambda path: path.write_text(text))

    def stage(self, stage: str) -> str | None:
        """What was said of it; None where it is not reached."""
        try:
            return (self.folder / stage).read_text()
        except OSError:
            return None

    def count(self, prefix: str) -> int:
        """How many stages begin so."""
        return len(list(self.folder.glob(f"{prefix}*")))

    def finish(self, trace: StepTrace, told: Told) -> None:
        self.note("told", json.dumps(asdict(told)))
        self._whole("trace.json", trace.save)

    @property
    def finished(self) -> bool:
        return (self.folder / "trace.json").exists()

    def found(self) -> tuple[StepTrace, Told]:
        told = json.loads(self.stage("told") or "")
        many = {name: tuple(told[name]) for name in ("models", "others")}
        return traces.load(self.folder / "trace.json"), Told(**{**told, **many})

    def _whole(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file that is seen when it is whole."""
        part = self.folder / f".{name}.{os.getpid()}"
        write(part)
        os.replace(part, self.folder / name)
