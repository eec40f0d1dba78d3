"""Where every gradient goes, and which buckets a module reads.

Knows names, modules and buckets; nothing of flows or other ranks. The first step is
recorded (in `recorded` and `called`, by those who see it), so that afterwards the
buckets follow the order in which gradients really get ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gradtide.gradients import GradientBucket, Place
from gradtide.layout import Kind, Named, lay_out
from gradtide.scheme import Scheme


class Placement:
    """The trainable parameters of a model, laid out in buckets."""

    def __init__(self, model: nn.Module, scheme: Scheme, size: int) -> None:
        self._model, self._scheme, self._size = model, scheme, size
        self.places: dict[nn.Parameter, Place] = {}
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
        before = {p: replace(place) for p, place in self.places.items()}
        same = scheme.collective == self._scheme.collective
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
        projection, say) are read by the nearest module above it that was; and by the
        module itself, should it be called after all.
        """
        modules = dict(self._model.named_modules(remove_duplicate=False))
        reads: dict[nn.Module, set[GradientBucket]] = {}
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in self.places]
            buckets = {self.places[p].bucket for p in own}
            reads.setdefault(module, set()).update(buckets)
            while modules[name] not in self.called and name:
                name = name.rpartition(".")[0]
            reads.setdefault(modules[name], set()).update(buckets)
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
        self.handles: list[Any] = []
        # Of each module, its hooks and the hook's key in them: hot, so looked up once.
        self._entries: dict[nn.Module, tuple[Any, int]] = {}
        for module in model.modules():
            handle = module.register_forward_pre_hook(hook, prepend=True)
            self.handles.append(handle)
            self._entries[module] = module._forward_pre_hooks, handle.id

    def on(self, modules: Iterable[nn.Module]) -> None:
        """Call the hook before these modules run."""
        # Under its old id: to register it anew costs more than to leave it on.
        for module in modules:
            entry = self._entries.get(module)
            if entry is not None:  # not if the user added it since
                hooks, key = entry
                hooks[key] = self._hook
                if len(hooks) > 1:
                    hooks.move_to_end(key, last=False)

    def off(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules run without the hook."""
        for module in modules:
            entry = self._entries.get(module)
            if entry is not None:  # not if it is a copy
                entry[0].pop(entry[1], None)
