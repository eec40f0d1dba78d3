"""`gradtide profile trace`: users' factories, workloads, ranks at once, refusals."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks
from typer.testing import CliRunner, Result

from gradtide.lab import workloads
from gradtide.planner.trace import load
from gradtide.profile.cli import app
from gradtide.profile.trace.run import Effort, here, trace
from gradtide.profile.trace.subject import Wanted, build

pytestmark = pytest.mark.alone

MINE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, lambda: model(torch.ones(2, 8)).square().mean()

def pair():
    return build()[:2]

def no_model():
    return 1, build()[1], print

def no_optimizer():
    return build()[0], 1, print

def no_function():
    return *build()[:2], torch.ones(3)

def no_loss():
    return *build()[:2], lambda: torch.ones(3)

value = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory; another in each test."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["trace", *words])


def test_a_users_own_model(mine: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = call(f"{mine}:build", "--steps", "2", "--warmup", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = load(out)
    assert found.name == f"{mine}:build"
    assert found.units[0].name == "2.weight"
    assert {unit.name: unit.numel for unit in found.units} == {
        "2.weight": 4,
        "0.bias": 4,
        "0.weight": 32,
    }
    assert min(found.forward, found.backward, found.optimizer, found.processor) > 0
    assert not found.replayed
    assert "2.weight" in result.output
    assert "40 parameters in 3 tensors" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("pair", "returned a tuple: write a function without arguments that returns"),
        ("no_model", "the model is a int"),
        ("no_optimizer", "the optimizer is a int"),
        ("no_function", "loss is a tensor of shape (3,), no function"),
        ("no_loss", "loss() returned a tensor of shape (3,): return a tensor of one"),
        ("value", "has no function 'value'"),
        ("nobody", "has no function 'nobody'"),
    ],
)
def test_factories_that_are_none(mine: str, attribute: str, message: str) -> None:
    result = call(f"{mine}:{attribute}")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "'nothing' is no workload (gpt, gpt-small, digits"),
        (("no.such.module:f",), "there is no module no here"),
        (("math:sqrt", "--step-ms", "3"), "says itself what a step is"),
        (("mlp", "--step-ms", "3"), "really computes"),
        (("replay:lenet",), "no workload 'replay:lenet'"),
        (("mlp", "--steps", "0"), "time 1 or more"),
        (("mlp", "--threads", "0"), "0 threads"),
        (("mlp", "--ranks", "0"), "--ranks 0"),
        (("mlp", "--out", "/none/x.json"), "cannot be written"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_replay_has_the_times_that_it_waits() -> None:
    asked = 0.3
    found = here(Wanted("replay:resnet50", step_ms=asked * 1e3), Effort(3, 1))
    made = workloads.build("replay:resnet50", rank=0, size=1, step_ms=asked * 1e3)
    assert found.replayed
    assert found.numel == sum(p.numel() for p in made.model.parameters())
    # Sleeping overshoots on a busy machine.
    assert 0.9 * asked / 3 < found.forward < 1.5 * asked / 3
    assert 0.9 * asked * 2 / 3 < found.backward < 1.5 * asked * 2 / 3
    names = [unit.name for unit in found.units]
    assert names[0].startswith("fc.")
    assert names[-1].startswith(("conv1", "bn1"))
    assert names[found.forward_order[0]].startswith("conv1")


def test_all_ranks_meet_and_the_slowest_ones_optimizer_counts(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[str], float, float]:
        log: list[str] = []
        barrier, subject = dist.barrier, build(Wanted(f"{mine}:build"))

        def together() -> None:
            log.append("together")
            barrier()

        monkeypatch.setattr(dist, "barrier", together)
        nap = 0.02 * dist.get_rank()
        subject.optimizer.register_step_pre_hook(lambda *_: log.append("update"))
        subject.optimizer.register_step_post_hook(lambda *_: time.sleep(nap))
        found = trace(subject, Effort(steps=3, warmup=1))
        return log, found.optimizer, sum(unit.optimizer for unit in found.units)

    for log, optimizer, units in run_ranks(2, run):
        assert log[:12] == ["together", "together", "update"] * 4
        assert optimizer > 0.02
        assert units == pytest.approx(optimizer)


def test_ranks_at_once(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    words = ("--ranks", "2", "--steps", "2", "--warmup", "1", "--out", str(out))
    result = call("mlp", *words)
    assert result.exit_code == 0, result.output
    assert len(load(out).units) == 8
