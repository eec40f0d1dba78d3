"""A user's own program in comparisons and races: one contract, and what breaks it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradtide.lab import workloads
from gradtide.lab.cluster import LabError
from gradtide.lab.race.report import race
from gradtide.lab.spec import RaceSpec
from gradtide.lab.workloads.own import called_through, is_own, make

PROGRAM = """
import os
import torch
from torch import nn

RANK = int(os.environ.get("RANK", 0))

def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.Generator().manual_seed(RANK)
    def loss():
        x = torch.randn(16, 4, generator=inputs)
        return (model(x).squeeze(1) - x.sum(1)).square().mean()
    return model, optimizer, loss

def scored():
    model, optimizer, loss = build()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(99))
    return model, optimizer, loss, lambda: (model(x)[:, 0] - x.sum(1)).square().mean()

def words():
    return (*build(), lambda: "low")

def three():
    return (*build(), 3)

def nothing():
    build()

def fails():
    raise KeyError("data")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("own_program", None)
    return "own_program"


def test_names_with_a_colon_are_the_users_but_for_replays() -> None:
    assert is_own("mypkg.train:build")
    assert not is_own("replay:resnet50")
    assert not is_own("gpt-small")


def test_contestants_begin_alike_and_ranks_draw_other_numbers(program: str) -> None:
    first, again, other = (
        workloads.build(f"{program}:build", rank, 2) for rank in (0, 0, 1)
    )
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = next(first.model.parameters()), next(other.model.parameters())
    assert not torch.equal(a, b)  # whoever exchanges has rank 0's from the start


def test_a_held_out_loss_is_taken_in_evaluation_mode(program: str) -> None:
    workload = workloads.build(f"{program}:scored", 0, 2)
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model)["loss"] > 0
    assert workload.model.training
    assert workloads.build(f"{program}:build", 0, 2).evaluate is None


@pytest.mark.parametrize(
    ("name", "words"), [("words", "evaluate() returned a str"), ("three", "is a int")]
)
def test_what_is_no_held_out_loss_is_named(program: str, name: str, words: str) -> None:
    def score() -> None:
        found = make(f"{program}:{name}").evaluate
        assert found is not None
        found()

    with pytest.raises(ValueError, match=re.escape(words)):
        score()


@pytest.mark.parametrize("how", [{"step_ms": 3.0}, {"batch_size": 3}])
def test_it_says_itself_what_a_step_is(program: str, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=program):
        workloads.check(f"{program}:build", 2, **how)


def averaged() -> list[float]:
    """The gradients of a loss that calls the model, under DDP; and its forward."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    ddp, forward = DistributedDataParallel(model), model.forward
    x = torch.full((1, 2), 1.0 + torch.distributed.get_rank())
    with called_through(model, ddp):
        model(x).sum().backward()
    assert model.forward == forward
    assert "forward" not in vars(model)
    grad = model.weight.grad
    assert grad is not None
    return grad[0].tolist()


def test_a_loss_that_calls_the_model_is_averaged_by_ddp() -> None:
    assert run_ranks(2, averaged) == [[1.5, 1.5]] * 2


@pytest.mark.waits
@pytest.mark.parametrize(
    "name", ["build", pytest.param("scored", marks=pytest.mark.slow)]
)
def test_a_race(program: str, name: str, tmp_path: Path) -> None:
    spec = RaceSpec(
        ("ddp", "dear"), f"{program}:{name}", 2, 1, None, 0.3, every=5, seed=3
    )
    race(spec, tmp_path / "out", ["gradtide", "race"])
    told = json.loads((tmp_path / "out" / "record.json").read_text())
    ddp, dear = (row["course"]["loss"] for row in told["results"])
    same = min(len(ddp), len(dear), 4)
    # The same model, data and mean, whoever averages.
    assert dear[:same] == pytest.approx(ddp[:same], rel=1e-3)
    assert min(ddp) < ddp[0]


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "returned a NoneType"), ("fails", "raised KeyError: 'data'")],
)
def test_what_ranks_find_out_is_told_in_a_line(
    program: str, name: str, words: str, tmp_path: Path
) -> None:
    spec = RaceSpec(("ddp", "dear"), f"{program}:{name}", 2, 1, None, 0.3, every=5)
    with pytest.raises(LabError) as told:
        race(spec, tmp_path / "out", ["gradtide", "race"])
    assert [line for line in told.value.lines if words in line]
    assert "Traceback" not in str(told.value)
