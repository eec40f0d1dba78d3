"""Where ranks train: which devices there are, whose each one is, what joins them."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from gradtide.core.devices import sent


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the device, such as cpu or cuda:1.

    Nothing is started on it.
    """
    remedy = "Use cpu, or cuda where torch finds one."
    try:
        asked = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: {reason}. {remedy}") from None
    if asked.type == "cpu":
        return
    found = None
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
    if found is None or found.type != asked.type:
        raise ValueError(f"--device {name}: torch finds no such device here. {remedy}")
    count = torch.accelerator.device_count()
    if (asked.index or 0) >= count:
        raise ValueError(f"--device {name}: there are {count}, from {asked.type}:0 on.")


def own_device(name: str) -> torch.device:
    """This rank's device of a kind, from now on the current one.

    Ranks of a machine that has fewer share them.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.index is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(device.type, local % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def backend(name: str) -> str | None:
    """What joins ranks that train on such devices; None: all that torch has for them.

    NCCL wants a device for each rank, and emulated hosts share those of the machine.
    """
    shared = "GRADTIDE_LAB_HOSTS" in os.environ
    if torch.device(name).type == "cpu" or shared:
        return "gloo"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "gloo" if ranks > torch.accelerator.device_count() else None


def placed(batch: tuple[Tensor, ...], model: nn.Module) -> tuple[Tensor, ...]:
    """A batch where a model is."""
    device = device_of(model)
    return tuple(sent(part, device) for part in batch)


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: where its first parameter is."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def finish(device: torch.device) -> None:
    """Wait for what this thread has queued on a device; what travels beside goes on."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
