"""Pieces of a checkpoint whose keys are not known before it is read: bytes."""

from __future__ import annotations

import io
from typing import Any

import torch


def packed(value: object) -> bytes:
    """Nested containers of tensors, numbers and texts as one opaque piece."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(piece: bytes) -> Any:
    """What was `packed`, on the CPU. Raises RuntimeError for what is not whole."""
    try:
        return torch.load(io.BytesIO(piece), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds, for many kinds of damage
        raise RuntimeError(f"{len(piece)} bytes cannot be read: {error}") from error
