"""Buffers that ranks have the mean of: running statistics of norms, above all.

[Note: when] Means are asked for as a backward ends that exchanges something, which all
ranks reach alike. Nobody waits for them there. They are put in by whoever next needs
them on a rank: a forward in train() or eval(), state_dict(), flush(). That waits for a
message on its way, and for no call of another rank, so an evaluation on one rank alone
cannot hang.

[Note: what] What travels is what was done to buffers since they were alike, cast to 16
bits. What the cast takes off is added the next time, so it is not lost. With P ranks
each sends (P - 1) / P of half of the bytes of its buffers to distribute them and again
to collect them: no rank more than rank 0 with "broadcast". What is no float, or has no
mean, as masks of -inf and extremes that begin as inf, comes from the first rank that
trains, as with "broadcast". What becomes infinite or NaN on a rank afterwards, by a bad
batch, is as if that had not been: it would be every rank's for good.

[Note: variance] A batch norm's step is  r' = (1 - a) r + a s,  with s a batch's mean m
or its variance v over n samples (divided by n - 1), and a the momentum. SyncBatchNorm
has s of the samples of all ranks, for which

    mean = mean_r(m_r)
    var  = P / (n P - 1) * ((n - 1) mean_r(v_r) + n mean_r((m_r - mean)^2))

which is the variance within ranks, and that of their means. A rank does not know the
mean before the exchange, so it sends (m_r - r)^2, and (mean - r)^2 is taken off what
arrives: that is the same. n P / (n P - 1) travels, too. Of several forwards since the
last exchange a is 1 - (1 - momentum)^j, by which means of ranks that differ for good
count as they should, and those of batches that differ by chance for less. All ranks
count alike, whatever n they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradtide.collectives.dense import first_half, second_half
from gradtide.collectives.levels import by_levels
from gradtide.core.devices import on_device
from gradtide.core.engine import Engine, InFlight
from gradtide.core.grouped import grouped
from gradtide.core.ops import Cut, Flow, Group, Mean
from gradtide.core.payload import Payload, Traits, hands_over
from gradtide.core.torch_internals import foreach_copy_
from gradtide.core.torch_internals.autograd import Hook
from gradtide.runtime.guards.nonfinite import is_finite
from gradtide.runtime.layout.broadcast import begin_broadcast, digest
from gradtide.wire import codec_of

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
NAMES = "running_mean", "running_var", "num_batches_tracked"
Held: TypeAlias = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Shortened:
    """Average everything, in 16 bits, and keep what these round off."""

    traits = Traits(dense=True, rounds_off=True, depends_on="length")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        x = payload.flat
        codec = codec_of("bf16", x.dtype)
        if codec.exact or group.size == 1:
            yield Mean(x)
            return x
        mean = payload.mean_buffer()
        part = yield from first_half(x, mean, codec, payload, group)
        yield Cut(part)
        return (yield from second_half(mean, part, codec, payload, group))


class Norm(NamedTuple):
    """A batch norm whose statistics are averaged: the names of its buffers."""

    mean: str
    var: str
    number: str
    module: nn.Module


class BufferMeans:
    """The means of a module's buffers.

    `held` tells this rank's buffers, by the names that all ranks agreed on, and None of
    one that it has no more, or in another shape. When this is made, it has all of them,
    as all ranks have them.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        held: Callable[[], Held],
    ) -> None:
        self._engine, self._held = engine, held
        kept = {name: b for name, b in held().items() if b is not None}
        norms = [norm for norm in _norms(model) if {*norm[:3]} <= kept.keys()]
        alike = _synchronised(model)
        floats = [n for n, b in kept.items() if b.is_floating_point() and is_finite(b)]
        kinds = grouped(
            (n for n in floats if n not in alike),
            lambda name: (kept[name].dtype, kept[name].device),
        )
        self._flats = [_Flat(kept, names, norms, engine) for names in kinds.values()]
        self._others = {n: kept[n] for n in kept if n not in floats}
        self._copies: dict[str, Tensor] = {}
        self._told: Callable[[], None] | None = None  # of the others
        self._share = 1.0  # of all ranks to those that train
        handles = [flat.watch() for flat in self._flats]
        self._handles = [*chain.from_iterable(handles)]

    def begin_anew(self) -> None:
        """What this rank has now was loaded, and not done; none are on their way."""
        held = self._held()
        for flat in self._flats:
            flat.begin_anew(held)

    def digests(self) -> list[bytes]:
        """Of what all ranks are to have alike."""
        return [digest(flat.base) for flat in self._flats]

    def remove(self) -> None:
        """Look at the module no longer."""
        for handle in self._handles:
            handle.remove()

    def leave(self, source: int, active: int | None, shadowing: bool) -> None:
        """Ask for means over `active` ranks (None: all), when none are on their way.

        Who is `shadowing` has done nothing to its buffers. A collective call.
        """
        held, size = self._held(), self._engine.group.size
        if size == 1:
            return
        self._share = size / (active or size)
        for flat in self._flats:
            flat.leave(held, active or size, shadowing)
        now = {name: held[name] for name in self._others}
        self._copies = {
            name: (torch.zeros_like(first) if own is None else own.clone())
            for (name, first), own in zip(
                self._others.items(), now.values(), strict=True
            )
        }
        copies = [*self._copies.values()]
        self._told = begin_broadcast(self._engine, copies, source)

    def arrive(self) -> None:
        """Put in the means that are on their way, if any are; local."""
        told, self._told = self._told, None
        if told is None:
            return
        held, means = self._held(), [flat.finish() for flat in self._flats]
        told()
        for name, value in self._copies.items():
            own = held[name]
            if own is not None:
                own.data.copy_(value)
        for flat, mean in zip(self._flats, means, strict=True):
            flat.arrive(held, mean if self._share == 1 else mean * self._share)


class _Flat:
    """Float buffers of one dtype on one device: means of norms, variances, others."""

    def __init__(
        self,
        own: Mapping[str, Tensor],
        names: Sequence[str],
        norms: Sequence[Norm],
        engine: Engine,
    ) -> None:
        self._engine = engine
        self._norms = [n for n in norms if n.mean in names and n.var in names]
        paired = [n.mean for n in self._norms] + [n.var for n in self._norms]
        self._names = [*paired, *(name for name in names if name not in paired)]
        self._sizes = [own[name].numel() for name in self._names]
        self.base = self._gather(own)
        size, self._length = engine.group.size, len(self.base) + len(self._norms)
        length = -(-self._length // size) * size
        self._payload = Payload(self.base.new_zeros(length), [])
        self._payload.parts = [self._payload.flat]
        self._left = self.base.clone()
        self._flight: InFlight | None = None
        lengths = [own[n.mean].numel() for n in self._norms]
        self._paired, device = sum(lengths), self.base.device
        whose = [i for i, n in enumerate(lengths) for _ in range(n)]
        self._whose = torch.tensor(whose, dtype=torch.int64, device=device)
        momenta = [getattr(n.module, "momentum", None) for n in self._norms]
        given = [float("nan") if m is None else float(m) for m in momenta]
        self._momenta = torch.tensor(given, dtype=torch.float64, device=device)
        self._samples = [0] * len(self._norms)  # in the last forward; 0: not known
        self._counts = self._counted(own)

    def watch(self) -> list[Any]:
        """Count the samples that norms see."""
        return [
            norm.module.register_forward_pre_hook(Hook(self._counting(i)))
            for i, norm in enumerate(self._norms)
        ]

    def _counting(self, i: int) -> Callable[..., None]:
        def count(module: nn.Module, args: Sequence[Any]) -> None:
            if module.training and args and isinstance(args[0], Tensor):
                x = args[0]
                self._samples[i] = x.numel() // max(x.shape[1], 1)

        return count

    def _gather(self, own: Held, base: Tensor | None = None) -> Tensor:
        """All that this rank has; the `base` of what it has no more, or is NaN."""
        befores = [None] * len(self._names) if base is None else self._pieces(base)
        found = [own[name] for name in self._names]
        pairs = zip(found, befores, strict=True)
        pieces = [before if x is None else x.reshape(-1) for x, before in pairs]
        now = torch.cat([piece for piece in pieces if piece is not None])
        return now if base is None else torch.where(now.isfinite(), now, base)

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, self._sizes)

    def _counted(self, own: Held) -> Tensor:
        """How many batches each norm has seen."""
        counts = [x for n in self._norms if (x := own[n.number]) is not None]
        if len(counts) < len(self._norms) or not counts:
            return torch.zeros_like(self._momenta)
        return torch.stack(counts).to(self._momenta)

    def _rates(self, own: Held) -> Tensor:
        """By how much statistics count that are new: `a` of [Note: variance]."""
        now = self._counted(own)
        new = (now - self._counts).clamp(min=0)  # fewer, if they were reset
        rates = torch.where(
            self._momenta.isnan(),
            new / now.clamp(min=1),
            1 - (1 - self._momenta.nan_to_num()) ** new,
        )
        return rates[self._whose].to(self.base.dtype)

    def begin_anew(self, own: Held) -> None:
        self.base = self._left = self._gather(own, self.base)
        self._counts = self._counted(own)
        self._payload.flat.zero_()

    def leave(self, own: Held, active: int, shadowing: bool) -> None:
        self._left = now = self._gather(own, self.base)
        payload = self._payload
        if not shadowing:
            done = now - self.base
            payload.flat[len(done) : self._length].add_(self._corrections(active))
            if self._norms:
                self._within_ranks(done, self._rates(own), active)
            payload.flat[: len(done)].add_(done.nan_to_num_(0.0, 0.0, 0.0))
        levels = self._engine.levels
        how = by_levels(Shortened(), None if levels is None else levels.table)
        flow, size = how.reduce(payload, self._engine.group), self._engine.group.size
        over = hands_over(how, size)
        self._flight = self._engine.launch("buffers", flow, hands_over=over)

    def _corrections(self, active: int) -> Tensor:
        """What is above 1 in n P / (n P - 1), of each norm."""
        wholes = [count * active for count in self._samples]
        found = [1 / (n - 1) if n > active else 0.0 for n in wholes]
        return on_device(found, self.base.dtype, self.base.device)

    def _within_ranks(self, done: Tensor, rates: Tensor, active: int) -> None:
        """Have what was done to variances be this rank's part of [Note: variance]."""
        n, more = self._paired, self._corrections(active)
        first, second = done[:n], done[n : 2 * n]
        # (n - 1) P / (n P - 1) = 1 - (P - 1) / (n P - 1)
        within = (1 - (active - 1) * more)[self._whose]
        old = rates * self.base[n : 2 * n]
        second.add_(old).mul_(within).sub_(old)
        second.add_((1 + more)[self._whose] * _over(first.square(), rates))

    def finish(self) -> Tensor:
        """Wait for the mean of what was done."""
        assert self._flight is not None
        mean: Tensor = self._engine.finish(self._flight)[: self._length]
        self._flight = None
        self._payload.num_sent, self._payload.nonfinite = 0, 0.0
        exact = mean.data_ptr() == self._payload.flat.data_ptr()
        mean = mean.clone() if exact else mean
        if exact:
            self._payload.flat.zero_()
        self._payload.flat.nan_to_num_(0.0, 0.0, 0.0)
        return mean

    def arrive(self, own: Held, mean: Tensor) -> None:
        """Put it in; what was done meanwhile comes on top."""
        mean, more = torch.split(mean, [len(self.base), len(self._norms)])
        if self._norms:
            n = self._paired
            moved = (1 + more)[self._whose] * _over(mean[:n].square(), self._rates(own))
            mean = torch.cat([mean[:n], mean[n : 2 * n] - moved, mean[2 * n :]])
            self._counts = self._counted(own)
        base, now = self.base + mean, self._gather(own, self.base)
        new = torch.where(now == self._left, base, now + (base - self._left))
        self.base = base
        found = [own[name] for name in self._names]
        news = zip(found, self._pieces(new), strict=True)
        pairs = [(x.data, piece.view(x.shape)) for x, piece in news if x is not None]
        foreach_copy_([x for x, _ in pairs], [piece for _, piece in pairs])


def _over(x: Tensor, rates: Tensor) -> Tensor:
    """Divided; zero where nothing was done."""
    return torch.where(rates > 0, x / rates, 0.0)


def _norms(model: nn.Module) -> list[Norm]:
    """The batch norms of a model whose ranks have statistics of their own."""
    return [
        Norm(*_names(path), module)
        for path, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
    ]


def _names(path: str) -> tuple[str, str, str]:
    mean, var, number = (f"{path}.{name}".lstrip(".") for name in NAMES)
    return mean, var, number


def _synchronised(model: nn.Module) -> set[str]:
    """The buffers that SyncBatchNorm has alike on all ranks."""
    return {
        name
        for path, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        for name in _names(path)[:2]
    }
