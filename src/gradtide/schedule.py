"""When buckets leave and when parameters change: rows of data, no code.

- SEQUENTIAL: exchange after backward; the yardstick.
- WFBP: wait-free back-propagation, as in DDP: a bucket leaves when it is full.
- DEAR: as WFBP, but the second half of every exchange hides in the next forward, and
  parameters change just before they are next read (Zhang et al., ICDCS 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """`launch`: a bucket leaves when it is full ("ready") or when backward has ended.

    `update`: parameters change at `step()`, or before they are next read ("forward").
    """

    launch: Literal["ready", "backward"] = "ready"
    update: Literal["step", "forward"] = "step"

    def __post_init__(self) -> None:
        if self.launch not in ("ready", "backward"):
            raise ValueError(
                f"launch={self.launch!r}: a schedule launches 'ready' or 'backward'"
            )
        if self.update not in ("step", "forward"):
            raise ValueError(
                f"update={self.update!r}: a schedule updates at 'step' or 'forward'"
            )


SEQUENTIAL = Schedule(launch="backward")
WFBP = Schedule()
DEAR = Schedule(update="forward")
