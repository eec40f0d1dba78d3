"""Where every gradient goes, and which buckets a module reads.

Knows names, modules and buckets; nothing of flows or other ranks. The first step is
recorded (in `recorded` and `called`, by those who see it), so that afterwards the
buckets follow the order in which gradients really get ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtide.layout import GradientBucket, Kind, Named, Slot, lay_out
from gradtide.scheme import Scheme


class Home:
    """Where a parameter's gradient goes; kept when the buckets are laid out anew."""

    def __init__(self, home: GradientBucket, slot: Slot) -> None:
        self.move(home, slot)

    def move(self, home: GradientBucket, slot: Slot) -> None:
        self.home, self.slot = home, slot


class Placement:
    """The trainable parameters of a model, laid out in buckets."""

    def __init__(self, model: nn.Module, scheme: Scheme, size: int) -> None:
        self._model, self._scheme, self._size = model, scheme, size
        self.homes: dict[nn.Parameter, Home] = {}
        self.reads: dict[nn.Module, list[GradientBucket]] = {}
        self.readers: dict[GradientBucket, list[nn.Module]] = {}
        self.recorded: list[str] | None = []  # of a step under way; None: known
        self.ordered = False  # the buckets follow the real order
        self.called: set[nn.Module] = set()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._memory: dict[Kind, Tensor] = {}
        self._lay_out(named[::-1], scheme)

    def follow(self, order: Sequence[str]) -> None:
        """Lay the buckets out anew, in the order in which gradients got ready."""
        self.recorded, self.ordered = None, True
        place = {name: i for i, name in enumerate(order)}
        ready = sorted(self._named, key=lambda n: place.get(n[0], len(place)))
        self._memory = {}
        self._lay_out(ready, self._scheme)
        self._find_reads()

    def resume(self, order: Sequence[str]) -> None:
        """`follow` an order that another run has recorded.

        Which modules ran, it did not tell: if that matters, the next step is recorded.
        """
        self.follow(order)
        self._record_modules()

    def _record_modules(self) -> None:
        if self._scheme.schedule.update == "forward" and not self.called:
            self.recorded = []

    def adopt(self, scheme: Scheme) -> None:
        """Cut the buckets anew, for another scheme; no gradient is moved.

        What was left behind stays where it is: a collective that delivers everything
        delivers it with the next gradients. If updates are now deferred, and were not
        before, the next step is recorded again, as the first one was. Raises
        ValueError, and has changed nothing, for a fusion whose cuts do not fit.
        """
        self._lay_out(self._named, scheme)
        self._record_modules()
        if self.recorded is None:
            self._find_reads()

    def _lay_out(self, ready: Sequence[Named], scheme: Scheme) -> None:
        buckets = lay_out(
            ready, scheme.fusion, scheme.collective, self._size, self._memory
        )
        before = {p: (home.home, home.slot) for p, home in self.homes.items()}
        same = scheme.collective == self._scheme.collective
        self._named, self._scheme, self.buckets = ready, scheme, buckets
        for home in buckets:
            for slot in home.slots:
                self.homes.setdefault(slot.param, Home(home, slot)).move(home, slot)
            if before:
                _carry(home, [before[slot.param] for slot in home.slots], same)

    def _find_reads(self) -> None:
        """Which buckets a module needs before it runs.

        The parameters of a module whose forward was never called (an attention's output
        projection, say) are read by the nearest module above it that was; and by the
        module itself, should it be called after all.
        """
        modules = dict(self._model.named_modules(remove_duplicate=False))
        reads: dict[nn.Module, set[GradientBucket]] = {}
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in self.homes]
            homes = {self.homes[p].home for p in own}
            reads.setdefault(module, set()).update(homes)
            while modules[name] not in self.called and name:
                name = name.rpartition(".")[0]
            reads.setdefault(modules[name], set()).update(homes)
        last_first = {home: -i for i, home in enumerate(self.buckets)}
        self.reads = {
            module: sorted(homes, key=last_first.__getitem__)
            for module, homes in reads.items()
            if homes
        }
        self.readers = {home: [] for home in self.buckets}
        for module, needs in self.reads.items():
            for home in needs:
                self.readers[home].append(module)


@torch.no_grad()
def _carry(
    home: GradientBucket, before: Sequence[tuple[GradientBucket, Slot]], same: bool
) -> None:
    """Take over, into a new bucket, what was left behind of its parameters.

    `before` says where each slot's parameter was. If the collective is the `same`, what
    it remembers comes along as far as it is not about a bucket as a whole.
    """
    flat = home.bucket.load.flat
    home.clean = all(old.clean for old, _ in before)
    for slot, (old, place) in zip(home.slots, before, strict=True):
        left, view = place.of(old.bucket.load.flat), slot.of(flat)
        moved = left.data_ptr() != view.data_ptr()
        if moved and not old.clean:
            view.copy_(left)
        elif not moved and old.clean and not home.clean:
            # What is there was handed out as the mean, and may be somebody's gradient.
            grad = slot.param.grad
            if grad is not None and grad.data_ptr() == view.data_ptr():
                slot.param.grad = grad.clone()
            view.zero_()
    if same:
        home.bucket.load.state.update(remembered(home, before))


def remembered(
    home: GradientBucket, before: Sequence[tuple[GradientBucket, Slot]]
) -> dict[str, Tensor]:
    """What the algorithm of a new bucket can go on with.

    `before` says where each slot's parameter was. Everything, if the bucket is an old
    one. Otherwise numbers of steps, if those of all the old buckets are equal, and what
    has an entry for every element (a velocity). Thresholds, boundaries and factors are
    about a bucket as a whole, and are learnt anew, as in a first step.
    """
    olds = list(dict.fromkeys(old for old, _ in before))
    states = [old.bucket.load.state for old in olds]
    if [id(slot.param) for slot in home.slots] == [id(s.param) for s in olds[0].slots]:
        return states[0]
    kept: dict[str, Tensor] = {}
    for key in {key: None for state in states for key in state}:
        values = [state.get(key) for state in states]
        if all(_is_count(value) for value in values):
            numbers = {int(value) for value in values if value is not None}
            if len(numbers) == 1:
                kept[key] = torch.tensor(numbers.pop())
        elif all(
            value is None or _is_like(value, old.bucket.load.flat)
            for value, old in zip(values, olds, strict=True)
        ):
            kept[key] = torch.zeros_like(home.bucket.load.flat)
            for slot, (old, place) in zip(home.slots, before, strict=True):
                value = old.bucket.load.state.get(key)
                if value is not None:
                    slot.of(kept[key]).copy_(place.of(value))
    return kept


def _is_count(value: Tensor | None) -> bool:
    return value is not None and value.dtype == torch.int64 and not value.dim()


def _is_like(value: Tensor, flat: Tensor) -> bool:
    return value.shape == flat.shape and value.dtype == flat.dtype


class Watch:
    """A forward pre-hook on every module of a model that can be taken off and put back.

    A module with a hook takes Python's long way into its forward, which in a model of
    many small modules costs as much as a layer: so a hook is on only while its module
    reads something that is due. It runs before the user's own, which may read too.
    """

    def __init__(
        self, model: nn.Module, hook: Callable[[nn.Module, Any], None]
    ) -> None:
        self._hook = hook
        self.handles = {
            module: module.register_forward_pre_hook(hook, prepend=True)
            for module in model.modules()
        }

    def on(self, modules: Iterable[nn.Module]) -> None:
        """Call the hook before these modules run."""
        # Under its old id: to register it anew costs more than to leave it on.
        for module in modules:
            if module in self.handles:  # not if the user added it since
                key = self.handles[module].id
                module._forward_pre_hooks[key] = self._hook
                module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]

    def off(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules run without the hook."""
        for module in modules:
            if module in self.handles:  # not if it is a copy
                module._forward_pre_hooks.pop(self.handles[module].id, None)
