"""What stands for K-FAC's stage where a scheme has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from gradtide.runtime.layout.buckets import GradientBucket, Place


class Places(Protocol):
    """Where gradients go: a `Placement`, or what a planner knows of one."""

    @property
    def buckets(self) -> list[GradientBucket]: ...

    @property
    def places(self) -> Mapping[nn.Parameter, Place]: ...


class Unpreconditioned:
    """Stands for `Preconditioning` where a scheme has none, and does nothing."""

    def __init__(self, placement: Places) -> None:
        self._placement = placement

    def plan(self) -> Sequence[Any]:
        return self._placement.buckets

    def needs(self, bucket: GradientBucket) -> set[GradientBucket]:
        return set()

    def _nothing(self, *_: object) -> None: ...

    leave = collect = invert = release_inverses = finish = follow = _nothing
    check_scale = precondition = defer = release = update = _nothing
