"""When buckets leave and when parameters change: rows of data, no code.

- SEQUENTIAL: exchange after backward; the yardstick.
- WFBP: wait-free back-propagation, as in DDP: a bucket leaves when it is full.
- DEAR: as WFBP, but the second half of every exchange hides in the next forward, and
  parameters change just before they are next read (Zhang et al., ICDCS 2023).
- LOCAL: every rank steps from its own gradients, and what the step did is exchanged
  (`gradtide.local`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """`launch`: a bucket leaves when it is full ("ready"), when backward has ended, or
    after the optimizer's step ("step"), with what that did instead of gradients.

    `update`: parameters change at `step()`, or before they are next read ("forward").

    `gain`: by how much more the optimizer's steps count, where they are exchanged: for
    entries that wait long, see `gradtide.local`.
    """

    launch: Literal["ready", "backward", "step"] = "ready"
    update: Literal["step", "forward"] = "step"
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.launch not in ("ready", "backward", "step"):
            raise ValueError(
                f"launch={self.launch!r}: a schedule launches 'ready', 'backward' or "
                "'step'"
            )
        if self.update not in ("step", "forward"):
            raise ValueError(
                f"update={self.update!r}: a schedule updates at 'step' or 'forward'"
            )
        if self.launch == "step" and self.update != "step":
            raise ValueError(
                "launch='step' exchanges what a step did: it updates at 'step', too"
            )
        if self.gain != 1 and self.launch != "step":
            raise ValueError(f"gain={self.gain!r}: only with launch='step'")
        if not (isinstance(self.gain, float | int) and 0 < self.gain < inf):
            raise ValueError(f"gain={self.gain!r}: a finite factor above 0")


SEQUENTIAL = Schedule(launch="backward")
WFBP = Schedule()
DEAR = Schedule(update="forward")
LOCAL = Schedule(launch="step")
