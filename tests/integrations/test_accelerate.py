"""Accelerate trains under gradtide as under DistributedDataParallel."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.frameworks import EXAMPLES, on_ranks, run_example
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs the extra `accelerate`")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from gradtide.integrations.accelerate import install
from gradtide.integrations.metrics import Meter, line

# Accelerate has warnings to give.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"clip": 0.1},
    "accumulation": {"accumulate": 3},
    "accumulation and clipping": {"accumulate": 3, "clip": 0.1},
    "bf16": {"precision": "bf16"},
}
BATCHES = 8  # an epoch, on each rank


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def data() -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(16 * BATCHES, 8, generator=rng)
    y = torch.randint(4, (16 * BATCHES,), generator=rng)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def train(
    scheme: str | None,  # None: DDP
    accumulate: int = 1,
    clip: float = 0.0,
    precision: str = "no",
    epochs: int = 1,
    save: Path | None = None,
    load: Path | None = None,
) -> list[float]:
    """The losses of a training loop as Accelerate's users write it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with ExitStack() if scheme is None else install(scheme):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision
        )
        model: Any = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data())
        if load is not None:
            accelerator.load_state(str(load))
        losses = []
        for x, y in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if save is not None:
            accelerator.save_state(str(save))
            accelerator.wait_for_everyone()
        if scheme is not None:
            assert "ms exposed" in line(Meter().read(model.replica))
    return losses


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_losses_equal_ddp(scheme: str) -> None:
    def work() -> Any:
        return {
            name: (train(None, **options), train(scheme, **options))
            for name, options in OPTIONS.items()
        }

    for pairs in on_ranks(work):
        for name, (expected, found) in pairs.items():
            if scheme == "dear" and "clipping" in name:  # summed in another order
                expected = pytest.approx(expected, rel=1e-5)
            assert found == expected, name


@pytest.mark.parametrize(
    "scheme", ["dear", "exdyna(0.1)", "exdyna(0.1, schedule='local')"]
)
def test_resumed_as_if_not_stopped(scheme: str, tmp_path: Path) -> None:
    def work() -> Any:
        options = {"accumulate": 2, "clip": 0.1, "precision": "bf16"}
        whole = train(scheme, epochs=4, **options)
        first = train(scheme, epochs=2, save=tmp_path, **options)
        return whole, first + train(scheme, epochs=2, load=tmp_path, **options)

    for whole, both in on_ranks(work):
        assert both == whole
        assert sum(whole[-BATCHES:]) < sum(whole[:BATCHES])
    found = sorted(path.name for path in (tmp_path / "gradtide").iterdir())
    assert found == ["rank0.pt", "rank1.pt"]


def test_undone_when_it_is_closed() -> None:
    methods = ("prepare_model", "prepare", "save_state", "load_state")
    before = [getattr(Accelerator, name) for name in methods]
    torchs = nn.parallel.DistributedDataParallel
    installed = install("dear")
    assert nn.parallel.DistributedDataParallel is not torchs
    installed.close()
    assert nn.parallel.DistributedDataParallel is torchs
    assert [getattr(Accelerator, name) for name in methods] == before


def test_a_scheme_that_is_not_known_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        install("nonsense")


def test_the_example_runs(tmp_path: Path) -> None:
    on_ranks(run_example, "accelerate_gpt.py", tmp_path, {"max_bytes": 8_000})


def test_the_example_runs_by_accelerate_launch(tmp_path: Path) -> None:
    words = ["--config_file", str(EXAMPLES / "accelerate_cpu.yaml")]
    words.append(str(EXAMPLES / "accelerate_gpt.py"))
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 23  # half of 92 batches on each of two ranks, two to a step
    losses = [float(text.split()[1].rstrip(",")) for text in said]
    assert losses[-1] < 0.7 * losses[0]
