"""Where gradients live: one flat buffer per dtype and device, cut into buckets.

[Note: slots] Every parameter's slot is padded to a multiple of the number of ranks, so
any run of slots divides into equal parts: buckets can be cut anew without moving a
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtide.bucket import Bucket, Collective, Payload
from gradtide.fusion import Fusion, Trace

Named: TypeAlias = tuple[str, nn.Parameter]
Kind: TypeAlias = tuple[torch.dtype, torch.device]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
LARGE = 1 << 16  # elements: from here on a copy takes longer than a call from Python


@dataclass(eq=False)
class Slot:
    """A parameter's place in the flat buffer of its bucket."""

    name: str
    param: nn.Parameter
    position: int  # in the order in which gradients get ready
    begin: int
    arrived: bool = False  # its gradient, in this backward
    taken: bool = False  # in already: not left to the bucket's take_in()
    used: bool = True  # by some rank, in the last exchange
    wanted: bool = False  # its gradient was still there at the deferred step

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in the parameter's memory format."""
        p = self.param
        piece = flat[self.begin : self.begin + p.numel()]
        last = FORMATS.get(p.dim())
        if last is not None and p.is_contiguous(memory_format=last):
            return piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        return piece.view(p.shape)


@dataclass(eq=False)
class GradientBucket:
    """A bucket of gradients and where it stands in the current step."""

    bucket: Bucket
    slots: list[Slot]
    clean: bool = True  # nothing was left behind: the next gradients overwrite
    late: bool = False  # something had been, when the exchange under way began
    missing: int = 0  # slots whose gradient has not arrived in this backward
    mean: Tensor | None = field(default=None, repr=False)  # as last delivered

    @property
    def views(self) -> Sequence[Tensor]:
        return self.bucket.load.parts

    def rearm(self) -> None:
        """Expect every gradient anew."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.arrived = slot.taken = False

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Add a gradient that has just arrived to the flat buffer, and drop `.grad`.

        It is in the processor's cache still, and the next one gets the same memory: to
        wait for the bucket to be full costs another pass over memory, and fresh pages.
        """
        grad, view = slot.param.grad, slot.of(self.bucket.load.flat)
        if grad is None:
            return
        slot.param.grad = None
        if grad.data_ptr() != view.data_ptr():
            fresh = self.clean and not slot.taken
            (view.copy_ if fresh else view.add_)(_dense(slot, grad))
        slot.taken = True

    def take_in(self) -> None:
        """`take` all that has arrived, many small ones at once."""
        self.late = not self.clean
        views, grads = [], []
        for slot, view in zip(self.slots, self.views, strict=True):
            if slot.taken:
                continue
            grad = slot.param.grad
            if slot.arrived and grad is not None:
                slot.param.grad = None
                # A gradient that was accumulated in the buffer itself is there already.
                if grad.data_ptr() != view.data_ptr():
                    views.append(view)
                    grads.append(_dense(slot, grad))
            elif self.clean:
                view.zero_()
        if views:
            (torch._foreach_copy_ if self.clean else torch._foreach_add_)(views, grads)

    def keep(self, mean: Tensor) -> None:
        """Take delivery of a mean."""
        self.mean = mean
        self.clean = mean.data_ptr() == self.bucket.load.flat.data_ptr()

    def gradients(self) -> Sequence[Tensor]:
        """The delivered mean in the shapes of the slots."""
        assert self.mean is not None
        return self.views if self.clean else [slot.of(self.mean) for slot in self.slots]

    def delivered(self) -> list[tuple[Slot, Tensor]]:
        """The slots with a gradient: those that some rank used now, or earlier.

        What was left behind of a parameter may arrive when nobody uses it any more.
        """
        return [
            (slot, gradient)
            for slot, gradient in zip(self.slots, self.gradients(), strict=True)
            if slot.used or (self.late and bool(gradient.any()))
        ]

    def expose(self) -> None:
        """Make the delivered mean the `.grad` of its parameters."""
        for slot, gradient in self.delivered():
            slot.param.grad = gradient


def lay_out(
    ready: Sequence[Named],
    fusion: Fusion,
    collective: Collective,
    size: int,
    memory: dict[Kind, Tensor] | None = None,
) -> list[GradientBucket]:
    """Buckets for parameters in the order in which their gradients get ready.

    The buckets come in the order in which they get full, named grad0, grad1, ...
    They are slices of the flat buffers in `memory`, where what is not there yet is
    added: the same parameters in the same order have the same places in it, however
    they are cut. Raises ValueError, and has done nothing, for cuts that do not fit.
    """
    kinds: dict[Kind, list[tuple[int, Named]]] = {}
    for position, (name, p) in enumerate(ready):
        kinds.setdefault((p.dtype, p.device), []).append((position, (name, p)))
    memory = {} if memory is None else memory
    buckets = [
        bucket
        for kind, members in kinds.items()
        for bucket in _cut(members, fusion, collective, size, kind, memory)
    ]
    buckets.sort(key=lambda bucket: bucket.slots[-1].position)
    for i, bucket in enumerate(buckets):
        bucket.bucket.name = f"grad{i}"
    return buckets


def _cut(
    members: list[tuple[int, Named]],
    fusion: Fusion,
    collective: Collective,
    size: int,
    kind: Kind,
    memory: dict[Kind, Tensor],
) -> list[GradientBucket]:
    """The buckets of one dtype and device, as slices of one flat buffer."""
    dtype, device = kind
    padded = [-(-p.numel() // size) * size for _, (_, p) in members]
    cuts = fusion(Trace([n * dtype.itemsize for n in padded]), lambda _: 0.0)
    _check_cuts(cuts, len(members), fusion)
    if kind not in memory:
        memory[kind] = torch.zeros(sum(padded), dtype=dtype, device=device)
    flat = memory[kind]
    buckets, begin = [], 0
    for cut in cuts:
        offsets = [0]
        for n in padded[cut]:
            offsets.append(offsets[-1] + n)
        slots = [
            Slot(name, p, position, offset)
            for (position, (name, p)), offset in zip(
                members[cut], offsets, strict=False
            )
        ]
        buckets.append(_bucket(slots, flat[begin : begin + offsets[-1]], collective))
        begin += offsets[-1]
    return buckets


def _bucket(slots: list[Slot], flat: Tensor, collective: Collective) -> GradientBucket:
    load = Payload(flat, [slot.of(flat) for slot in slots])
    bucket = Bucket("", load, collective, lambda mean: gradients.keep(mean))
    gradients = GradientBucket(bucket, slots)
    gradients.rearm()
    return gradients


def _check_cuts(cuts: Sequence[slice], length: int, fusion: Fusion) -> None:
    covered = [0, *(cut.stop for cut in cuts)]
    in_turn = all(a < b for a, b in pairwise(covered))
    joined = [cut.start for cut in cuts] == covered[:-1]
    if not in_turn or not joined or covered[-1] != length:
        raise ValueError(
            f"{fusion!r} returned {cuts}: a fusion cuts {length} tensors into "
            "consecutive, non-empty slices that cover all of them"
        )


def _dense(slot: Slot, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {slot.name} is {grad.layout}: gradtide averages dense "
            "gradients; build the embedding with sparse=False"
        )
    return grad
