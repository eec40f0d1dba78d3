"""Optimizers whose step is divided: one rank computes it for each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.fields import refuse
from gradtide.core.payload import settled, traits
from gradtide.runtime.optimizer.deferred_step import holds
from gradtide.scheme import Scheme


@runtime_checkable
class Divides(Protocol):
    """What such an optimizer offers, so that its step can be deferred.

    Attributes:
        answer_dtype: That in which what an owner has computed travels.
        deferred: Its steps are made for it, by the methods below: `step` does nothing.
    """

    answer_dtype: torch.dtype
    deferred: bool

    def owners(self) -> Mapping[Tensor, int]:
        """The rank that owns each parameter; collective where any has none yet."""

    def answers(self, params: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
        """What the step would do to this rank's, by their `.grad`, as one tensor each.

        Of parameters that it does not hold nothing is said. Local.
        """

    def take(self, answers: Mapping[Tensor, Tensor]) -> None:
        """Make the step for some parameters, by answers of their owners. Local."""

    def alone(self) -> Optimizer:
        """One that does the same without other ranks, with the same groups."""


@dataclass(frozen=True)
class Owned:
    """The owners of parameters, and the dtype in which their answers travel."""

    owners: Mapping[Tensor, int]
    dtype: torch.dtype


def dividing(optimizer: object) -> list[Divides]:
    """Those that divide their steps: an optimizer itself, or what it holds."""
    each = {id(one): one for one in (optimizer, *holds(optimizer))}.values()
    return [one for one in each if isinstance(one, Divides)]


def owned_by(optimizer: object, size: int) -> Owned | None:
    """Who owns what is stepped; None if nobody does. Collective, as `owners` is."""
    found = dividing(optimizer) if size > 1 else []
    if not found:
        return None
    owners = {p: rank for one in found for p, rank in one.owners().items()}
    return Owned(owners, found[0].answer_dtype)


def refuse_undivided(optimizer: Optimizer, scheme: Scheme) -> None:
    """Raise ValueError for schemes under which such steps cannot be deferred."""
    own = settled(scheme.exchange)
    words = f"{type(optimizer).__name__} under {scheme!r}"
    refuse(
        {
            f"{words}: K-FAC makes of means what every rank steps by; leave one of "
            "both out": scheme.preconditioner is not None,
            f"{words}: owners step by means of all that there is, exact or in 16 bits; "
            "use 'dear' or dear(wire='bf16'), or a schedule that updates at step()": (
                not traits(own).dense or traits(own).rounds_off
            ),
        }
    )
