"""What one rank knows of the curvature of one layer, and what it makes of it.

Running factors where this rank inverts them, the traces of both everywhere, and the
inverses where it preconditions. Knows nothing of other ranks, flows or threads.

[Note: traces] The damping of an inverse depends on the traces of both factors, which
may be owned by different ranks. Every rank therefore follows the running traces of all
layers, in float64 and from the same numbers: all agree on every damping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtide.kfac import invert
from gradtide.kfac.config import KFAC
from gradtide.kfac.factors import RunningFactor
from gradtide.kfac.invert import Eigen
from gradtide.kfac.layers import KINDS, Kind, Layer
from gradtide.kfac.packing import pack, traces, unpack


class Curvature:
    """The curvature of `layer`; `kinds` are the factors that this rank inverts."""

    def __init__(self, layer: Layer, config: KFAC, kinds: Sequence[Kind]) -> None:
        self.layer, self.config = layer, config
        self.running = {kind: RunningFactor(layer, kind) for kind in kinds}
        self.traces: dict[Kind, Tensor] = {}  # [Note: traces]; none before any factor
        self.current: invert.Preconditioner | None = None  # None: the identity
        # New inverses: as they are made; together; and then current.
        self._fresh: dict[Kind, Tensor | Eigen] = {}
        self._next: invert.Preconditioner | None = None

    @property
    def known(self) -> bool:
        """Whether there ever was a factor on any rank that took part."""
        return bool(self.traces)

    @property
    def name(self) -> str:
        return self.layer.name or "the model"

    # - Factors ------------------------------------------------------------------------

    def numbers(self) -> int:
        """Length of what ranks tell each other of a layer: see `take`."""
        return 2 * (1 + self.layer.groups)

    def take(self, kind: Kind, factor: Tensor, packed: Tensor, out: Tensor) -> None:
        """Pack a factor [groups, d, d] of this rank to `packed`.

        And write to `out` [numbers()] in float64 that this rank has it: a 1 and the
        traces.
        """
        pack(factor, packed)
        begin = KINDS.index(kind) * (1 + self.layer.groups)
        own = out[begin : begin + 1 + self.layer.groups]
        own[0] = 1
        own[1:] = traces(packed, self.layer.groups, self.layer.dim(kind))

    def average(self, numbers: Tensor, sums: dict[Kind, Tensor], size: int) -> None:
        """Take the sums of `size` ranks' factors into the running averages.

        A is the mean over the ranks that used the layer, G over all: where nobody used
        it, gradients are zero. `sums` (packed) has at least what this rank inverts.
        Nothing changes where nobody has both factors, or where one is not finite.
        """
        counts_a, traces_a, counts_g, traces_g = torch.split(
            numbers.cpu(), [1, self.layer.groups] * 2
        )
        if not (counts_a > 0 and counts_g > 0 and numbers.isfinite().all()):
            return
        counts = {"A": float(counts_a), "G": float(size)}
        for kind, new in zip(KINDS, (traces_a, traces_g), strict=True):
            mean = new / counts[kind]
            if kind in self.traces:
                mean = self.traces[kind].lerp(mean, 1 - self.config.decay)
            self.traces[kind] = mean
            if kind in self.running:
                new_mean = sums[kind].div_(counts[kind])
                self.running[kind].update(new_mean, self.config.decay)

    # - Inverses -----------------------------------------------------------------------

    def invert(self) -> None:
        """Make new inverses of what this rank inverts, to be used from `adopt` on."""
        if not self.known:
            return
        for kind, running in self.running.items():
            name = f"{kind} of {self.name}"
            if self.config.form == "eigen":
                self._fresh[kind] = invert.eigen(running.full(), name)
            else:
                damping = self._dampings()[kind].to(self.layer.weight.device)
                self._fresh[kind] = invert.inverse(running.full(), damping, name)

    def _dampings(self) -> dict[Kind, Tensor]:
        layer = self.layer
        both = invert.dampings(
            self.traces["A"],
            self.traces["G"],
            layer.a_dim,
            layer.g_dim,
            self.config.damping,
        )
        return {kind: d.float() for kind, d in zip(KINDS, both, strict=True)}

    def numel(self, kind: Kind) -> int:
        """Elements of an inverse as it travels."""
        return invert.numel(self.layer, kind, self.config.form)

    def encode(self, kind: Kind, out: Tensor) -> None:
        """Write a new inverse to `out` [numel(kind)]; nothing before there is any."""
        match self._fresh.get(kind):
            case Eigen(values=values, vectors=vectors):
                out[: values.numel()] = values.flatten()
                out[values.numel() :] = vectors.flatten()
            case Tensor() as full:
                pack(full, out)

    def decode(self, kind: Kind, flat: Tensor) -> None:
        """Take a new inverse as it travelled."""
        if not self.known:
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
        a, g = self._fresh.get("A"), self._fresh.get("G")
        if isinstance(a, Eigen) and isinstance(g, Eigen):
            self._next = invert.Eigens(a, g, self.config.damping)
        elif isinstance(a, Tensor) and isinstance(g, Tensor):
            self._next = invert.Inverses(a, g)
        self._fresh = {}

    def adopt(self) -> None:
        """Precondition with the new inverses from now on, if there are any."""
        if self._next is not None:
            self.current, self._next = self._next, None

    @torch.no_grad()
    def precondition(self, gradient: Tensor) -> Tensor:
        """Of a gradient [groups, g_dim, a_dim]; itself before any factor."""
        return gradient if self.current is None else self.current(gradient)
