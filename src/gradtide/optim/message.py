"""From the owners of matrices to all ranks: something of each, in one flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather
from gradtide.optim.matrices import Matrix


class Message:
    """Something of each of some matrices, from their owners to all ranks: on its way.

    An owner sends what `value_of` has for a matrix, if it has anything.
    Behind each value stands one element that says whether it is there: the owner
    decides, and how long a message is depends on nothing that ranks might see
    differently.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        engine: Engine,
        value_of: Callable[[Matrix], Tensor | None],
    ) -> None:
        self._matrices = sorted(matrices, key=lambda m: m.owner)
        lengths = [m.param.numel() + 1 for m in self._matrices]
        device = matrices[0].param.device
        flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
        self._pieces = torch.split(flat, lengths)
        rank, sizes = engine.group.rank, [0] * engine.group.size
        for matrix, piece in zip(self._matrices, self._pieces, strict=True):
            sizes[matrix.owner] += len(piece)
            value = value_of(matrix) if matrix.owner == rank else None
            if value is not None:
                piece[:-1].view(matrix.param.shape).copy_(value)
                piece[-1] = 1
        gather = AllGather(torch.split(flat, sizes)[rank], sizes, into=flat)
        self._wait = engine.ask("muon", gather)

    def arrived(self) -> Iterator[tuple[Matrix, Tensor]]:
        """Wait for it; returns the values of the matrices that have one."""
        self._wait()
        there = torch.stack([piece[-1] for piece in self._pieces]).tolist()
        for matrix, piece, is_there in zip(
            self._matrices, self._pieces, there, strict=True
        ):
            if is_there:
                yield matrix, piece[:-1].view(matrix.param.shape)
