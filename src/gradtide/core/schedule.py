"""When buckets leave and when parameters change: rows of data, no code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradtide.core.fields import check_fields


@dataclass(frozen=True)
class Schedule:
    """When buckets leave, and when parameters change.

    The constants SEQUENTIAL, WFBP, DEAR and LOCAL are the usual ones.

    Args:
        launch: When a bucket leaves. "ready", the default, is when all of its gradients
            are there, which overlaps the exchange with backward. "backward" is when
            backward has ended. "step" is after the optimizer's step, and then what the
            step did travels instead of gradients.
        update: When parameters change. "step", the default, is at `optimizer.step()`,
            as on one machine. "forward" is before a module next reads them, so that the
            second half of every exchange hides in the next forward; `.grad` cannot be
            read before that.
        gain: By which factor the optimizer's steps count, finite and above 0, where
            they are exchanged (`launch="step"`). The default, 1.0, leaves them as they
            are. A larger one makes up for entries that wait long: 1.4 in the recipes
            `micro`, `exdyna` and `deft` with schedule="local".

    Raises:
        ValueError: A field is none of these, or two of them do not go together.
    """

    launch: Literal["ready", "backward", "step"] = "ready"
    update: Literal["step", "forward"] = "step"
    gain: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.launch == "step" and self.update != "step":
            raise ValueError(
                "launch='step' exchanges what a step did: it updates at 'step', too"
            )
        if self.gain != 1 and self.launch != "step":
            raise ValueError(f"gain={self.gain!r}: only with launch='step'")
        if self.gain <= 0:
            raise ValueError(f"gain={self.gain!r}: a finite factor above 0")


SEQUENTIAL = Schedule(launch="backward")
"""Exchange when backward has ended, and hide nothing: the yardstick, not for training.
"""

WFBP = Schedule()
"""Send a bucket when it is full, during backward: wait-free back-propagation.

DistributedDataParallel does the same. Averaged gradients are there when backward
returns (Zhang et al., Poseidon, USENIX ATC 2017).
"""

DEAR = Schedule(update="forward")
"""As WFBP, but the second half of every exchange hides in the next forward.

Parameters change just before they are next read (Zhang et al., ICDCS 2023). The values
are those of WFBP, bit for bit.
"""

LOCAL = Schedule(launch="step")
"""Have every rank step from its own gradients, and exchange what the step did.

It is for sparse collectives under optimizers that remember, as Adam does: a step that
arrives late is as long as it was meant to be. The idea is from Qsparse-local-SGD (Basu
et al., NeurIPS 2019); see `gradtide.runtime.local_steps`.
"""
