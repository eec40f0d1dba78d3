"""A matrix, its group and orthogonalisation; messages; what ranks have in common.

[Note: bits] torch's Muon orthogonalises in bfloat16, whatever the parameters are. So an
update travels as bfloat16 and nothing is rounded: parameters get the bits that every
rank would have computed for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtide.collectives.owners import Answers
from gradtide.core.engine import Engine
from gradtide.core.fields import refuse
from gradtide.core.torch_internals.muon import orthogonalize
from gradtide.optim.owners import cost
from gradtide.transport.shards import described, is_sharded
from gradtide.wire import Wire

ParamGroup: TypeAlias = dict[str, Any]


class Matrix(NamedTuple):
    """A parameter, its group, and the rank that owns it; -1: none yet."""

    param: Tensor
    group: ParamGroup
    owner: int

    @property
    def cost(self) -> float:
        rows, columns = self.param.shape
        return cost(rows, columns, self.group["ns_steps"])


def orthogonalized(update: Tensor, group: ParamGroup) -> Tensor:
    """As torch's Muon does, in bfloat16."""
    found = orthogonalize(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    assert found.dtype == torch.bfloat16, found.dtype  # see [Note: bits]
    return found


class Message:
    """Something of each of some matrices, from their owners to all ranks: on its way.

    An owner sends what `value_of` has for a matrix, if it has anything.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        engine: Engine,
        value_of: Callable[[Matrix], Tensor | None],
        wire: Wire = None,
    ) -> None:
        self._matrices = matrices
        numels = [matrix.param.numel() for matrix in matrices]
        owners = {i: matrix.owner for i, matrix in enumerate(matrices)}
        device = matrices[0].param.device
        self._answers = Answers(numels, owners, engine.group, dtype, device, wire)
        for i, matrix in enumerate(matrices):
            if matrix.owner == engine.group.rank:
                self._answers.put(i, value_of(matrix))
        self._wait = engine.ask("muon", self._answers.request())

    def arrived(self) -> Iterator[tuple[Matrix, Tensor]]:
        """Wait for it; returns the values of the matrices that have one."""
        self._wait()
        for i, value in self._answers.found():
            matrix = self._matrices[i]
            yield matrix, value.view(matrix.param.shape)


def signature(groups: Sequence[ParamGroup]) -> dict[str, str]:
    """What ranks have to have in common. Raises ValueError for what cannot be."""
    named: dict[str, str] = {}
    device = next(p.device for group in groups for p in group["params"])
    for i, group in enumerate(groups):
        rest = {k: v for k, v in group.items() if k not in ("params", "lr")}
        named[f"group {i}"] = repr({**rest, "lr": float(group["lr"])})
        # What cannot be computed is refused here, and not by owners alone.
        orthogonalized(torch.zeros(1, 1, dtype=torch.float32, device=device), group)
        for j, p in enumerate(group["params"]):
            name = f"parameter {j} of group {i}"
            wrong = {
                f"{name} is sharded, and a matrix is orthogonalised as a whole: shard "
                "nothing, or train it by another optimizer": is_sharded(p),
                f"{name} is complex: train it by another optimizer": p.is_complex(),
                f"{name} is on {p.device} and others on {device}: one optimizer for "
                "each device": p.device != device,
            }
            refuse(wrong)
            named[name] = described(p)
    return named
