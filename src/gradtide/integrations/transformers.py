"""gradtide in the place of DistributedDataParallel in the Trainer of transformers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import Trainer

from gradtide.integrations import accelerate, states
from gradtide.integrations.metrics import Meter
from gradtide.scheme import Scheme


def install(scheme: str | Scheme | None = None) -> ExitStack:
    """Have every `Trainer`, and what inherits from it, train by a scheme. Local.

    Call it before `trainer.train()`, on every rank. Accumulation, clipping, precision,
    evaluation, checkpoints and `resume_from_checkpoint` are as with
    DistributedDataParallel. In a checkpoint's folder every rank writes a file of its
    own into `gradtide/`: its residual, and what the scheme remembers. What the Trainer
    logs of the training has what `Meter.read` tells, too.

    Args:
        scheme: What travels, in which buckets, and when, as for `gradtide.replicate`.
            None stands for the environment's GRADTIDE_SCHEME, or "wfbp".

    Returns:
        What undoes it, by `close()` or as a context manager. Models that a Trainer has
            wrapped stay as they are.
    """
    installed, meter = accelerate.install(scheme), Meter()

    def log(original: Any, trainer: Any, logs: dict[str, float], *rest: Any) -> None:
        for replica in accelerate.replicas([trainer.model_wrapped]):
            if "loss" in logs:
                logs.update(meter.read(replica))
        original(trainer, logs, *rest)

    accelerate.patch(installed, Trainer, "_save_optimizer_and_scheduler", _save)
    accelerate.patch(installed, Trainer, "_load_optimizer_and_scheduler", _load)
    accelerate.patch(installed, Trainer, "log", log)
    return installed


def _save(original: Any, trainer: Any, folder: str) -> None:
    original(trainer, folder)
    replicas = accelerate.replicas([trainer.model_wrapped])
    states.save_all(replicas, f"{folder}/{states.FOLDER}")


def _load(original: Any, trainer: Any, folder: str | None) -> None:
    original(trainer, folder)
    if folder is not None:
        replicas = accelerate.replicas([trainer.model_wrapped])
        states.load_all(replicas, f"{folder}/{states.FOLDER}")
