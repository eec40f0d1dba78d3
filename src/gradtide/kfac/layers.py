"""Which layers of a model K-FAC preconditions, and how their tensors are matrices.

[Note: groups] Every matrix here has a leading dimension of groups: the output channels
of a grouped convolution see only the inputs of their group, so its curvature is one
pair of factors per group. All other layers have one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

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

    def dim(self, kind: Kind) -> int:
        """Rows of a group's A: inputs, and the 1 that the bias sees. Of G: outputs."""
        if kind == "A":
            return self.fan_in + (self.bias is not None)
        return self.weight.shape[0] // self.groups

    def shape(self, kind: Kind) -> tuple[int, int, int]:
        """Of a factor: (groups, d, d)."""
        return (self.groups, self.dim(kind), self.dim(kind))

    def numel(self, kind: Kind) -> int:
        """Elements of a packed factor (`packing`): what travels of it."""
        return packed_numel(self.groups, self.dim(kind))

    @property
    def numbers(self) -> int:
        """Length of what ranks tell each other of it: see `Curvature.take`."""
        return 2 * (1 + self.groups)

    @property
    def gradient_shape(self) -> tuple[int, int, int]:
        """Of its gradient as a matrix: (groups, rows of G, rows of A)."""
        return (self.groups, self.dim("G"), self.dim("A"))

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
        """Gradients of the outputs as rows [groups, positions, rows of G]."""
        channels, spatial = self.weight.shape[0], self.weight.dim() - 2
        if spatial == 0:
            return g.reshape(1, -1, channels)
        batched = g if g.dim() == spatial + 2 else g.unsqueeze(0)
        last = batched.movedim(1, -1)
        if self.groups == 1 and last.is_contiguous():
            return last.view(1, -1, channels)
        columns = batched.transpose(0, 1).reshape(self.groups, self.dim("G"), -1)
        return columns.transpose(1, 2)

    def matrix(self, *like_params: Tensor) -> Tensor:
        """Tensors like `params` as a new fp32 matrix of `gradient_shape`."""
        weight, *bias = like_params
        out = weight.new_empty(self.gradient_shape, dtype=torch.float32)
        out[..., : self.fan_in] = weight.reshape(*out.shape[:2], self.fan_in)
        if bias:
            out[..., -1] = bias[0].view(out.shape[:2])
        return out

    def tensors(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """`matrix` undone: in the shapes of `params`, without a copy."""
        weight = matrix[..., : self.fan_in].reshape(self.weight.shape)
        if self.bias is None:
            return (weight,)
        return weight, matrix[..., -1].reshape(-1)


Factor: TypeAlias = tuple[Layer, Kind]


def sequence(layers: Sequence[Layer]) -> list[Factor]:
    """Factors as a step produces them: A in the forward, then G in reverse order."""
    a, g = KINDS
    return [*((layer, a) for layer in layers), *((layer, g) for layer in layers[::-1])]


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
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad and p not in taken:
            owner = model.get_submodule(name.rpartition(".")[0])
            found[name] = reasons.get(p, f"{type(owner).__name__} is not supported")
    return found


def _examine(
    model: nn.Module, max_dim: int | None
) -> tuple[list[Layer], dict[nn.Parameter, str]]:
    """The layers, and reasons against weights and biases that may seem supported."""
    reasons, holders = _bypassed(model), _holders(model)
    layers = []
    for weight, users in holders.items():
        if not any(_applies(user, weight) for _, user in users):
            continue
        name, module = users[0]
        bias = module._parameters.get("bias")
        why = reasons.get(weight) or _against(weight, users)
        if why is None and bias is not None and holders[bias] != users:
            why = "its bias is shared with " + _names(holders[bias])
        if why is None:
            modules, groups = tuple(m for _, m in users), getattr(module, "groups", 1)
            trained = bias if bias is not None and bias.requires_grad else None
            layer = Layer(name, modules, weight, trained, groups)
            rows = max(layer.dim(kind) for kind in KINDS)
            if max_dim is None or rows <= max_dim:
                layers.append(layer)
                continue
            why = f"its factor would have {rows} rows, more than {max_dim}"
        for _, user in users:
            reasons.update((p, why) for p in user.parameters(recurse=False))
    return layers, reasons


def _holders(model: nn.Module) -> dict[nn.Parameter, Users]:
    """The modules that hold each parameter, by name."""
    holders: dict[nn.Parameter, Users] = {}
    for name, module in model.named_modules():
        for p in dict.fromkeys(module.parameters(recurse=False)):
            holders.setdefault(p, []).append((name, module))
    return holders


def _applies(module: nn.Module, weight: nn.Parameter) -> bool:
    ours = isinstance(module, KINDS_OF_MODULE)
    return ours and module._parameters.get("weight") is weight


def _plain(module: nn.Module) -> bool:
    """Whether the module computes what its base does, and not what a subclass likes."""

    def computes(kind: Any) -> tuple[Any, Any]:
        return kind.forward, getattr(kind, "_conv_forward", None)

    return computes(type(module)) in map(computes, KINDS_OF_MODULE)


def _names(users: Users) -> str:
    return " and ".join(name or "the model" for name, _ in users)


def _against(weight: nn.Parameter, users: Users) -> str | None:
    """Why a layer cannot be preconditioned, or None."""
    module, names = users[0][1], _names(users)
    if not all(_applies(user, weight) for _, user in users):
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


def _bypassed(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters that torch's MultiheadAttention reads without calling a Linear."""
    return {
        p: f"MultiheadAttention {name or 'the model'} uses it without calling a "
        "Linear: project with Linear layers and scaled_dot_product_attention instead"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for p in module.parameters()
    }
