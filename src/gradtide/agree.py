"""What all ranks must have in common before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from gradtide.transport import Transport

Signature = Mapping[str, Any]
T = TypeVar("T")


BUILD = "build the same model with the same scheme on every rank"


def agree(
    transport: Transport,
    prepare: Callable[[], tuple[T, Signature]],
    remedy: str = BUILD,
) -> T:
    """Run `prepare` on every rank and compare what the ranks say of themselves.

    Returns its first result. Raises on *every* rank, so that none waits for another:
    with the rank's own error where `prepare` failed, otherwise ValueError naming the
    rank that failed, or the first thing that differs and the two ranks that differ in
    it, and the `remedy`.
    """
    error: ValueError | TypeError | None = None
    result: T
    signature: Signature = {}
    try:
        result, signature = prepare()
    except (ValueError, TypeError) as caught:
        error = caught
    answers = transport.gather_objects(
        (None if error is None else str(error), signature)
    )
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(answers):
        if message is not None:
            raise ValueError(f"rank {rank} cannot take part: {message}")
    for rank, (_, theirs) in enumerate(answers):
        _compare(answers[0][1], theirs, rank, remedy)
    return result


def describe(model: nn.Module, scheme: object) -> Signature:
    """A rank's signature: its scheme, then every parameter and buffer."""
    named = [("scheme", repr(scheme))]
    named += [(f"parameter {n}", _text(p)) for n, p in model.named_parameters()]
    named += [(f"buffer {n}", _text(b)) for n, b in model.named_buffers()]
    return dict(named)


def _text(tensor: Any) -> str:
    frozen = (
        ""
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        else " frozen"
    )
    return f"{tuple(tensor.shape)} {tensor.dtype}{frozen}"


def _compare(first: Signature, other: Signature, rank: int, remedy: str) -> None:
    for key in {**first, **other}:
        ours, theirs = first.get(key, "not there"), other.get(key, "not there")
        if ours != theirs:
            raise ValueError(
                f"{key} differs between ranks: rank 0 has {ours}, rank {rank} has "
                f"{theirs}; {remedy}"
            )
    if list(first) != list(other):
        raise ValueError(
            f"rank {rank} registers its parameters in another order than rank 0; "
            "build the same model on every rank"
        )
