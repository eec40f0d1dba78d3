"""What K-FAC's parts are on the virtual clock: they take time and compute nothing.

[Note: Slowest rank] The clock is that of one rank. Where ranks have different amounts
to invert, all wait for the slowest when inverses are gathered, so the worker here has a
queue for every rank. Under "dp" ranks also have different factors to compute: the rank
that has most of all is the one that is run (`curvature.busiest`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from gradtide.kfac import distributions
from gradtide.kfac.assign import EVERYWHERE
from gradtide.kfac.config import KFAC
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.flows import Share
from gradtide.kfac.layers import KINDS, Kind, Layer, sequence
from gradtide.kfac.parts import Worker
from gradtide.kfac.statistics import Ready, Statistics
from gradtide.planner.clock.intervals import Interval
from gradtide.planner.clock.transport import VirtualTransport

META = torch.device("meta")


class Told:
    """In place of `Statistics`: told of moments, it takes the seconds of factors."""

    def __init__(
        self, layers: Sequence[Layer], ready: Ready, clock: VirtualTransport
    ) -> None:
        self.armed, self.seconds = False, 0.0
        self.slowed = 0.0  # of these, what the queue slowed them by
        self._layers, self._ready, self._clock = layers, ready, clock
        self._first = True  # as there, all is handed out at the end of the first step
        self._at: dict[tuple[Layer, Kind], float] = {}
        self._factor = torch.empty(0, device=META)

    def arm(self) -> None:
        self.armed, self._at = True, {}

    def disarm(self) -> None:
        self.armed = False

    def compute(self, layer: Layer, kind: Kind, seconds: float) -> None:
        if not self.armed or layer not in self._layers:
            return
        start = self._clock.clock()
        self._clock.work(seconds)
        self._at[layer, kind] = self._clock.clock()
        self.seconds += self._at[layer, kind] - start
        self.slowed += self._at[layer, kind] - start - seconds
        if not self._first:
            self._ready(layer, kind, self._factor)

    def times(self) -> dict[tuple[Layer, Kind], float]:
        start = min(self._at.values(), default=0.0)
        return {key: at - start for key, at in self._at.items()}

    def finish(self) -> list[tuple[Layer, Kind]]:
        if self._first:
            for layer, kind in sequence(self._layers):
                self._ready(layer, kind, self._factor)
        self._first = False
        self.disarm()
        return []


class Queues:
    """In place of the `Worker`: inversions of all ranks, see [Note: Slowest rank].

    `owners` are those of a layer's A and G.
    """

    def __init__(
        self, clock: VirtualTransport, seconds: Callable[[int], float]
    ) -> None:
        self.seconds = 0.0  # of the rank that has inverted longest since `clear`
        self.busy: list[Interval] = []  # of any rank
        self._loads = [0.0] * clock.group.size  # seconds of inversions, by rank
        self.owners: Callable[[Layer], tuple[int, int]] = lambda _: (EVERYWHERE,) * 2
        self._seconds, self._clock = seconds, clock
        self._free = [0.0] * clock.group.size
        self._done: dict[Layer, float] = {}
        device = clock.network.device
        self._beside, self._copy = device.beside, device.take_in
        self._round = (0.0, 0.0)  # inversions on the queue: from when, until when

    def submit(self, layer: Layer, job: Callable[[], None]) -> None:
        now = self._clock.clock()
        if not self._beside and now == self._round[1]:
            now = self._round[0]  # submitted together: other ranks have other layers
        ends = now
        for kind, owner in zip(KINDS, self.owners(layer), strict=True):
            d = layer.dim(kind)
            seconds = layer.groups * (self._seconds(d) + self._copy(d * d))
            everywhere = owner == EVERYWHERE
            for rank in range(len(self._free)) if everywhere else (owner,):
                begin = max(self._free[rank], now)
                self._free[rank] = end = begin + seconds
                self._loads[rank] += seconds
                ends, own = max(ends, end), rank == self._clock.group.rank
                if own or not everywhere:
                    self.busy.append((begin, end))
                if own and self._beside:
                    self._clock.beside.append(self.busy[-1])
                    self._clock.charge(seconds)
        self._done[layer], self.seconds = ends, max(self._loads)
        if not self._beside:
            moment = self._clock.clock()
            until = max(ends, moment)
            self._clock.work(until - moment)
            self._round = (now, until)

    def clear(self) -> list[Interval]:
        """Forget when and how long inversions ran, and tell once more when."""
        busy, self.busy = self.busy, []
        self.seconds, self._loads = 0.0, [0.0] * len(self._loads)
        return busy

    def wait(self, layer: Layer) -> None:
        """On the queue."""
        if layer in self._done:
            self._clock.wait_until(self._done[layer])


class Charged:
    """In place of a layer's `Curvature`: what it does takes time, and that is all.

    `kinds` are those that this rank inverts, `running` those that are inverted at all.
    """

    def __init__(
        self,
        real: Curvature,
        kinds: Sequence[Kind],
        running: Sequence[Kind],
        clock: VirtualTransport,
    ) -> None:
        self.running, self.numel = running, real.numel
        self._layer, self._kinds, self._clock = real.layer, kinds, clock

    def _nothing(self, *_: object) -> None:
        """What takes no time, or is part of what a factor or an inversion takes."""

    take = invert = complete = adopt = _nothing

    def average(self, numbers: Tensor, sums: dict[Kind, Tensor], size: int) -> None:
        for kind in self._kinds:
            self._copy(2 * self._layer.numel(kind))

    def encode(self, kind: Kind, out: Tensor) -> None:
        self._copy(out.numel())

    def decode(self, kind: Kind, flat: Tensor) -> None:
        self._copy(math.prod(self._layer.shape(kind)))

    def precondition(self, gradient: Tensor) -> Tensor:
        groups, g, a = gradient.shape
        device = self._clock.network.device
        self._clock.work(device.product(groups * g * a * (g + a), 2))
        self._copy(4 * gradient.numel())  # to a matrix, for the clip, and back
        return gradient

    def _copy(self, numel: int) -> None:
        self._clock.work(self._clock.network.device.take_in(numel))


class Parts:
    """The parts of a `Preconditioner` on a virtual transport."""

    assignment = staticmethod(distributions.assignment)
    share: Callable[..., Share] = Share

    def __init__(self, clock: VirtualTransport, config: KFAC) -> None:
        inverse = clock.network.device.inverse
        if inverse is None:
            raise ValueError(
                "K-FAC inverts matrices, and the network profile does not know how "
                "long that takes: make one with `gradtide profile network`"
            )
        self._clock, self._config, self.inverse = clock, config, inverse
        self.queues = Queues(clock, inverse)
        self.worker = cast(Worker, self.queues)

    def inverses(self, dims: Sequence[int]) -> dict[int, float]:
        return {d: self.inverse(d) for d in dims}

    def statistics(self, layers: Sequence[Layer], ready: Ready) -> Statistics:
        return cast(Statistics, Told(layers, ready, self._clock))

    def curvature(self, layer: Layer, kinds: Sequence[Kind]) -> Curvature:
        # Jobs are submitted for what any rank inverts; under "dp" others do not share.
        running = kinds if self._config.distribution == "dp" else KINDS
        real = Curvature(layer, self._config, ())
        return cast(Curvature, Charged(real, kinds, running, self._clock))

    def told(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        return numbers
