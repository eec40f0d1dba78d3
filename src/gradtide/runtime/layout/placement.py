"""Where every gradient goes: flat buffers, their buckets, and who reads these.

This module knows names, modules and buckets; nothing of flows or other ranks. The first
step is recorded (in `recorded` and `called`, by those who see it), so that afterwards
the buckets follow the order in which gradients really get ready.

[Note: slots] Every parameter's slot is padded to a multiple of the number of ranks, so
any run of slots divides into equal parts: buckets can be cut anew without moving a
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradtide.core.grouped import grouped
from gradtide.core.payload import Collective
from gradtide.core.torch_internals.compilation import compiled_parts
from gradtide.fusion import Fusion, Trace
from gradtide.runtime.layout.buckets import GradientBucket, Place
from gradtide.runtime.layout.parameters import averaged, paths, shared_parameters
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.optimizer.deferred_step import Owned
from gradtide.scheme import Scheme
from gradtide.transport.shards import Shards, Spread, spread

Named: TypeAlias = tuple[str, nn.Parameter]
# The last two are how it is divided, and a fragment of the model.
Kind: TypeAlias = tuple[torch.dtype, torch.device, Spread, int]


class Seen(NamedTuple):
    """What was seen of a run's steps: modules that ran, and gradients in their order.

    Of gradients None is recorded where the order is followed already.
    """

    called: Sequence[str]
    recorded: Sequence[str] | None


class Placement:
    """The trainable parameters of a model, laid out in buckets for `size` ranks."""

    def __init__(
        self, model: nn.Module, scheme: Scheme, size: int, owned: Owned | None = None
    ) -> None:
        self._model, self._scheme, self._size = model, scheme, size
        self._owned = owned  # by ranks that step for others, where that is deferred
        self.places: dict[nn.Parameter, Place] = {}
        self.reads: dict[nn.Module, list[GradientBucket]] = {}
        self.readers: dict[GradientBucket, list[nn.Module]] = {}
        self.recorded: list[str] | None = []  # of a step under way; None: known
        self.ordered = False  # the buckets follow the real order
        self.called: set[nn.Module] = set()  # modules whose hooks were
        self.compiled = False  # something was, and hooks of modules in it are not
        self.learning = False  # in this step it is seen anew whose hooks are called
        self._outdated = False  # something was compiled since that was seen
        self._seen: set[nn.Module] = set()  # called in this step
        self.unread: set[GradientBucket] = set()  # no hook is called before they are
        self._memory: dict[Kind, Tensor] = {}
        named = averaged(model)
        self.shards = Shards(p for _, p in named)
        self._lay_out(named[::-1], scheme)

    @property
    def slots(self) -> Iterator[Slot]:
        """The slots of all buckets, in order."""
        return chain.from_iterable(bucket.slots for bucket in self.buckets)

    def follow(self, order: Sequence[str]) -> None:
        """Lay the buckets out anew, in the order in which gradients got ready."""
        self.recorded, self.ordered = None, True
        place = {name: i for i, name in enumerate(order)}
        ready = sorted(self._named, key=lambda n: place.get(n[0], len(place)))
        self._memory = {}
        self._lay_out(ready, self._scheme)
        self._find_reads()

    def order(self) -> list[str] | None:
        """What was recorded, for `follow`; None if nothing is.

        Gradients of one compiled module get ready at once, in an order that means
        nothing and that hooks change: they come as registered, the last one first.
        """
        if self.recorded is None:
            return None
        of: dict[str, Any] = {**compiled_parts(self._model)}
        groups = grouped(self.recorded, lambda name: of.get(name, name))
        registered = {
            name: -i for i, (name, _) in enumerate(shared_parameters(self._model))
        }
        together = (
            sorted(names, key=registered.__getitem__) for names in groups.values()
        )
        return [*chain.from_iterable(together)]

    def record_all(self) -> None:
        """A step is over in which no order was to be seen: it stays what it is."""
        self.recorded = [slot.name for slot in self.slots]

    def seen(self) -> Seen:
        """What a run has to know of this one's steps, beside their order."""
        named = self._model.named_modules()
        called = [name for name, module in named if module in self.called]
        return Seen(called, self.recorded)

    def fits(self, seen: Seen) -> bool:
        """Whether it is of this model."""
        modules = dict(self._model.named_modules())
        names = {name for name, _ in self._named}
        return modules.keys() >= {*seen.called} and names >= {*(seen.recorded or ())}

    def resume(self, order: Sequence[str] | None, seen: Seen | None) -> None:
        """Go on where another run was; `follow` the order that it has recorded, if any.

        If nothing tells which modules ran, and that matters, the next step does.
        """
        modules = dict(self._model.named_modules())
        if seen is not None:
            self.called = {modules[name] for name in seen.called}
        if order is not None:
            self.follow(order)
            self._record_modules()
        if seen is not None and seen.recorded is not None:
            self.recorded = [*seen.recorded]

    def see(self, module: nn.Module) -> bool:
        """A module's hook is called; returns whether this is all there is to do."""
        if self.recorded is not None:
            self.called.add(module)
        elif self.learning:
            self._seen.add(module)
        return self.recorded is not None or self.learning

    def compile(self) -> None:
        """Something is compiled: hooks of modules in it are called no more."""
        self.compiled = True
        self._outdated = self.recorded is None

    def learn(self) -> None:
        """A step is over: with the next find out, if need be, whose hooks are called.

        This is a rank's own affair: the others may compile at another time.
        """
        if self.learning and self._seen:
            self.called, self._seen, self.learning = self._seen, set(), False
            self._find_reads()
        self.learning, self._outdated = self.learning or self._outdated, False

    def _record_modules(self) -> None:
        if self._scheme.schedule.update == "forward" and not self.called:
            self.recorded = []

    def adopt(self, scheme: Scheme) -> None:
        """Cut the buckets anew, for another scheme; no gradient is moved.

        Residuals stay where they are: a collective that delivers everything delivers
        them with the next gradients. If updates are now deferred, and were not before,
        the next step is recorded again, as the first one was. Raises ValueError, and
        has changed nothing, for a fusion whose cuts do not fit.
        """
        if scheme.schedule.fragments != self._scheme.schedule.fragments:
            self._memory = {}
        self._lay_out(self._named, scheme)
        self._record_modules()
        if self.recorded is None:
            self._find_reads()

    @property
    def has_residual(self) -> bool:
        """Whether anything waits to be sent, on this rank."""
        left = (b.payload.flat for b in self.buckets if not b.residual_empty)
        return any(bool(flat.any()) for flat in left)

    def _lay_out(self, ready: Sequence[Named], scheme: Scheme) -> None:
        pieces = scheme.schedule.fragments
        owned = self._owned if scheme.schedule.update == "forward" else None
        how = scheme.fusion, scheme.exchange, self._size, self._memory, pieces
        buckets = lay_out(ready, *how, owned)
        self.divided = any(bucket.owned for bucket in buckets)
        before = {p: replace(place) for p, place in self.places.items()}
        same = scheme.exchange == self._scheme.exchange
        self._named, self._scheme, self.buckets = ready, scheme, buckets
        for bucket in buckets:
            for slot in bucket.slots:
                place = self.places.setdefault(slot.param, Place(bucket, slot))
                place.bucket, place.slot = bucket, slot
            if before:
                bucket.carry([before[slot.param] for slot in bucket.slots], same)

    def _find_reads(self) -> None:
        """Which buckets a module needs before it runs.

        The parameters of a module whose forward was never called (an attention's output
        projection, say, or part of compiled code) are read by the nearest module above
        it that was; and by the module itself, should it be called after all.
        """
        modules = paths(self._model)
        reads: dict[nn.Module, set[GradientBucket]] = {}
        self.unread = set()
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in self.places]
            buckets = {self.places[p].bucket for p in own}
            reads.setdefault(module, set()).update(buckets)
            while modules[name] not in self.called and name:
                name = name.rpartition(".")[0]
            reads.setdefault(modules[name], set()).update(buckets)
            if self.compiled and modules[name] not in self.called:
                self.unread |= buckets
        last_first = {bucket: -i for i, bucket in enumerate(self.buckets)}
        self.reads = {
            module: sorted(buckets, key=last_first.__getitem__)
            for module, buckets in reads.items()
            if buckets
        }
        self.readers = {bucket: [] for bucket in self.buckets}
        for module, needs in self.reads.items():
            for bucket in needs:
                self.readers[bucket].append(module)


def lay_out(
    ready: Sequence[Named],
    fusion: Fusion,
    collective: Collective,
    size: int,
    memory: dict[Kind, Tensor] | None = None,
    num_fragments: int = 1,
    owned: Owned | None = None,
) -> list[GradientBucket]:
    """Buckets for parameters in the order in which their gradients get ready.

    The buckets come in the order in which they get full, named grad0, grad1, ... They
    are slices of the flat buffers in `memory`, to which what is not there yet is added:
    the same parameters in the same order have the same places in it, however they are
    cut. No bucket has parameters of two fragments. Raises ValueError, and has done
    nothing, for cuts that do not fit, or for more fragments than there are layers.
    """
    of = fragments(ready, num_fragments)
    kinds: dict[Kind, list[Slot]] = {}
    for position, (name, p) in enumerate(ready):
        kind = p.dtype, p.device, spread(p), of[name]
        kinds.setdefault(kind, []).append(Slot(name, p, position))
    memory = {} if memory is None else memory
    how = fusion, collective, size
    cut = (_cut(slots, *how, kind, memory, owned) for kind, slots in kinds.items())
    buckets = [*chain.from_iterable(cut)]
    buckets.sort(key=lambda bucket: bucket.slots[-1].position)
    for i, bucket in enumerate(buckets):
        bucket.name = f"grad{i}"
    return buckets


def _cut(
    slots: list[Slot],
    fusion: Fusion,
    collective: Collective,
    size: int,
    kind: Kind,
    memory: dict[Kind, Tensor],
    owned: Owned | None,
) -> list[GradientBucket]:
    """The buckets of one kind, as slices of one flat buffer."""
    dtype, device, _, fragment = kind
    padded = [-(-slot.local.numel() // size) * size for slot in slots]
    cuts = fusion(Trace([n * dtype.itemsize for n in padded]), lambda _: 0.0)
    covered = [0, *(cut.stop for cut in cuts)]
    in_turn = all(a < b for a, b in pairwise(covered))
    joined = [cut.start for cut in cuts] == covered[:-1]
    if not in_turn or not joined or covered[-1] != len(slots):
        raise ValueError(
            f"{fusion!r} returned {cuts}: a fusion cuts {len(slots)} tensors into "
            "consecutive, non-empty slices that cover all of them"
        )
    if kind not in memory:
        memory[kind] = torch.zeros(sum(padded), dtype=dtype, device=device)
    begins = [*accumulate(padded, initial=0)]
    buckets: list[GradientBucket] = []
    for cut in cuts:
        begin, end = begins[cut.start], begins[cut.stop]
        for slot, offset in zip(slots[cut], begins[cut], strict=True):
            slot.begin = offset - begin
        own = slots[cut], memory[kind][begin:end], collective, fragment
        if owned is not None and any(s.param in owned.owners for s in slots[cut]):
            from gradtide.runtime.layout.owned_bucket import OwnedBucket

            buckets.append(OwnedBucket(*own, owned))
        else:
            buckets.append(GradientBucket(*own))
    return buckets


def fragments(named: Sequence[Named], count: int) -> dict[str, int]:
    """Which of `count` fragments each parameter belongs to, by name.

    A layer is what has one name up to its first number, as "blocks.3" has; or a module,
    where there is no number, or too few layers else. Layers go one after the other to
    the fragment that has least so far: so layers of one size are dealt out in turn.
    Raises ValueError if there are fewer layers than fragments.
    """
    if count == 1:
        return {name: 0 for name, _ in named}
    layers = grouped(named, lambda one: _layer(one[0]))
    if len(layers) < count:
        layers = grouped(named, lambda one: one[0].rpartition(".")[0])
    if len(layers) < count:
        raise ValueError(
            f"fragments={count}: the model has {len(layers)} layers; use as many "
            "fragments at most"
        )
    filled, of = [0] * count, {}
    for members in layers.values():
        least = filled.index(min(filled))
        for name, p in members:
            of[name] = least
            filled[least] += p.numel()
    return of


def _layer(name: str) -> str:
    """The layer of a parameter: its name to the first number, or its module's."""
    parts = name.split(".")
    numbers = (i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: next(numbers, len(parts) - 2) + 1])
