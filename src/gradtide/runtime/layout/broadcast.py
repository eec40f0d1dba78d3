"""One rank's parameters and buffers for everybody, many small ones in one message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gradtide.core.engine import Engine
from gradtide.core.grouped import grouped
from gradtide.core.ops import Broadcast
from gradtide.core.torch_internals import is_traceable_wrapper_subclass
from gradtide.transport.shards import local

# What quantised values are, in memory.
INTEGERS = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}
MESSAGE_BYTES = 25_000_000  # more => a larger copy, fewer start-ups


def synchronize(engine: Engine, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite tensors with rank `source`'s where any rank has other bits than that.

    Models that were built from one seed are equal already: of 440 MB that a link of 50
    Mb/s takes minutes for, 16 bytes of each tensor are compared.
    """
    tensors = [piece for tensor in tensors for piece in held(local(tensor))]
    everyone = engine.transport.gather_objects([digest(tensor) for tensor in tensors])
    told = zip(tensors, zip(*everyone, strict=True), strict=True)
    differing = [tensor for tensor, found in told if len(set(found)) > 1]
    broadcast(engine, differing, source)


def digest(tensor: Tensor) -> bytes:
    """16 bytes that tell a tensor's bits from any others."""
    found = hashlib.blake2b(digest_size=16)
    for piece in held(tensor):
        plain = _bytes(integers(piece.detach())).cpu()
        found.update(_aside(plain).numpy().data)
    return found.digest()


def held(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of another class holds, such as codes and scales.

    Few of torch's functions may take the whole.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [piece for name in names for piece in held(getattr(tensor, name))]


def integers(tensor: Tensor) -> Tensor:
    """A tensor, or if it is quantised the same memory as the integers that it holds.

    Few of torch's functions take anything else of these.
    """
    if not tensor.is_quantized:
        return tensor
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    held = torch.empty(0, dtype=INTEGERS[tensor.dtype], device=tensor.device)
    return held.set_(tensor.untyped_storage(), *place)


def broadcast(engine: Engine, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite tensors with rank `source`'s, many small ones at once.

    They travel as bytes: not every transport knows every dtype, and tensors of several
    are one message. No message is longer than MESSAGE_BYTES, and no tensor that alone
    is longer is copied if it is contiguous.
    """
    for batch in _messages(tensors):
        _begin(engine, batch, source)()


def begin_broadcast(
    engine: Engine, tensors: Sequence[Tensor], source: int
) -> Callable[[], None]:
    """`broadcast` that does not wait: call what is returned for tensors to be there."""
    ends = [_begin(engine, batch, source) for batch in _messages(tensors)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """What travels as one."""
    plain = [integers(tensor).detach() for tensor in tensors]
    # By falling width, so that each begins where its dtype may.
    plain.sort(key=Tensor.element_size, reverse=True)
    for together in grouped(plain, attrgetter("device")).values():
        yield from _batches(together)


def _begin(engine: Engine, batch: Sequence[Tensor], source: int) -> Callable[[], None]:
    flats = [_bytes(tensor) for tensor in batch]
    data = _aside(flats[0]) if len(flats) == 1 else torch.cat(flats)
    asked = [
        engine.ask("broadcast", Broadcast(message, source))
        for message in torch.split(data, MESSAGE_BYTES)
    ]

    def end() -> None:
        for answer in asked:
            answer()
        if engine.transport.group.rank != source:
            pieces = torch.split(data, [len(flat) for flat in flats])
            for tensor, piece in zip(batch, pieces, strict=True):
                _write(tensor, piece.view(tensor.dtype).view(tensor.shape))

    return end


def _bytes(tensor: Tensor) -> Tensor:
    """What a tensor holds, one after the other; its own memory where that can be."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _aside(flat: Tensor) -> Tensor:
    """The same memory as another storage: whoever makes an array of it marks that.

    What a user's tensor has for a storage could never be resized again.
    """
    alone = flat.device.type == "cpu"
    return from_dlpack(flat) if alone else flat


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copy; what is expanded has many places that are one in memory."""
    strides = tensor.stride()
    if 0 in strides:
        where = tuple(slice(None if stride else 1) for stride in strides)
        tensor, values = tensor[where], values[where]
    tensor.copy_(values)


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
