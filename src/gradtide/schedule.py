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
from typing import Literal, TypeAlias

# A factor, "noise", or None; see Schedule.
Gain: TypeAlias = "float | Literal['noise'] | None"


@dataclass(frozen=True)
class Schedule:
    """`launch`: a bucket leaves when it is full ("ready"), when backward has ended, or
    after the optimizer's step ("step"), with what that did instead of gradients.

    `update`: parameters change at `step()`, or before they are next read ("forward").

    `gain`: by how much the optimizer's steps count, where they are exchanged. None: the
    root of the number of ranks for optimizers that divide by what gradients are like,
    1 for others. "noise": as much, but less where a rank's gradients are no noisier
    than their mean, by Adam's `exp_avg` and `exp_avg_sq`.
    """

    launch: Literal["ready", "backward", "step"] = "ready"
    update: Literal["step", "forward"] = "step"
    gain: Gain = None

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
        known = self.gain in (None, "noise")
        if not known and not (isinstance(self.gain, float | int) and self.gain > 0):
            raise ValueError(f"gain={self.gain!r}: a factor above 0, or 'noise'")
        if self.gain is not None and self.launch != "step":
            raise ValueError(f"gain={self.gain!r}: only with launch='step'")


SEQUENTIAL = Schedule(launch="backward")
WFBP = Schedule()
DEAR = Schedule(update="forward")
LOCAL = Schedule(launch="step")
