"""From the owners of matrices to all ranks: something of each, in one flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.ops import AllGather
from gradtide.optim.matrices import Matrix


class Message:
    """Something of each of some matrices, from their owners to all ranks.

    Behind each value stands one element that says whether it is there: the owner
    decides, and how long a message is depends on nothing that ranks might see
    differently.
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, engine: Engine
    ) -> None:
        self._engine, self._rank = engine, engine.group.rank
        self._matrices = sorted(matrices, key=lambda m: m.owner)
        lengths = [m.param.numel() + 1 for m in self._matrices]
        self._sizes = [0] * engine.group.size
        for matrix, length in zip(self._matrices, lengths, strict=True):
            self._sizes[matrix.owner] += length
        device = matrices[0].param.device
        self._flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
        self._pieces = torch.split(self._flat, lengths)

    def own(self) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """This rank's matrices, where their values go, and whether they are there."""
        for matrix, piece in zip(self._matrices, self._pieces, strict=True):
            if matrix.owner == self._rank:
                yield matrix, piece[:-1].view(matrix.param.shape), piece[-1]

    def leave(self) -> None:
        """Send it on its way."""
        own = torch.split(self._flat, self._sizes)[self._rank]
        gather = AllGather(own, self._sizes, into=self._flat)
        self._wait = self._engine.ask("muon", gather)

    def arrived(self) -> Iterator[tuple[Matrix, Tensor]]:
        """Wait for it; returns the values of the matrices that have one."""
        self._wait()
        there = torch.stack([piece[-1] for piece in self._pieces]).tolist()
        for matrix, piece, is_there in zip(
            self._matrices, self._pieces, there, strict=True
        ):
            if is_there:
                yield matrix, piece[:-1].view(matrix.param.shape)
