"""What one rank knows of the curvature of one layer, and what it makes of it.

Running factors where this rank inverts them, the traces of both everywhere, and the
inverses where it preconditions. Knows nothing of other ranks, flows or threads.

[Note: traces] The damping of an inverse depends on the traces of both factors, which
may be owned by different ranks. Every rank therefore follows the running traces of all
layers, in float64 and from the same numbers: all agree on every damping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.core.devices import sent
from gradtide.kfac import invert
from gradtide.kfac.config import KFAC
from gradtide.kfac.invert import Eigen, Inverses
from gradtide.kfac.layers import KINDS, Kind, Layer
from gradtide.kfac.packing import pack, traces, unpack


class Curvature:
    """The curvature of `layer`; `kinds` are the factors that this rank inverts.

    `running` are their averages, packed: half the memory, half the pass over it, and
    half the checkpoint. The first factor is the average: nothing is biased to zero or
    to the identity.
    """

    def __init__(self, layer: Layer, config: KFAC, kinds: Sequence[Kind]) -> None:
        self.layer, self.config = layer, config
        self.running: dict[Kind, Tensor | None] = dict.fromkeys(kinds)
        self.traces: dict[Kind, Tensor] = {}  # [Note: traces]; none before any factor
        # Inverses as they are made; all new ones; and those in use, none: the identity.
        self._fresh: Inverses = {}
        self._next: Inverses = {}
        self.current: Inverses = {}

    # - Factors ------------------------------------------------------------------------

    def take(self, kind: Kind, factor: Tensor, packed: Tensor, out: Tensor) -> None:
        """Pack a factor [groups, d, d] of this rank to `packed`, and write to `out`
        [layer.numbers], in float64, that this rank has it: a 1 and the traces.
        """
        pack(factor, packed)
        own = out.view(len(KINDS), -1)[KINDS.index(kind)]
        own[0] = 1
        own[1:] = traces(packed, *self.layer.shape(kind)[:2])

    def average(self, numbers: Tensor, sums: Mapping[Kind, Tensor], size: int) -> None:
        """Take the sums of `size` ranks' factors into the running averages.

        A is the mean over the ranks that used the layer, G over all: where nobody used
        it, gradients are zero. `sums` (packed) has at least what this rank inverts.
        Nothing changes where nobody has both factors, or where one is not finite (a
        GradScaler that tries a scale): the square of what is not finite is on the
        diagonal, so that the trace tells. `numbers` are on the host.
        """
        told = numbers.view(len(KINDS), -1)
        if not ((told[:, 0] > 0).all() and told.isfinite().all()):
            return
        rest, counts = 1 - self.config.decay, (float(told[0, 0]), float(size))
        for kind, count, new in zip(KINDS, counts, told[:, 1:], strict=True):
            mean = new / count
            if kind in self.traces:
                mean = self.traces[kind].lerp(mean, rest)
            self.traces[kind] = mean
            if kind in self.running:
                self._enter(kind, sums[kind].div_(count), rest)

    def _enter(self, kind: Kind, factor: Tensor, rest: float) -> None:
        """Take a factor into its average, if it is finite: ranks' were, not the sum."""
        old = self.running[kind]
        finite = traces(factor, *self.layer.shape(kind)[:2]).isfinite().all()
        if old is not None and not factor.is_cpu:  # and nothing waits for the device
            old.lerp_(torch.where(finite, factor, old), rest)
        elif finite:
            average = factor.clone() if old is None else old.lerp_(factor, rest)
            self.running[kind] = average

    # - Inverses -----------------------------------------------------------------------

    def invert(self) -> None:
        """Make new inverses of what this rank inverts, to be used from `adopt` on."""
        if not self.traces:
            return
        layer = self.layer
        mean_a, mean_g = (self.traces[kind] / layer.dim(kind) for kind in KINDS)
        dampings = invert.dampings(mean_a, mean_g, self.config.damping)
        for kind, damping in zip(KINDS, dampings, strict=True):
            if kind in self.running:
                average = self.running[kind]
                assert average is not None
                name = f"{kind} of {layer.name or 'the model'}"
                full = unpack(average, average.new_empty(layer.shape(kind)))
                if self.config.form == "eigen":
                    self._fresh[kind] = invert.eigen(full, name)
                else:
                    added = sent(damping.float(), full.device)
                    self._fresh[kind] = invert.inverse(full, added, name)

    def numel(self, kind: Kind) -> int:
        """Elements of an inverse as it travels."""
        return invert.numel(self.layer, kind, self.config.form)

    def encode(self, kind: Kind, out: Tensor) -> None:
        """Write a new inverse to `out` [numel(kind)]; nothing before there is any."""
        made = self._fresh.get(kind)
        if isinstance(made, Eigen):
            torch.cat([made.values.flatten(), made.vectors.flatten()], out=out)
        elif made is not None:
            pack(made, out)

    def decode(self, kind: Kind, flat: Tensor) -> None:
        """Take a new inverse as it travelled."""
        if not self.traces:
            return
        groups, d, _ = shape = self.layer.shape(kind)
        if self.config.form == "eigen":
            values = flat[: groups * d].reshape(groups, d).clone()
            vectors = flat[groups * d :].reshape(shape).clone()
            self._fresh[kind] = Eigen(values, vectors)
        else:
            self._fresh[kind] = unpack(flat, flat.new_empty(shape))

    def complete(self) -> None:
        """All new inverses are there that will be: the next ones may be made."""
        if len(self._fresh) == len(KINDS):
            self._next = {kind: self._fresh[kind] for kind in KINDS}
        self._fresh = {}

    def adopt(self) -> None:
        """Precondition with the new inverses from now on, if there are any."""
        if self._next:
            self.current, self._next = self._next, {}

    @torch.no_grad()
    def precondition(self, gradient: Tensor) -> Tensor:
        """Of a gradient [groups, rows of G, of A]; itself before any factor."""
        if not self.current:
            return gradient
        return invert.precondition(gradient, self.current, self.config.damping)

    # - State --------------------------------------------------------------------------

    def save(self, due: bool) -> dict[str, Any]:
        """What this rank has; inverses unless the next step makes new ones (`due`)."""
        made = {} if due else self.current
        return {
            "traces": dict(self.traces),
            "running": {k: x for k, x in self.running.items() if x is not None},
            "inverses": {
                k: tuple(x) if isinstance(x, Eigen) else x for k, x in made.items()
            },
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take of what a rank has saved that which this one needs."""
        device = self.layer.weight.device
        self.traces.update(saved["traces"])
        for kind, value in saved["running"].items():
            if kind in self.running:
                self.running[kind] = value.to(device)
        for kind, made in saved["inverses"].items():
            if isinstance(made, tuple) and self.config.form == "eigen":
                self.current[kind] = Eigen(*(x.to(device) for x in made))
            elif isinstance(made, Tensor) and self.config.form == "inverse":
                self.current[kind] = made.to(device)
