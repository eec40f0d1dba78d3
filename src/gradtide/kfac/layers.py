"""Which layers of a model K-FAC preconditions, and how their tensors are matrices.

[Note: groups] Every matrix here has a leading dimension of groups: the output channels
of a grouped convolution see only the inputs of their group, so its curvature is one
pair of factors per group. All other layers have one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from gradtide.kfac.packing import packed_numel
from gradtide.kfac.patches import patches

Kind: TypeAlias = Literal["A", "G"]  # covariance of inputs, of output gradients
KINDS: tuple[Kind, Kind] = ("A", "G")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
KINDS_OF_MODULE = (nn.Linear, *CONVOLUTIONS)
Users: TypeAlias = list[tuple[str, nn.Module]]


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight with its bias, and the modules that apply it.

    Modules that share both weight and bias are one layer. A bias that is frozen while
    the weight is trained is left out, as if there were none.
    """

    name: str  # of the first module
    modules: tuple[nn.Module, ...]
    weight: nn.Parameter
    bias: nn.Parameter | None
    groups: int  # [Note: groups]

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def fan_in(self) -> int:
        """Inputs of one output, without the bias."""
        return prod(self.weight.shape[1:])

    @property
    def a_dim(self) -> int:
        """Rows of a group's A: its inputs, and the constant 1 that the bias sees."""
        return self.fan_in + (self.bias is not None)

    @property
    def g_dim(self) -> int:
        """Rows of a group's G: its outputs."""
        return self.weight.shape[0] // self.groups

    def dim(self, kind: Kind) -> int:
        return self.a_dim if kind == "A" else self.g_dim

    def shape(self, kind: Kind) -> tuple[int, int, int]:
        """Of a factor: (groups, d, d)."""
        return (self.groups, self.dim(kind), self.dim(kind))

    def numel(self, kind: Kind) -> int:
        """Elements of a packed factor (`packing`): what travels of it."""
        return packed_numel(self.groups, self.dim(kind))

    @property
    def gradient_numel(self) -> int:
        """Elements of its gradient as a matrix."""
        return self.groups * self.g_dim * self.a_dim

    @property
    def factor_numel(self) -> int:
        """Elements of both packed factors."""
        return self.numel("A") + self.numel("G")

    # - Tensors as matrices ------------------------------------------------------------

    def inputs(self, module: nn.Module, x: Tensor) -> Iterator[Tensor]:
        """What each output position saw, as rows [groups, positions, fan_in].

        In pieces, as a convolution's rows are several times as large as its input.
        """
        if isinstance(module, CONVOLUTIONS):
            yield from patches(module, x)
        else:
            yield x.reshape(1, -1, self.fan_in)

    def outputs(self, g: Tensor) -> Tensor:
        """Gradients of the outputs as rows [groups, positions, g_dim]."""
        channels, spatial = self.weight.shape[0], self.weight.dim() - 2
        if spatial == 0:
            return g.reshape(1, -1, channels)
        batched = g if g.dim() == spatial + 2 else g.unsqueeze(0)
        last = batched.movedim(1, -1)
        if self.groups == 1 and last.is_contiguous():
            return last.view(1, -1, channels)
        columns = batched.transpose(0, 1).reshape(self.groups, self.g_dim, -1)
        return columns.transpose(1, 2)

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors like the weight and the bias as a new fp32 [groups, g_dim, a_dim]."""
        out = weight.new_empty(self.groups, self.g_dim, self.a_dim, dtype=torch.float32)
        out[..., : self.fan_in] = weight.reshape(self.groups, self.g_dim, self.fan_in)
        if self.bias is not None:
            assert bias is not None
            out[..., -1] = bias.view(self.groups, self.g_dim)
        return out

    def tensors(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """`matrix` undone: in the shapes of the weight and the bias, without a copy."""
        weight = matrix[..., : self.fan_in].reshape(self.weight.shape)
        bias = matrix[..., -1].reshape(-1) if self.bias is not None else None
        return weight, bias


def supported(model: nn.Module, max_dim: int | None = None) -> list[Layer]:
    """The layers that K-FAC preconditions, in the order of `model.named_modules()`.

    Linear and convolutions with a trainable weight that is used by nobody else, and
    whose factors have at most `max_dim` rows. What becomes of the other parameters, and
    why, is in `left_out`.
    """
    return _examine(model, max_dim)[0]


def left_out(model: nn.Module, max_dim: int | None = None) -> dict[str, str]:
    """Why a trainable parameter, by name, is left to the optimizer alone."""
    layers, reasons = _examine(model, max_dim)
    taken = {p for layer in layers for p in layer.params}
    return {
        name: reasons.get(p, f"{type(_owner(model, name)).__name__} is not supported")
        for name, p in model.named_parameters()
        if p.requires_grad and p not in taken
    }


def _examine(
    model: nn.Module, max_dim: int | None
) -> tuple[list[Layer], dict[nn.Parameter, str]]:
    """The layers, and reasons against weights and biases that may seem supported."""
    reasons, holders = _bypassed(model), _holders(model)
    layers = []
    for weight, users in holders.items():
        if not any(_is_kind(m) and m._parameters["weight"] is weight for _, m in users):
            continue
        bias = users[0][1]._parameters.get("bias")
        why = reasons.get(weight) or _against(weight, users)
        if why is None and bias is not None and holders[bias] != users:
            why = "its bias is shared with " + _names(holders[bias])
        if why is None:
            layer = _layer(users)
            if max_dim is None or max(layer.a_dim, layer.g_dim) <= max_dim:
                layers.append(layer)
                continue
            rows = max(layer.a_dim, layer.g_dim)
            why = f"its factor would have {rows} rows, more than {max_dim}"
        for _, module in users:
            reasons.update((p, why) for p in module.parameters(recurse=False))
    return layers, reasons


def _holders(model: nn.Module) -> dict[nn.Parameter, Users]:
    """The modules that hold each parameter, by name."""
    holders: dict[nn.Parameter, Users] = {}
    for name, module in model.named_modules():
        for p in dict.fromkeys(module.parameters(recurse=False)):
            holders.setdefault(p, []).append((name, module))
    return holders


def _is_kind(module: nn.Module) -> bool:
    return isinstance(module, KINDS_OF_MODULE) and "weight" in module._parameters


def _plain(module: nn.Module) -> bool:
    """Whether the module computes what its base does, and not what a subclass likes."""
    kind = type(module)
    return any(
        kind.forward is base.forward
        and getattr(kind, "_conv_forward", None) is getattr(base, "_conv_forward", None)
        for base in KINDS_OF_MODULE
    )


def _names(users: Users) -> str:
    return " and ".join(name or "the model" for name, _ in users)


def _against(weight: nn.Parameter, users: Users) -> str | None:
    """Why a layer cannot be preconditioned, or None."""
    module, names = users[0][1], _names(users)
    if not all(_is_kind(m) and m._parameters["weight"] is weight for _, m in users):
        return f"it is shared by {names} in different roles"
    if len({(type(m), id(m._parameters.get("bias"))) for _, m in users}) > 1:
        return f"it is shared by {names}, which differ in type or bias"
    if len({getattr(m, "groups", 1) for _, m in users}) > 1:
        return f"it is shared by {names}, which differ in groups"
    if not _plain(module):
        return f"{type(module).__name__} has a forward of its own"
    if not weight.requires_grad:
        return "its weight is frozen"
    if not weight.is_floating_point():
        return f"it is {weight.dtype}"
    return None


def _layer(users: Users) -> Layer:
    name, module = users[0]
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    return Layer(
        name=name,
        modules=tuple(m for _, m in users),
        weight=weight,
        bias=bias if bias is not None and bias.requires_grad else None,
        groups=getattr(module, "groups", 1),
    )


def _bypassed(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters that torch's MultiheadAttention reads without calling a Linear."""
    return {
        p: f"MultiheadAttention {name or 'the model'} uses it without calling a "
        "Linear: project with Linear layers and scaled_dot_product_attention instead"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for p in module.parameters()
    }


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])
