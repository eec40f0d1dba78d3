"""When buckets leave and when parameters change: rows of data, no code."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gradtide.core.fields import check_fields, refuse


@dataclass(frozen=True, repr=False)
class Schedule:
    """When buckets leave, and when parameters change.

    The constants SEQUENTIAL, WFBP, DEAR and LOCAL are the usual ones.

    With `launch="step"` training proceeds in *rounds*: every rank makes `every` steps
    alone, then what they did is exchanged, once and for all or a fragment of the model
    at a time. All further fields are about that.

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
            they are exchanged. The default, 1.0, leaves them as they are. A larger one
            makes up for entries that wait long: 1.4 in the recipes `micro`, `exdyna`
            and `deft` with schedule="local". On five tasks that lowered the loss of two
            language models, and raised that of two models of images.
        every: How many steps make a round, 1 or more. More send less, and let the ranks
            drift apart. The default, 1, exchanges every step.
        delay: How many steps later what was exchanged is applied, 0 or more and below
            `every`. Training goes on meanwhile, so that much of the exchange is hidden.
            The default, 0, waits for it.
        fragments: Into how many fragments the model is cut, 1 or more, a divisor of
            `every`. One after the other is exchanged, so that the link is neither idle
            nor has a burst to carry. Layers are dealt out in turn. The default is 1.
        mix: What is kept of a rank's own parameters when an exchange is applied late: a
            share from 0 to below 1, as in Streaming DiLoCo (0.5 there). None, the
            default, keeps the steps that a rank has made since what was exchanged,
            whole, and nothing else: so every step counts once.
        decay: By which factor a residual counts when the next steps are added, from 0
            to 1. Below 1, the default, old debts are forgotten: what is lost is the one
            *intended* departure from the conservation law. SparseLoCo has 0.95.
        ahead: Which share of what the optimizer's momentum will make of a step is sent
            with it, 0 or more. LOCAL has 0.25; the default, 0, sends what was done.
        against: How much an entry counts in the selection that the optimizer's mean of
            gradients opposes, above 0 and at most 1. Then selection goes by the square
            of a step times that mean. LOCAL has 0.1. None, the default, selects by the
            size of entries.
        noise: Whether steps of optimizers that divide by the root of squares, as Adam
            does, count by the root of the number of ranks, because a rank's own
            gradient is so much noisier than the mean. LOCAL has True.

    Raises:
        ValueError: A field is none of these, or two of them do not go together.
    """

    launch: Literal["ready", "backward", "step"] = "ready"
    update: Literal["step", "forward"] = "step"
    gain: float = 1.0
    every: int = 1
    delay: int = 0
    fragments: int = 1
    mix: float | None = None
    decay: float = 1.0
    ahead: float = 0.0
    against: float | None = None
    noise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.launch != "step" and (given := self._given()):
            raise ValueError(f"{given[0]}: only with launch='step'")
        wrong = {
            "launch='step' exchanges what a step did: it updates at 'step', too": (
                self.launch == "step" and self.update != "step"
            ),
            f"gain={self.gain!r}: a finite factor above 0": self.gain <= 0,
            f"every={self.every}: a number of steps, 1 or more": self.every < 1,
            f"delay={self.delay}: from 0 to below every={self.every}": not (
                0 <= self.delay < max(self.every, 1)
            ),
            f"fragments={self.fragments}: a divisor of every={self.every}": (
                self.fragments < 1 or self.every % self.fragments != 0
            ),
            f"mix={self.mix!r}: from 0 to below 1, and only with a delay": (
                self.mix is not None and not (0 <= self.mix < 1 and self.delay)
            ),
            f"decay={self.decay!r}: from 0 to 1": not 0 <= self.decay <= 1,
            f"ahead={self.ahead!r}: 0 or more, and only with every=1": (
                self.ahead < 0 or (self.ahead > 0 and self.rounds)
            ),
            f"against={self.against!r}: above 0 to 1, and only with every=1": (
                self.against is not None and (not 0 < self.against <= 1 or self.rounds)
            ),
        }
        refuse(wrong)

    def __repr__(self) -> str:
        always = [f"{n}={getattr(self, n)!r}" for n in ("launch", "update", "gain")]
        more = [text for text in self._given() if not text.startswith("gain=")]
        return f"Schedule({', '.join([*always, *more])})"

    def _given(self) -> list[str]:
        """What differs from the defaults of the fields of rounds."""
        own = fields(self)[2:]
        values = ((f.name, getattr(self, f.name), f.default) for f in own)
        return [f"{name}={value!r}" for name, value, usual in values if value != usual]

    @property
    def rounds(self) -> bool:
        """Whether ranks make steps alone, so that they differ between exchanges."""
        return self.every > 1

    def leaving(self, position: int) -> int | None:
        """Return which fragment leaves after a round's step of this number, from 1 on.

        Args:
            position: The number of the step in its round, from 1 to `every`.

        Returns:
            The fragment, from 0 on; None if nothing leaves.
        """
        fragment, rest = divmod(position, self.every // self.fragments)
        return None if rest else fragment - 1

    def next_leaving(self, position: int) -> int:
        """Return the position at which a fragment leaves next.

        Args:
            position: How many steps of the round are over, below `every`.

        Returns:
            The number of the step in its round after which the next fragment leaves.
        """
        apart = self.every // self.fragments
        return (position // apart + 1) * apart

    def late(self, fragment: int, position: int) -> bool:
        """Return whether a fragment that is under way is to be applied by now.

        Args:
            fragment: Its number, from 0 on.
            position: How many steps of the round are over.

        Returns:
            True if that is at least `delay` steps after it left.
        """
        left = (fragment + 1) * (self.every // self.fragments)
        return (position - left) % self.every >= self.delay


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

LOCAL = Schedule("step", ahead=0.25, against=0.1, noise=True)
"""Have every rank step from its own gradients, and exchange what the step did.

It is for sparse collectives under optimizers that remember, as Adam does: a step that
arrives late is as long as it was meant to be. Its constants are for every step; rounds
of several, `Schedule("step", every=30)`, need none of them. The idea is from
Qsparse-local-SGD (Basu et al., NeurIPS 2019); see `gradtide.runtime.exchange.steps`.
"""
