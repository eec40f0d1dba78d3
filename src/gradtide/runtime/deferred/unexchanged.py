"""Steps that take gradients which no exchange has seen.

A step takes exchanged gradients. Others are written by hand (torch.func, methods for
several tasks), accumulated in no_sync() alone (a window that is cut short), or come
where a parameter has lost its hook. Each rank then steps by its own, and ranks part,
unless the program averages by itself. So the first such step says what to do, and
parameters are compared when it is over: checksums otherwise travel with exchanges, and
here there may be none. Where steps are exchanged, these gradients are as good as any.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from gradtide.runtime.deferred.grads import DeferredGrad
from gradtide.runtime.layout.buckets import Place, lives_in
from gradtide.runtime.layout.placement import Placement

REMEDY = (
    "call sync.exchange() (of a wrapper, its exchange()) on every rank before step(), "
    "which averages what is in .grad, or leave the last backward of every window "
    "outside of no_sync()"
)
UNSEEN = (
    "the step that has just been made took gradients that no exchange has seen: "
    "written by hand, accumulated inside no_sync() alone, of a parameter that was "
    "swapped or replaced, or taken by an optimizer that steps in a gradient hook, "
    "before the mean is there (let it step after backward). "
    f"{REMEDY[0].upper()}{REMEDY[1:]}. Pass check_every=0 to replicate() if ranks may "
    "differ"
)


class Unexchanged:
    """Finds them. All of it is local, and of no cost where each step has its exchange.

    `kept` are the places of gradients that have come inside no_sync() since the last
    exchange. `taken` says how many exchanges there had been at an optimizer's last
    step: several may take what one exchange has brought.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.kept = set[Place]()
        self.taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._warned = False

    def find(self, optimizer: Optimizer, num_exchanges: int) -> str | None:
        """The name of a parameter with such a gradient that is about to be taken."""
        fresh = self.taken.get(optimizer, 0) < num_exchanges
        if fresh and not self.kept:
            return None
        for place in self._places(optimizer):
            grad = place.slot.grad
            if grad is None or isinstance(grad, DeferredGrad):
                continue
            unseen = place in self.kept or not (fresh or _delivered(place, grad))
            if unseen and bool(grad.any()):
                return place.slot.name
        return None

    def _places(self, optimizer: Optimizer) -> Iterator[Place]:
        for group in optimizer.param_groups:
            for p in group["params"]:
                place = self._placement.places.get(p)
                if place is not None:
                    yield place

    def warn(self, name: str) -> None:
        """Say what to do, once."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"step() takes a gradient of {name} that no exchange has seen, as it was "
            "written by hand or accumulated inside no_sync() alone, so each rank steps "
            f"by its own: {REMEDY}. A program that averages by itself can go on: the "
            "parameters are compared after such steps",
            stacklevel=2,
        )


def _delivered(place: Place, grad: Tensor) -> bool:
    """Whether it is in the memory of the mean that was delivered last."""
    mean = place.bucket.mean
    return mean is not None and lives_in(grad, mean)
