"""Lightning's Trainer and Fabric train under gradtide as under their DDPStrategy."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="needs the extra `lightning`")

import lightning
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from tests.integrations.frameworks import on_ranks, run_example

from gradtide.integrations.lightning import (
    GradtideFabricStrategy,
    GradtideMetrics,
    GradtideStrategy,
)

# Lightning has many warnings to give.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

QUIET = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
EXAMPLES_OWN = {"accelerator", "devices"}
OPTIONS: dict[str, dict[str, Any]] = {
    "validation": {"val_check_interval": 0.5},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping by value": {
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "accumulation": {"accumulate_grad_batches": 4},
    "bf16": {"precision": "bf16-mixed"},
    "averaged weights": {"val_check_interval": 0.5},
}
ALL = {
    "gradient_clip_val": 0.1,
    "accumulate_grad_batches": 2,
    "precision": "bf16-mixed",
}
ROUNDED = {"clipping"}  # the norm is summed in another order
BATCHES = 6  # an epoch, on each rank


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def data() -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(16 * BATCHES, 8, generator=rng)
    y = torch.randint(4, (16 * BATCHES,), generator=rng)
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Module(lightning.LightningModule):
    """Keeps the losses of training and validation in the order in which they come."""

    def __init__(self, manual: int = 0, optimizers: int = 1) -> None:
        super().__init__()
        self.net, self.losses, self.number = network(), [], optimizers
        self.backwards, self.automatic_optimization = manual, not manual

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.automatic_optimization:
            return self.loss(batch)
        found = self.optimizers()
        for _ in range(self.backwards):
            loss = self.loss(batch)
            self.manual_backward(loss)
        for optimizer in found if isinstance(found, list) else [found]:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        if self.number == 1:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        parts = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.AdamW(part, lr=0.01) for part in parts]


def fit(strategy: Any, module: Module | None = None, **options: Any) -> list[float]:
    """The losses of two epochs."""
    module, ckpt_path = module or Module(), options.pop("ckpt_path", None)
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(strategy=strategy, **QUIET, **options)
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    return module.losses


def of_options(strategy: Any) -> dict[str, list[float]]:
    """Losses by option; `strategy` makes one."""
    found = {}
    for name, options in OPTIONS.items():
        averaging = (
            [EMAWeightAveraging(decay=0.5)] if name == "averaged weights" else []
        )
        found[name] = fit(strategy(), callbacks=averaging, **options)
    for backwards in (1, 2):
        found[f"{backwards} by hand"] = fit(strategy(), Module(manual=backwards))
    return found


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_losses_equal_ddp(scheme: str) -> None:
    def work() -> Any:
        return of_options(DDPStrategy), of_options(lambda: GradtideStrategy(scheme))

    for expected, found in on_ranks(work):
        for name, losses in expected.items():
            if scheme == "dear" and name in ROUNDED:
                losses = pytest.approx(losses, rel=1e-5)
            assert found[name] == losses, name
        assert len(expected["validation"]) == 2 * BATCHES + 4 * BATCHES


def test_several_optimizers_are_right_or_refused() -> None:
    def work() -> Any:
        def losses(strategy: Any) -> list[float]:
            return fit(strategy, Module(manual=1, optimizers=2))

        with pytest.raises(ValueError, match="optimizer"):
            losses(GradtideStrategy("dear"))
        return losses(DDPStrategy()), losses(GradtideStrategy("wfbp"))

    for expected, found in on_ranks(work):
        assert found == expected


# - Checkpoints ------------------------------------------------------------------------


def resumed(scheme: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a run, and those of one that was stopped after half of it."""
    whole, module = fit(GradtideStrategy(scheme), max_epochs=4, **ALL), Module()
    keep = ModelCheckpoint(folder, save_top_k=1, save_last="link", every_n_epochs=1)
    options = {"enable_checkpointing": True, "callbacks": [keep], **ALL}
    fit(GradtideStrategy(scheme), module, **options)
    options = {"max_epochs": 4, "ckpt_path": str(folder / "last.ckpt"), **ALL}
    rest = fit(GradtideStrategy(scheme), **options)
    return whole, module.losses + rest


@pytest.mark.parametrize(
    "scheme",
    ["dear", "exdyna(0.1)", "exdyna(0.1, schedule='dear')"],
)
def test_resumed_as_if_not_stopped(scheme: str, tmp_path: Path) -> None:
    for whole, both in on_ranks(resumed, scheme, tmp_path):
        assert both == whole
    (kept,) = tmp_path.glob("*.ckpt.gradtide")  # those of removed checkpoints are gone
    assert sorted(path.name for path in kept.iterdir()) == ["rank0.pt", "rank1.pt"]


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_resumed_in_the_middle_of_an_epoch_as_ddp(scheme: str, tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> list[float]:
        keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [keep], **ALL}
        fit(strategy(), max_steps=2, **options)
        (path,) = folder.glob("*step=2.ckpt")
        return fit(strategy(), ckpt_path=str(path), **ALL)

    def work() -> Any:
        expected = run(DDPStrategy, tmp_path / "ddp")
        return expected, run(lambda: GradtideStrategy(scheme), tmp_path / scheme)

    for expected, found in on_ranks(work):
        assert found == (expected if scheme == "wfbp" else pytest.approx(expected))


def test_a_state_that_is_missing_is_said_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    def saved() -> None:
        strategy = GradtideStrategy("exdyna(0.1)")
        options = {"max_epochs": 1, "enable_checkpointing": False, **QUIET}
        trainer, module = lightning.Trainer(strategy=strategy, **options), Module()
        trainer.fit(module, data())
        assert strategy.replica is None  # the fit has ended: the module is plain
        assert not module._forward_pre_hooks
        trainer.save_checkpoint(path)

    def again() -> None:
        fit(GradtideStrategy("exdyna(0.1)"), ckpt_path=str(path))

    def refused() -> None:
        with pytest.raises(ValueError, match="the state has no 'rank1'"):
            again()

    def said() -> None:
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="residuals begin at zero"):
                again()
        else:
            again()

    on_ranks(saved)
    assert (tmp_path / "x.ckpt.gradtide" / "rank1.pt").is_file()
    (tmp_path / "x.ckpt.gradtide" / "rank1.pt").unlink()
    on_ranks(refused)
    (tmp_path / "x.ckpt.gradtide" / "rank0.pt").unlink()
    on_ranks(said)


# - The rest ---------------------------------------------------------------------------


def test_chosen_by_name_and_environment() -> None:
    def work() -> Any:
        os.environ["GRADTIDE_SCHEME"] = "oktopk(0.1)"
        seen = []

        class Look(lightning.Callback):
            def on_train_end(self, trainer: Any, module: Any) -> None:
                seen.append(repr(trainer.strategy.replica.scheme.collective))

        fit("gradtide", callbacks=[Look()])
        return seen

    for (seen,) in on_ranks(work):
        assert seen.startswith("OkTopk(density=0.1")


def test_an_error_on_one_rank_is_the_one_that_is_seen() -> None:
    class Broken(Module):
        def loss(self, batch: Any) -> Tensor:
            if len(self.losses) == 5 and dist.get_rank() == 1:
                raise OSError("on purpose")
            return super().loss(batch)

    def work() -> None:
        fit(GradtideStrategy("wfbp"), Broken())

    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)on purpose"):
        on_ranks(work)


def test_metrics_reach_loggers_or_the_progress_bar(tmp_path: Path) -> None:
    names = {"exposed_seconds", "exchange_seconds", "sent_bytes", "density"}

    def work() -> Any:
        def run(logger: Any) -> Any:
            trainer = lightning.Trainer(
                **{**QUIET, "logger": logger},
                strategy=GradtideStrategy("topka2a(0.1)"),
                callbacks=[GradtideMetrics()],
                max_epochs=1,
                log_every_n_steps=2,
                enable_checkpointing=False,
            )
            trainer.fit(Module(), data())
            return sorted(trainer.progress_bar_metrics)

        return run(CSVLogger(tmp_path, version="x")), run(False)

    (with_logger, without), _ = on_ranks(work)
    assert not with_logger
    assert {f"gradtide/{name}" for name in names} <= set(without)
    header, *rows = (tmp_path / "lightning_logs/x/metrics.csv").read_text().split()
    assert {f"gradtide/{name}" for name in names} <= set(header.split(","))
    assert len(rows) == BATCHES // 2


def test_fabric_trains_saves_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "fabric.ckpt"

    def run(strategy: Any, save: bool = False, load: bool = False) -> list[float]:
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model: Any = network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(data())
        state, losses = {"model": model, "optimizer": optimizer}, []
        if load:
            fabric.load(path, state)
        for step, (x, y) in enumerate(loader):
            quiet = step % 3 != 2
            with fabric.no_backward_sync(model, enabled=quiet):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
            if not quiet:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if save:
            fabric.save(path, state)
        for replica in getattr(fabric.strategy, "replicas", []):
            replica.remove()
        return losses

    def work() -> Any:
        expected = run(FabricDDPStrategy(), save=True)
        expected += run(FabricDDPStrategy(), load=True)
        found = run(GradtideFabricStrategy("wfbp"), save=True)
        found += run(GradtideFabricStrategy("wfbp"), load=True)
        sparse = [run("gradtide", save=True), run("gradtide", load=True)]
        return expected, found, sparse

    os.environ["GRADTIDE_SCHEME"] = "exdyna(0.1)"
    try:
        for expected, found, (first, second) in on_ranks(work):
            assert found == expected
            assert sum(second) < sum(first)
    finally:
        del os.environ["GRADTIDE_SCHEME"]
    assert (tmp_path / "fabric.ckpt.gradtide" / "rank1.pt").is_file()


def test_the_example_runs(tmp_path: Path) -> None:
    options = {name: QUIET[name] for name in QUIET if name not in EXAMPLES_OWN}
    options |= {"max_steps": 3, "enable_checkpointing": False}
    on_ranks(run_example, "lightning_gpt.py", tmp_path, options)
