"""What waits for the next forward where updates are deferred.

From the end of backward to the update a `DeferredGrad` stands in the place of every
gradient: the second half of the exchange has not run. What step() would have done is
noted, and parameters that are out of date are watched, with the modules that read them.
This module knows parameters, optimizers and modules; nothing of exchanges, or of when
anything happens.

[Note: watch] A module with a hook takes Python's long way into its forward, which in a
model of many small modules costs as much as a layer: so a module has the hook only
while it reads something that is due. The hook runs before the user's own, which may
read too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from sys import getrefcount
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.core.grouped import grouped
from gradtide.core.step import Stage
from gradtide.core.torch_internals import forward_pre_hooks
from gradtide.core.torch_internals.autograd import Hook
from gradtide.core.torch_internals.compilation import is_scripted
from gradtide.core.torch_internals.versions import put_first
from gradtide.runtime.deferred.due import Aliases, Kind, begin_due, due_kind, end_due
from gradtide.runtime.deferred.gradient_info import GradientInfo
from gradtide.runtime.deferred.grads import PAST, DeferredGrad
from gradtide.runtime.deferred.partial_norms import scale
from gradtide.runtime.layout.buckets import ALONE, GradientBucket
from gradtide.runtime.layout.placement import Placement
from gradtide.runtime.optimizer.deferred_step import DeferredStep, Divides, dividing

if TYPE_CHECKING:  # few trainings have any
    from gradtide.runtime.layout.owned_bucket import OwnedBucket

PLAINLY = 0.5  # of what is exchanged: where more cannot be deferred, hardly any use


class Updates:
    """The deferred gradients, the noted step and the watched modules of a replica."""

    def __init__(self, placement: Placement, answers: GradientInfo) -> None:
        self._placement, self._gradient_info = placement, answers
        self._aliases = Aliases(placement.places)
        self._warned = False
        self._due: dict[Kind, Kind | None] = {}  # classes while parameters are due
        # Of each bucket its parameters, their classes, and those while they are due.
        self._kinds: dict[GradientBucket, list[tuple[nn.Parameter, Kind, Kind]]] = {}
        self._rigid: list[nn.Parameter] = []  # those that can have no other class
        self._deferred_grads: dict[GradientBucket, list[DeferredGrad]] = {}
        self._params: Set[int] = frozenset()  # the ids of all of them
        self.promised = False  # gradients of the last backward are deferred
        self._step: DeferredStep | None = None
        self._dividing: list[Divides] = []  # optimizers, of that step
        # Of each module that can be watched, its hooks and the key of the one that
        # watches it. Hot: looked up once.
        self._hooks: dict[nn.Module, tuple[Any, int]] = {}
        self._hook: Hook

    def reset(self) -> None:
        """Forget the buckets: they are cut anew, and nothing is on its way."""
        for deferred in self._all():
            deferred.source = PAST  # if somebody has kept it
        self._deferred_grads, self._kinds = {}, {}

    def abandon(self) -> None:
        """Nothing that is deferred will come: parameters are as they are now."""
        for p, plain, due in chain.from_iterable(self._kinds.values()):
            if type(p) is due and (grad := end_due(p, plain)) is not None:
                p.grad = grad
        for deferred in self._all():
            deferred.source = PAST
            if deferred.slot.param.grad is deferred:
                deferred.slot.param.grad = deferred.value
        self.promised = False
        self._gradient_info.end()
        self.rest(self._hooks)

    def _all(self) -> Iterator[DeferredGrad]:
        return chain.from_iterable(self._deferred_grads.values())

    def watch(
        self, model: nn.Module, before_read: Callable[[nn.Module], None]
    ) -> list[Any]:
        """Have `before_read` called before modules run; returns the hooks' handles."""
        self._hook = Hook(lambda module, _: before_read(module))
        handles = []
        for module in model.modules():
            if is_scripted(module):  # read before the one above it runs
                continue
            handle = module.register_forward_pre_hook(self._hook)
            handles.append(handle)
            hooks = forward_pre_hooks(module)
            self._hooks[module] = hooks, handle.id
            put_first(hooks, handle.id, self._hook)
        return handles

    def defer_gradients(self) -> None:
        """Put a `DeferredGrad` in the place of every gradient."""
        if not self._deferred_grads:  # by now the buckets are final
            for bucket in self._placement.buckets:
                grads = [
                    DeferredGrad.of(slot, self._gradient_info) for slot in bucket.slots
                ]
                self._deferred_grads[bucket] = grads
            self._params = frozenset(map(id, self._placement.places))
        self._gradient_info.begin()
        self.promised = True
        for bucket, grads in self._deferred_grads.items():
            for i in range(len(grads)):
                if bucket.owned:
                    grads[i].source = self._gradient_info
                if getrefcount(grads[i]) > ALONE:  # somebody has kept the last one
                    grads[i].source = PAST
                    grads[i] = DeferredGrad.of(grads[i].slot, self._gradient_info)
                deferred = grads[i]
                p = deferred.slot.param
                deferred.renew(p.grad)
                p.grad = deferred

    def deliver(self, bucket: GradientBucket) -> None:
        """The means of a bucket are here, before step()."""
        if not self.promised:
            bucket.expose()
            return
        for deferred in self._fill(bucket):
            if deferred.zeroed and deferred.value is not None:
                deferred.value.zero_()

    def _fill(self, bucket: GradientBucket) -> list[DeferredGrad]:
        """The deferred gradients of a bucket, with their values."""
        filled = self._deferred_grads[bucket]
        for deferred, mean in zip(filled, bucket.delivered(), strict=True):
            deferred.fill(mean)
        return filled

    def withdraw(self) -> None:
        """Put what was delivered in the place of what was deferred."""
        self._undefer()
        if not self.promised:
            return
        self.promised = False
        self._gradient_info.end()
        for deferred in self._all():
            p = deferred.slot.param
            if p.grad is deferred:
                p.grad = deferred.value

    def let_go(self) -> None:
        """Gradients are about to be overwritten: see [Note: kept] in `buckets`."""
        for grads in self._deferred_grads.values():
            for i in range(len(grads)):
                if getrefcount(grads[i]) == ALONE:  # nobody has kept it
                    grads[i].value = None

    def scale(self, engine: Engine) -> None:
        """Scale what is held now, for those who read means before `apply`."""
        for bucket, grads in self._deferred_grads.items():
            if any(deferred.scales for deferred in grads):
                assert bucket.flight is not None
                engine.wait(bucket.flight)
                own = [deferred.scales for deferred in grads]
                scale(bucket, own, engine.group)
                for deferred in grads:
                    deferred.scales = []

    def note(self, optimizer: Optimizer) -> None:
        """Note what step() would do now, and to which parameters.

        Meanwhile the optimizer finds no gradients, until `put_back`.
        """
        self.promised = False
        self._step = DeferredStep(optimizer)
        self._dividing = dividing(optimizer) if self._placement.divided else []
        for one in self._dividing:  # behind what was noted
            one.deferred = True
        for deferred in self._all():
            slot = deferred.slot
            here = slot.param.grad is deferred
            slot.wanted = here and not deferred.zeroed
            if here:
                slot.param.grad = None

    def answer(self, owned: GradientBucket, rank: int) -> None:
        """Have `rank`, this one, step for all: means that it owns are at their cut."""
        bucket, found = cast("OwnedBucket", owned), dict[Tensor, Tensor]()
        own = [d for d in self._deferred_grads[bucket] if bucket.owner(d.slot) == rank]
        for deferred in own:
            slot = deferred.slot
            deferred.fill(bucket.held_mean(slot) if slot.used else None)
            if slot.wanted and deferred.value is not None:
                found[slot.param] = deferred.value
        with _gradients(found):
            for one in self._dividing:
                found |= one.answers(found)
        for deferred in own:
            bucket.answer(deferred.slot, found.get(deferred.slot.param))
        bucket.answered = True

    def put_back(self) -> None:
        """step() is over: gradients can be read again, or zeroed."""
        self._undefer()
        if self._step is not None and not self._dividing:  # owners go on with theirs
            self._step.mark(self._params)
        for bucket, grads in self._deferred_grads.items():
            due = bucket.stage is Stage.DUE
            for deferred in grads:
                slot = deferred.slot
                if slot.wanted and slot.param.grad is None:
                    slot.param.grad = deferred if due else deferred.value

    def refuse_elsewhere(self) -> None:
        """Raise RuntimeError, on every rank, for a step by means that owners had."""
        for bucket, grads in self._deferred_grads.items():
            for deferred in grads if bucket.owned else ():
                if deferred.slot.param.grad is deferred:
                    deferred.source.have(deferred)

    def _undefer(self) -> None:
        """Optimizers that divide their step make it by themselves again."""
        for one in self._dividing:
            one.deferred = False

    def expect(self) -> list[GradientBucket]:
        """All is due now: watch the parameters, and the modules that read them.

        Returns the buckets that cannot be watched, to be updated at once.
        """
        placement = self._placement
        placement.learn()
        if not self._kinds:
            self._find_kinds()
        now = placement.unread | self._shared()
        if placement.learning:
            now.update(placement.buckets)
        for bucket in placement.buckets:
            for p, _, due in self._kinds[bucket]:
                begin_due(p, due)
        # Under the hook's old key: to register it anew costs more than to leave it on.
        for module in self._hooks if placement.learning else placement.reads:
            entry = self._hooks.get(module)
            if entry is not None:  # not if the user added the module since
                hooks, key = entry
                put_first(hooks, key, self._hook)
        return [bucket for bucket in reversed(placement.buckets) if bucket in now]

    def _find_kinds(self) -> None:
        self._rigid = []
        for bucket in self._placement.buckets:
            kinds = self._kinds[bucket] = []
            for p in (slot.param for slot in bucket.slots):
                plain = type(p)
                if plain not in self._due:
                    self._due[plain] = due_kind(p, self._gradient_info.read)
                if due := self._due[plain]:
                    kinds.append((p, plain, due))
                else:
                    self._rigid.append(p)

    def _shared(self) -> set[GradientBucket]:
        """Buckets of parameters that are read past their class, see [Note: aliases]."""
        places = self._placement.places
        found = self._aliases.find() + self._rigid
        buckets = {places[p].bucket for p in found}
        if found and not self._warned:
            self._warned = True
            warnings.warn(self._told(found, buckets), stacklevel=2)
        return buckets

    def _told(
        self, found: Sequence[nn.Parameter], buckets: Iterable[GradientBucket]
    ) -> str:
        """What shared memory costs, and what to do about it."""
        places = self._placement.places
        everything = sum(b.payload.flat.nbytes for b in self._placement.buckets)
        share = sum(b.payload.flat.nbytes for b in buckets) / max(everything, 1)
        most = share > PLAINLY
        return (
            f"another tensor shares the memory of {places[found[0]].slot.name} (a kept "
            ".data, .detach() or state_dict(), as of a moving average; a flat view, "
            f"another parameter, a graph that was not freed), and of {len(found)} of "
            f"{len(places)} parameters in all. So their deferred updates are carried "
            f"out at step(), and {share:.0%} of what is exchanged does not hide in the "
            "next forward: let go of it before step(), or keep a copy"
            + "; otherwise 'wfbp' would do as well"
            * most
        )

    def apply(self, buckets: Sequence[GradientBucket]) -> None:
        """Carry out the noted step for the parameters of some buckets."""
        alike = grouped(
            buckets, lambda b: (b.payload.flat.device.type, b.momentum_applied)
        )
        for (device, applied), members in alike.items():
            # As at step(): outside the forward's inference mode and autocast.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(device, enabled=False),
            ):
                self._update(members, momentum=not applied)
        # Nothing that was up to date once these buckets were is watched any longer.
        reads, readers = self._placement.reads, self._placement.readers
        self.rest(
            module
            for bucket in buckets
            for module in readers[bucket]
            if not any(other.stage is Stage.DUE for other in reads[module])
        )

    def _update(self, buckets: Sequence[GradientBucket], momentum: bool) -> None:
        assert self._step is not None
        # Gradients of a backward that a forward before step() belongs to.
        kinds = (kind for bucket in buckets for kind in self._kinds[bucket])
        later = [(p, end_due(p, plain)) for p, plain, _ in kinds]
        updates, aside = [], []
        elsewhere = self._take(buckets)
        for deferred in chain.from_iterable(map(self._fill, buckets)):
            p, mean = deferred.slot.param, deferred.value
            if deferred in elsewhere:
                deferred.leave()
            elif mean is None:
                if p.grad is deferred:
                    p.grad = None  # no rank used it
            elif deferred.slot.wanted:
                updates.append((deferred, p, mean))
                aside.append(p.grad)
                p.grad = mean
        self._step.apply([p for _, p, _ in updates], momentum)
        for (deferred, p, mean), grad in zip(updates, aside, strict=True):
            if grad is not deferred:
                p.grad = grad
            elif deferred.zeroed:  # since step()
                mean.zero_()
        for p, grad in later:
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad

    def _take(self, buckets: Sequence[GradientBucket]) -> set[DeferredGrad]:
        """Step by what owners have computed; returns what has no means but there."""
        assert self._step is not None
        owned = (cast("OwnedBucket", bucket) for bucket in buckets if bucket.owned)
        found = [bucket for bucket in owned if bucket.answered]
        if not found:
            return set()
        answers = chain.from_iterable(bucket.answers() for bucket in found)
        self._step.take({slot.param: answer for slot, answer in answers})
        return {
            deferred
            for bucket in found
            for deferred in self._deferred_grads[bucket]
            if bucket.owner(deferred.slot) is not None
        }

    def rest(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules no longer, see [Note: watch].

        One whose hook was never called costs nothing. It may be in compiled code, which
        is compiled anew when a module in it has another number of hooks.
        """
        called = self._placement.called
        for module in modules:
            entry = self._hooks.get(module)
            # Not if the module is a copy.
            if entry is not None and module in called:
                entry[0].pop(entry[1], None)


@contextmanager
def _gradients(values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Have these be the `.grad` of parameters."""
    aside = {p: p.grad for p in values}
    for p, value in values.items():
        p.grad = value
    try:
        yield
    finally:
        for p, grad in aside.items():
            p.grad = grad
