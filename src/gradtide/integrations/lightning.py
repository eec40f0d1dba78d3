"""gradtide as a strategy of Lightning's Trainer, and of Fabric.

To import this module registers both strategies under the name "gradtide".
"""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.integrations import states
from gradtide.integrations.metrics import Meter
from gradtide.integrations.wrapping import introduce, scheme_or_default
from gradtide.parallel import DistributedDataParallel
from gradtide.replica import Replica
from gradtide.scheme import Scheme

# In a checkpoint: how many steps the states beside it have taken.
_STEPS = "gradtide_steps"


class GradtideStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy, where gradients travel by a scheme of gradtide's.

    Launching, clipping, accumulation, precision, callbacks and checkpoints are as under
    DDPStrategy. Beside a checkpoint `x.ckpt` every rank writes a file into the folder
    `x.ckpt.gradtide`: its residual, and what the scheme remembers.
    `fit(ckpt_path=...)` goes on from there.

    Args:
        scheme: What travels, in which buckets, and when, as for `gradtide.replicate`.
            None stands for the environment's GRADTIDE_SCHEME, or "wfbp".
        **options: What DDPStrategy takes.

    Attributes:
        replica: The `Replica` of the module while it is fitted; None before and after.
    """

    def __init__(self, scheme: str | Scheme | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.replica: Replica | None = None
        self._scheme = scheme_or_default(scheme)
        self._path: Any = None  # of the checkpoint that was read last
        self._state: states.State | None = None  # of the fit that has ended
        self._failed = False

    def _setup_model(self, model: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(model, scheme=self._scheme, **self._ddp_kwargs)
        self.replica, self._failed = ddp.replica, False
        return ddp

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, and tell the module's replica of them."""
        super().setup_optimizers(trainer)
        introduce([self.model], self.optimizers)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: there is no Reducer to be told of a static graph."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write rank 0's checkpoint, and every rank's own state beside it."""
        state = self._state
        if self.replica is not None:
            self.replica.gather_gradients()  # of a backward without a step
            state = self.replica.state_dict()
        if state is not None and "optimizer_states" in checkpoint:
            states.save(state, self.global_rank, _beside(filepath))
            checkpoint = {**checkpoint, _STEPS: [state["step"]]}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint, and keep its path for `load_optimizer_state_dict`."""
        self._path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizer, and then this rank's own state."""
        super().load_optimizer_state_dict(checkpoint)
        if self.replica is not None and _STEPS in checkpoint:
            states.load(self.replica, _beside(self._path), *checkpoint[_STEPS])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, with this rank's own state."""
        super().remove_checkpoint(filepath)
        states.remove(self.global_rank, _beside(filepath))

    def on_exception(self, exception: BaseException) -> None:
        """Remember that other ranks may not be where this one is."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave module and optimizer as plain ones."""
        replica, self.replica = self.replica, None
        if replica is not None and not self._failed:
            replica.end_round()
            replica.gather_gradients()
            self._state = replica.state_dict()
            replica.remove()
        super().teardown()


class GradtideFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """Fabric's DDPStrategy, where gradients travel by a scheme of gradtide's.

    What every rank saves beside a checkpoint is as for `GradtideStrategy`. It is read
    when `fabric.load` restores an optimizer.

    Args:
        scheme: As for `GradtideStrategy`.
        **options: What Fabric's DDPStrategy takes.

    Attributes:
        replicas: The `Replica` of every module that was set up, in that order.
    """

    def __init__(self, scheme: str | Scheme | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._scheme = scheme_or_default(scheme)
        self._models: list[DistributedDataParallel] = []

    @property
    def replicas(self) -> list[Replica]:
        return [model.replica for model in self._models]

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Link a module to the other ranks."""
        model = DistributedDataParallel(module, scheme=self._scheme, **self._ddp_kwargs)
        self._models.append(model)
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Tell the replicas of an optimizer."""
        introduce(self._models, [optimizer])
        return optimizer

    def save_checkpoint(self, path: Any, state: dict[str, Any], **options: Any) -> None:
        """Write rank 0's checkpoint, and every rank's own state beside it."""
        if _trains(state):
            state = {**state, _STEPS: states.save_all(self.replicas, _beside(path))}
        super().save_checkpoint(path, state, **options)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> Any:
        """Restore what rank 0 saved, and then this rank's own state."""
        rest = super().load_checkpoint(path, state, **options)
        if _trains(state) and _STEPS in rest:
            states.load_all(self.replicas, _beside(path), rest.pop(_STEPS))
        return rest


class GradtideMetrics(Callback):  # type: ignore[misc]
    """A callback that logs what the exchange costs, to whatever loggers are there.

    Whenever the Trainer logs (`log_every_n_steps`), it logs what `Meter.read` tells of
    rank 0. Without a logger the numbers are in the progress bar.
    """

    def __init__(self) -> None:
        self._meter, self._logged = Meter(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        """Log, if the Trainer is about to."""
        replica: Replica | None = getattr(trainer.strategy, "replica", None)
        step, every = trainer.global_step, trainer.log_every_n_steps
        if replica is None or not every or step % every or step == self._logged:
            return
        self._logged = step
        pl_module.log_dict(self._meter.read(replica), prog_bar=not trainer.loggers)


def _beside(path: Any) -> str:
    """The folder for the states of ranks; a link's is that of what it leads to."""
    text = str(path)
    return (text if "://" in text else os.path.realpath(text)) + ".gradtide"


def _trains(state: Any) -> bool:
    """Whether what Fabric saves or loads is that of a training."""
    return isinstance(state, dict) and any(
        isinstance(value, Optimizer) for value in state.values()
    )


_WHAT = "DDPStrategy by gradtide's schemes"
StrategyRegistry.register("gradtide", GradtideStrategy, description=_WHAT)
STRATEGY_REGISTRY.register("gradtide", GradtideFabricStrategy, description=_WHAT)
