"""What ranks have in common at the beginning, also of tensors that are not plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide


class Packed(torch.Tensor):
    """Codes and a scale; torch's functions do not take it, but for two."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device="cpu"
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: None, size: Any, stride: Any) -> Packed:
        return Packed(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} has no place here")

    def whole(self) -> Tensor:
        return self.codes.float() * self.scale


class Model(nn.Module):
    """A packed base that is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-9, 9, (4, 6), dtype=torch.int8) + dist.get_rank()
        self.base = nn.Parameter(Packed(codes, torch.rand(1)), requires_grad=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x @ self.base.whole().T)  # type: ignore[operator]
        return found


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_a_frozen_base_of_another_class_is_compared_by_what_it_holds(
    scheme: str,
) -> None:
    def run() -> tuple[Any, ...]:
        model = Model()
        optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
        sync = gradtide.replicate(model, optimizer, scheme, check_every=1)
        for _ in range(3):
            model(torch.ones(3, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.remove()
        base: Any = model.base
        return base.codes.tolist(), base.scale.tolist(), model.head.weight.tolist()

    one, other = run_ranks(2, run)
    assert one == other
