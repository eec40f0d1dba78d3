"""Optimizers are known by what they do: torch's, and one of our own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradtide.runtime.optimizer.probing import Traits, check_deferrable, probe

LINEAR = Traits()
ADAM = Traits(True, ("exp_avg_sq",), "exp_avg")
EXPECTED: dict[str, Traits] = {
    "ASGD": LINEAR,
    "Adadelta": Traits(True, ("square_avg",)),
    "Adafactor": Traits(True, ("row_var", "col_var")),
    "Adagrad": Traits(True, ("sum",)),
    "Adam": ADAM,
    "AdamW": ADAM,
    "Adamax": Traits(True, (), "exp_avg"),
    "Muon": LINEAR,
    "NAdam": ADAM,
    "RAdam": ADAM,
    "RMSprop": Traits(True, ("square_avg",)),
    "Rprop": LINEAR,
    "SGD": LINEAR,
}
REFUSED = {"LBFGS": "closure", "SparseAdam": "dense gradients"}
KINDS: dict[str, Any] = {
    name: kind
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(5, 4)]]


def traits(optimizer: Optimizer) -> set[Traits]:
    return set(probe(optimizer).values())


def test_all_of_torchs_are_expected_here() -> None:
    assert KINDS.keys() <= EXPECTED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", [name for name in EXPECTED if name in KINDS])
def test_torchs_optimizers(name: str) -> None:
    assert traits(KINDS[name](params())) == {EXPECTED[name]}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, LINEAR),
        (
            "AdamW",
            {"amsgrad": True},
            Traits(True, ("exp_avg_sq", "max_exp_avg_sq"), "exp_avg"),
        ),
        ("Adam", {"eps": 1.0, "weight_decay": 1.0}, ADAM),
        ("Adam", {"fused": True, "maximize": True}, ADAM),
        ("Adam", {"lr": 0.0}, ADAM),
        ("Adam", {"lr": torch.tensor(0.0)}, ADAM),
        ("Adam", {"betas": (0.0, 0.99)}, ADAM),
        ("RMSprop", {"centered": True, "momentum": 0.9}, Traits(True, ("square_avg",))),
    ],
)
def test_options_count(name: str, options: dict[str, Any], expected: Traits) -> None:
    assert traits(KINDS[name](params(), **options)) == {expected}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tried_out_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"steps of {name} .*'wfbp'.*{REFUSED[name]}"):
        probe(KINDS[name](params()))


def test_shapes_count() -> None:
    shapes = params((), (5,), (5, 4), (2, 2, 2, 2))
    found = probe(optim.Adafactor(shapes))
    squares = [found[p].squares for p in shapes]
    assert squares == [
        ("variance",),
        ("variance",),
        ("row_var", "col_var"),
        ("row_var", "col_var"),
    ]


class Mixed(Optimizer):
    """Steps by signs of a mean, or by roots of gradients, as its groups ask for."""

    def __init__(self, params: Any, *, rate: float, noise: float = 0.0) -> None:
        super().__init__(params, {"rate": rate, "noise": noise, "power": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                move = mean.sign()
                if group["power"] is not None:
                    move = p.grad.sign() * p.grad.abs() ** group["power"]
                move = move + group["noise"] * torch.randn_like(p)
                p.sub_(move, alpha=group["rate"])


def test_groups_of_an_optimizer_of_ones_own() -> None:
    signs, linear = params((5, 4), (5,))
    optimizer = Mixed([{"params": [signs]}, {"params": [linear], "power": 1}], rate=0.1)
    found = probe(optimizer)
    assert found[signs] == Traits(False, (), "mean")
    assert found[linear] == Traits()
    optimizer.param_groups[1]["power"] = 0.5
    with pytest.raises(
        ValueError, match=r"Mixed .*neither as long .* nor proportional"
    ):
        probe(optimizer)


def test_nothing_is_touched() -> None:
    """Not the optimizer, its tensors, hooks or state, nor the random numbers."""
    calls = []
    tensors = params()
    optimizer = Mixed(tensors, rate=0.1, noise=1e-12)
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("all"))
    before = torch.get_rng_state()
    assert traits(optimizer) == {Traits(False, (), "mean")}
    everywhere.remove()
    assert not calls
    assert not optimizer.state
    assert torch.equal(tensors[0], torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scheduler_that_begins_at_zero_does_not_matter() -> None:
    optimizer = optim.AdamW(params())
    optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    assert traits(optimizer) == {ADAM}


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_an_empty_parameter_that_has_stepped(name: str) -> None:
    """What is remembered of it has no entry that could stand for others."""
    tensors = params((0, 4), (5, 4))
    optimizer = KINDS[name](
        tensors, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {})
    )
    for p in tensors:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(probe(optimizer).values()) == {EXPECTED[name]}
    check_deferrable(optimizer)


class Coupled(Optimizer):
    """Steps by gradients over the norm of all that step together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.square().sum() for p in found) ** 0.5
            for p in found:
                p.sub_(p.grad / norm, alpha=group["lr"])


def test_parameters_of_one_kind_that_depend_on_each_other_are_not_deferred() -> None:
    check_deferrable(Coupled(params((5, 4))))
    with pytest.raises(ValueError, match=r"Coupled .* one parameter at a time"):
        check_deferrable(Coupled(params((5, 4), (6, 4), (7, 4))))
