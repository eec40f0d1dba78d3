"""Where every gradient goes, and which buckets a module reads.

Knows names, modules and buckets; nothing of flows or other ranks. The first step is
recorded (in `recorded` and `called`, by those who see it), so that afterwards the
buckets follow the order in which gradients really get ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from gradtide.layout import GradientBucket, Named, Slot, lay_out
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
        self.recorded: list[str] | None = []  # None: the buckets follow the real order
        self.called: set[nn.Module] = set()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._lay_out(named[::-1])

    def follow(self, order: Sequence[str]) -> None:
        """Lay the buckets out anew, in the order in which gradients got ready."""
        self.recorded = None
        place = {name: i for i, name in enumerate(order)}
        before = {p: (home.home, home.slot) for p, home in self.homes.items()}
        self._lay_out(sorted(self._named, key=lambda n: place.get(n[0], len(place))))
        for p, (old, slot) in before.items():
            if not old.clean:
                new = self.homes[p]
                left = slot.of(old.bucket.load.flat)
                new.slot.of(new.home.bucket.load.flat).copy_(left)
                new.home.clean = False
        self._find_reads()

    def _lay_out(self, ready: Sequence[Named]) -> None:
        self._named, scheme = ready, self._scheme
        self.buckets = lay_out(ready, scheme.fusion, scheme.collective, self._size)
        for home in self.buckets:
            for slot in home.slots:
                self.homes.setdefault(slot.param, Home(home, slot)).move(home, slot)

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
