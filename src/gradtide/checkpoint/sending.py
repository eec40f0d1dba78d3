"""Files that are on another host than the rank that needs them."""

from __future__ import annotations

import torch

from gradtide.core.engine import Engine
from gradtide.core.ops import Among, Broadcast, Flow
from gradtide.runtime.layout.broadcast import MESSAGE_BYTES


def send(
    engine: Engine,
    data: bytes | None,
    length: int,
    ends: tuple[int, int],
    device: torch.device,
) -> bytes | None:
    """Send bytes from the first of two ranks to the other, which returns them.

    All ranks call it, with the same `length` and `ends`; nothing travels to or from
    others.
    """
    source, receiver = ends
    rank = engine.group.rank
    if rank == source:
        assert data is not None
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        whole = torch.empty(
            length * (rank == receiver), dtype=torch.uint8, device="cpu"
        )

    def flow(chunk: torch.Tensor) -> Flow:
        if rank in ends:
            yield Among(Broadcast(chunk, 0), ends)
        return chunk

    for start in range(0, length, MESSAGE_BYTES):
        part = whole[start : start + MESSAGE_BYTES]
        chunk = part.to(device)
        engine.finish(engine.launch("checkpoint", flow(chunk)))
        if rank == receiver:
            part.copy_(chunk)
    return whole.numpy().tobytes() if rank == receiver else None
