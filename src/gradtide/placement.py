"""Where every gradient goes, and which buckets a module reads.

Knows names, modules and buckets; nothing of hooks, flows or other ranks. The first step
is recorded (in `recorded` and `called`, by those who see it), so that afterwards the
buckets follow the order in which gradients really get ready.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        projection, say) are read by the nearest module above it that was.
        """
        modules = dict(self._model.named_modules(remove_duplicate=False))
        reads: dict[nn.Module, set[GradientBucket]] = {}
        for name, module in modules.items():
            own = [p for p in module.parameters(recurse=False) if p in self.homes]
            while modules[name] not in self.called and name:
                name = name.rpartition(".")[0]
            homes = {self.homes[p].home for p in own}
            reads.setdefault(modules[name], set()).update(homes)
        last_first = {home: -i for i, home in enumerate(self.buckets)}
        self.reads = {
            module: sorted(homes, key=last_first.__getitem__)
            for module, homes in reads.items()
            if homes
        }
