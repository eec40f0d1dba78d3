"""A parameter's place in a flat tensor, and in which order its elements lie there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtide.transport.shards import is_sharded, like, local

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(eq=False)
class Slot:
    """A parameter's place in the flat buffer of its bucket."""

    name: str
    param: nn.Parameter
    position: int  # in the order in which gradients get ready
    begin: int = 0  # of its elements
    index: int = 0  # in its bucket
    address: int = 0  # of its memory there
    arrived: bool = False  # its gradient, in this backward
    copied: bool = False  # in already: not left to the bucket's copy_in()
    undefined: bool = False  # what arrived is no gradient: a function returned None
    used: bool = True  # by some rank, in the last exchange
    wanted: bool = False  # its gradient was still there at the deferred step

    def __post_init__(self) -> None:
        self._sharded = is_sharded(self.param)

    @property
    def local(self) -> Tensor:
        """What this rank has of the parameter: all of it, unless it is sharded."""
        return local(self.param)

    @property
    def grad(self) -> Tensor | None:
        """What this rank has of the gradient in `.grad`."""
        grad = self.param.grad
        return local(grad) if self._sharded and grad is not None else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._sharded and value is not None:
            value = like(self.param, value)
        self.param.grad = value

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in the parameter's memory format."""
        return self.shaped(flat[self.begin : self.begin + self.local.numel()])

    def shaped(self, piece: Tensor) -> Tensor:
        """This parameter's part of a flat tensor (1-D), in its memory format."""
        p = self.local
        last = FORMATS.get(p.dim())
        if last is not None and p.is_contiguous(memory_format=last):
            return piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        return piece.view(p.shape)
