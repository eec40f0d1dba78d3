"""Which layers are supported, and their tensors as matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gradtide.kfac.layers import left_out, supported


class Twice(nn.Module):
    """Two modules that share parameters."""

    def __init__(self, first: nn.Module, second: nn.Module, *shared: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        for name in shared:
            setattr(second, name, getattr(first, name))


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in supported(model)]


def test_dimensions_of_factors() -> None:
    model = nn.Sequential(
        nn.Linear(5, 3),
        nn.Linear(5, 3, bias=False),
        nn.Conv1d(4, 6, 3),
        nn.Conv2d(4, 6, (3, 2), groups=2),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
    )
    layers = supported(model)
    shapes = [(la.groups, la.dim("A"), la.dim("G")) for la in layers]
    assert shapes == [(1, 6, 3), (1, 5, 3), (1, 13, 6), (2, 13, 3), (8, 9, 1)]
    assert layers[3].numel("A") == 2 * 13 * 14 // 2
    assert layers[3].numel("G") == 2 * 3 * 4 // 2
    assert layers[3].gradient_shape == (2, 3, 13)
    assert left_out(model) == {}


def test_other_layers_are_left_to_the_optimizer() -> None:
    model = nn.Sequential(
        nn.Embedding(9, 4),
        nn.LayerNorm(4),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Linear(4, 4),
    )
    assert names(model) == ["3"]
    assert left_out(model)["0.weight"] == "Embedding is not supported"
    assert set(left_out(model)) == {
        "0.weight", "1.weight", "1.bias", "2.weight", "2.bias"
    }  # fmt: skip


def test_attention_that_calls_no_linear_is_named() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert names(model) == ["linear1", "linear2"]
    reasons = left_out(model)
    for parameter in ("in_proj_weight", "out_proj.weight", "out_proj.bias"):
        assert "MultiheadAttention self_attn" in reasons[f"self_attn.{parameter}"]


def test_frozen_layers_are_skipped_and_frozen_biases_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    layers = supported(model)
    assert [(layer.name, layer.dim("A")) for layer in layers] == [("1", 3)]
    assert left_out(model) == {"2.bias": "its weight is frozen"}


def test_linears_that_share_all_are_one_layer() -> None:
    model = Twice(nn.Linear(3, 3), nn.Linear(3, 3), "weight", "bias")
    (layer,) = supported(model)
    assert layer.modules == (model.first, model.second)


def test_a_module_in_two_places_is_one_layer() -> None:
    shared = nn.Linear(3, 3)
    (layer,) = supported(nn.Sequential(shared, nn.ReLU(), shared))
    assert layer.modules == (shared,)


@pytest.mark.parametrize(
    ("model", "parameter", "reason"),
    [
        (
            Twice(nn.Embedding(9, 4), nn.Linear(4, 9), "weight"),
            "first.weight",
            "shared by first and second in different roles",
        ),
        (
            Twice(nn.Linear(4, 4), nn.Linear(4, 4), "weight"),
            "first.weight",
            "differ in type or bias",
        ),
        (
            Twice(nn.Linear(4, 4), nn.Linear(4, 4), "bias"),
            "second.weight",
            "its bias is shared with first and second",
        ),
        (
            Twice(nn.Conv1d(2, 2, 1, groups=1), nn.Conv1d(1, 2, 1), "weight", "bias"),
            "first.weight",
            "",
        ),
    ],
)
def test_other_sharing_is_refused_by_name(
    model: nn.Module, parameter: str, reason: str
) -> None:
    if reason:
        assert reason in left_out(model)[parameter]
        assert parameter not in {f"{name}.weight" for name in names(model)}
    else:
        assert len(supported(model)) == 1


def test_weights_that_are_computed_are_left_alone() -> None:
    assert names(nn.Sequential(weight_norm(nn.Linear(3, 3)))) == []


class Custom(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):  # type: ignore[no-untyped-def]
        return super()._conv_forward(x, weight - weight.mean(), bias)


def test_a_subclass_that_computes_something_else_is_refused_by_name() -> None:
    model = nn.Sequential(Custom(2, 2, 1))
    assert names(model) == []
    assert "Custom has a forward of its own" in left_out(model)["0.weight"]


def test_layers_above_the_largest_factor_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 50))
    assert [layer.name for layer in supported(model, max_dim=20)] == ["0"]
    assert "50 rows" in left_out(model, max_dim=20)["1.weight"]


# - Tensors as matrices ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_inputs_of_a_linear_of_any_rank(shape: tuple[int, ...]) -> None:
    module = nn.Linear(4, 3)
    (layer,) = supported(module)
    x = torch.randn(shape)
    (rows,) = layer.inputs(module, x)
    assert torch.equal(rows, x.reshape(1, -1, 4))
    assert rows.data_ptr() == x.data_ptr()


def test_matrix_and_back() -> None:
    for module in (
        nn.Linear(3, 2),
        nn.Linear(3, 2, bias=False),
        nn.Conv1d(4, 6, 3, groups=2),
    ):
        (layer,) = supported(module)
        given = [torch.randn_like(p) for p in layer.params]
        back = layer.tensors(layer.matrix(*given))
        assert all(map(torch.equal, back, given))
        assert len(back) == len(given)
