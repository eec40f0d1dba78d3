"""A run's state as a whole: its parts, by who owns them, in an order.

All parts are read before anything changes; all ranks agree, once on what must be common
and then on what a part compares by itself; then all parts are loaded in their order.
Behind those that choose a scheme come

    1. residuals and what algorithms remember, which go into the buckets as they are
       now, so that nothing may cut these anew afterwards;
    2. K-FAC's factors, which are laid out as the buckets are;
    3. the optimizer's state, where every rank has its own;
    4. a round that is under way: it has parameters, and means that take up buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gradtide.core.payload import traits
from gradtide.runtime import checkpoint
from gradtide.runtime.checkpoint import RunState, Saved, StateDict
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.runtime.training import Training

REMEDY = "load what was saved at one moment, on every rank"


class Beside(Protocol):
    """What is loaded together with a state, once all ranks have read all."""

    def check(self) -> None:
        """Raise ValueError for what does not fit. Local, and changes nothing."""

    def load(self) -> None:
        """Load it. Local."""


class Run:
    """Residuals, what algorithms remember, and what is known of steps.

    `scheme` is asked for the replica's, which parts that are loaded before may change.
    """

    def __init__(self, training: Training, scheme: Callable[[], object]) -> None:
        self._training, self._scheme = training, scheme
        self._placement, self._group = training.placement, training.engine.group

    def save(self, saved: StateDict) -> None:
        steps = self._training.num_steps
        saved |= checkpoint.save(self._placement, self._scheme(), self._group, steps)

    def blank(self, saved: StateDict) -> None:
        size, parts = saved["world_size"], saved["shards"]
        saved |= checkpoint.blank(self._placement, self._group, size, parts)

    def read(self, saved: Mapping[str, Any]) -> RunState:
        return checkpoint.read(self._placement, self._group, saved)

    def confirm(self, found: RunState) -> RunState:
        return found

    def load(self, found: RunState) -> None:
        checkpoint.load(self._placement, self._scheme(), found)
        self._training.resume(found)


def refuse_held(training: Training) -> None:
    """RuntimeError where means are on their way that a save would be without.

    Of an exact scheme nothing is saved that they change, once they were dropped.
    """
    if not training.step.held:
        return
    own = any(traits(b.collective).residual for b in training.placement.buckets)
    if own or training.wanted:
        raise RuntimeError(
            "state_dict() after a backward whose means are on their way: call it after "
            "optimizer.step(), or gather_gradients() before it, on every rank"
        )


def save(
    training: Training,
    scheme: Callable[[], object],
    choosing: Sequence[Saved],
    size: int | None,
    shards: int | None,
) -> StateDict:
    """This rank's state; or keys for that of `size` ranks with so many parts each."""
    placement, group = training.placement, training.engine.group
    now = group.size, placement.shards.number[1]
    asked = size or now[0], shards or now[1]
    parts = Run(training, scheme), *choosing, *_own(training)
    saved: StateDict = {"world_size": asked[0], "shards": asked[1]}
    if asked != now:
        for part in parts:
            part.blank(saved)
        return saved
    for part in parts:
        part.save(saved)
    checkpoint.seal(saved, placement, group, training.notes())
    return saved


def load(
    training: Training,
    scheme: Callable[[], object],
    choosing: Sequence[Saved],
    saved: Mapping[str, Any],
    beside: Beside | None = None,
) -> None:
    """Go on from a state, and from what is saved `beside` it; a collective call.

    Raises ValueError, on every rank and before anything changes, for what is damaged,
    does not fit, or is not of one moment.
    """
    run, transport = Run(training, scheme), training.engine.transport
    parts: list[Saved] = [*choosing, run, *_own(training)]
    first = sorted(parts, key=lambda part: part is not run)  # it tells what is amiss

    def prepare() -> tuple[list[Any], Signature]:
        try:
            if beside is not None:
                beside.check()
            found = {part: part.read(saved) for part in first}
        except ValueError:
            raise
        except Exception as error:  # of many kinds, for many kinds of damage
            raise ValueError(
                f"this is no whole state of gradtide's ({type(error).__name__}: "
                f"{error}): load what sync.state_dict() returned, from a file that "
                "was written to its end"
            ) from error
        return [found[part] for part in parts], found[run].common

    found = check_ranks_agree(transport, prepare, REMEDY)
    found = [part.confirm(own) for part, own in zip(parts, found, strict=True)]

    def change() -> tuple[None, Signature]:
        training.drop()
        training.flush()
        if beside is not None:  # the optimizer, of which ranks may have states here
            beside.load()
        for part, own in zip(parts, found, strict=True):
            part.load(own)
        training.actions.turn_to(training.actions.chosen.now())
        return None, {}

    # Nobody goes on, and waits, where another could not load what it has read.
    check_ranks_agree(transport, change)


def _own(training: Training) -> list[Saved]:
    """What a training's own parts save, beside the residuals."""
    kfac = training.preconditioning
    return [*([] if kfac is None else [kfac]), *training.actions.chosen.saved]
