"""What is found by trying out an optimizer is remembered, and of no other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradtide
from gradtide.runtime.optimizer import probing
from tests import tried
from tests.ranks import run_ranks


class Other(torch.optim.AdamW): ...


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "the same": lambda ps: torch.optim.AdamW(ps, eps=0.123),
    "other numbers": lambda ps: torch.optim.AdamW(ps, eps=0.124),
    "another class": lambda ps: Other(ps, eps=0.123),
    "other tensors": lambda ps: torch.optim.AdamW(list(ps)[:1], eps=0.123),
    "one that is frozen": lambda ps: torch.optim.AdamW(
        [p.requires_grad_(i > 0) for i, p in enumerate(ps)], eps=0.123
    ),
}


@pytest.mark.parametrize("scheme", ["dear", "diloco"])
def test_it_is_tried_out_once(scheme: str) -> None:
    if tried.WHOLE:
        pytest.skip("nothing is remembered with --whole")

    def tries(make: Callable[[Any], torch.optim.Optimizer]) -> int:
        """How often it was."""
        times, aside = [], probing.aside

        def counted(optimizer: torch.optim.Optimizer) -> Any:
            times.append(optimizer)
            return aside(optimizer)

        model = nn.Linear(3, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probing, "aside", counted)
            sync = gradtide.replicate(model, make(model.parameters()), scheme)
        sync.remove()
        return len(times)

    def run() -> dict[str, int]:
        tries(MAKE["the same"])
        alike = ("the same", "other numbers", "another class")
        return {name: tries(MAKE[name]) for name in alike}

    for found in run_ranks(2, run):
        assert found.pop("the same") == 0
        assert all(found.values())
    for found in run_ranks(2, run):  # what ranks before them have found
        assert found["other numbers"] == 0
        assert found["another class"]


def test_what_a_description_tells_apart() -> None:
    def described(name: str) -> str | None:
        return tried._described(MAKE[name](nn.Linear(3, 3).parameters()))

    same = [described("the same") for _ in range(2)]
    assert same[0] is not None
    assert same[0] == same[1]
    assert described("another class") is None
    others = {described(name) for name in MAKE if name != "another class"}
    assert len(others) == len(MAKE) - 1
    stepped = MAKE["the same"](nn.Linear(3, 3).parameters())
    stepped.state[torch.ones(1)] = {}
    assert tried._described(stepped) is None
    with torch.device("cpu"):
        assert described("the same") is None
