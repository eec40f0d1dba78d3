"""One rank's parameters and buffers for everybody, many small ones in one message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradtide.core.engine import Engine
from gradtide.core.grouped import alike
from gradtide.core.ops import Broadcast
from gradtide.transport.shards import local

MESSAGE_BYTES = 25_000_000  # more => a larger copy, fewer start-ups


def synchronize(engine: Engine, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite tensors with rank `source`'s where any rank has other bits than that.

    Models that were built from one seed are equal already: of 440 MB that a link of 50
    Mb/s takes minutes for, 16 bytes of each tensor are compared.
    """
    tensors = [local(tensor) for tensor in tensors]
    everyone = engine.transport.gather_objects([digest(tensor) for tensor in tensors])
    told = zip(tensors, zip(*everyone, strict=True), strict=True)
    differing = [tensor for tensor, found in told if len(set(found)) > 1]
    broadcast(engine, differing, source)


def digest(tensor: Tensor) -> bytes:
    """16 bytes that tell a tensor's bits from any others."""
    held = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(held.numpy().data, digest_size=16).digest()


def broadcast(engine: Engine, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite tensors with rank `source`'s, many small ones of a kind at once.

    No message is longer than MESSAGE_BYTES, and no tensor that alone is longer is
    copied if it is contiguous.
    """
    for kind in alike(tensor.detach() for tensor in tensors):
        for together in _batches(kind):
            flats = [tensor.reshape(-1) for tensor in together]
            flat = flats[0] if len(flats) == 1 else torch.cat(flats)
            for message in torch.split(flat, MESSAGE_BYTES // flat.element_size()):
                engine.ask("broadcast", Broadcast(message, source))()
            if engine.transport.group.rank != source:
                pieces = torch.split(flat, [tensor.numel() for tensor in together])
                for tensor, piece in zip(together, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of tensors of at most MESSAGE_BYTES; a larger tensor is a run of its own."""
    batches: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        filled += tensor.nbytes
        if not batches or filled > MESSAGE_BYTES:
            batches.append([])
            filled = tensor.nbytes
        batches[-1].append(tensor)
    return batches
