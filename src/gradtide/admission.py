"""What a rank looks at by itself before it trains, or trains on among other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from gradtide.core.fields import refuse
from gradtide.fusion import Search
from gradtide.runtime import ahead
from gradtide.runtime.exchange.gradients import momentum_of
from gradtide.runtime.guards.validation import (
    is_joinable,
    validate,
    validate_optimizer,
    validate_scheme,
)
from gradtide.runtime.layout.parameters import averaged
from gradtide.runtime.layout.placement import Placement
from gradtide.scheme import Scheme, undecided
from gradtide.transport import Mesh, ProcessGroup, members
from gradtide.transport.shards import is_sharded

if TYPE_CHECKING:
    from gradtide.core.grace import Grace


def admit(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheme: Scheme,
    process_group: ProcessGroup | Mesh | None,
    buffers: str,
    check_every: int,
    own: object = None,
) -> None:
    """Raise ValueError, naming the remedy, for what cannot be trained.

    What `own` averages already is no hindrance. Whatever has to be compiled for it is
    compiled here.
    """
    validate(model, buffers, check_every, members(process_group), own)
    trained = averaged(model)
    device = trained[0][1].device
    refuse(
        {
            f"{name} is on {p.device}, and others are on {device}: move the "
            "model to one device": p.device != device
            for name, p in trained
        }
    )
    validate_scheme(model, scheme)
    if optimizer is not None:
        admit_optimizer(model, optimizer, scheme)
    if scheme.preconditioner is not None:
        from gradtide.kfac.costs import admitted

        admitted(model, scheme.preconditioner)
    ahead.prepare(dict(trained).values(), scheme)


def admit_optimizer(model: nn.Module, optimizer: Optimizer, scheme: Scheme) -> None:
    """Raise ValueError for an optimizer that a scheme cannot be used with."""
    validate_optimizer(model, optimizer, scheme)
    momentum_of(optimizer, scheme)


def admit_another(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheme: Scheme,
    before: Scheme,
    placement: Placement,
) -> None:
    """Raise ValueError, naming the remedy, for a scheme that cannot follow another one.

    `before` is the one in use, by which the gradients in `placement` are laid out.
    """
    validate_scheme(model, scheme)
    if optimizer is not None:
        if undecided(scheme) is not None:
            raise ValueError("adopt() takes a decided scheme: replicate with auto")
        admit_optimizer(model, optimizer, scheme)
        last, now = before.schedule.launch, scheme.schedule.launch
        begins = now == "step" != last
        wrong = {
            f"adopt({scheme!r}): the residual of gradients is no step; call "
            "adopt('wfbp') and make a step of that before, or remove() and "
            "replicate()": begins and placement.has_residual,
            f"adopt({scheme!r}): each rank has come to have an optimizer's state "
            "of its own, and residuals of steps; call remove() and replicate()": (
                last == "step" != now
            ),
            f"adopt({scheme!r}): the preconditioner stays as it is; call remove() "
            "and replicate() for another one": (
                scheme.preconditioner != before.preconditioner
            ),
        }
        refuse(wrong)
    ahead.prepare(dict(averaged(model)).values(), scheme)


def refuse_grace(scheme: Scheme, grace: Grace | None) -> None:
    """Raise ValueError for a scheme without rounds, where slow ranks have a grace."""
    if grace is not None and undecided(scheme) is None:
        refuse(
            {
                f"Lighthouse(grace={grace.seconds}) with {scheme!r}, which has no "
                "rounds that a slow rank could end sooner: leave grace out, or use "
                "rounds, such as 'diloco'": not scheme.schedule.rounds
            }
        )


def refuse_elastic(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheme: Scheme,
    process_group: object,
    grace: Grace | None = None,
) -> None:
    """Raise ValueError for what cannot be trained by ranks that come and go."""
    refuse_grace(scheme, grace)
    sharded = any(is_sharded(p) for _, p in averaged(model))
    refuse(
        {
            f"elastic=... with {reason}": true
            for reason, true in {
                "a process group: the ranks are those that are there": (
                    process_group is not None
                ),
                "an optimizer that is not known: pass it": optimizer is None,
                "an optimizer that exchanges something in its step, among the ranks of "
                "when it was built: use a plain one": (
                    optimizer is not None and is_joinable(optimizer)
                ),
                "a sharded model, whose parts other ranks have": sharded,
                "K-FAC, whose factors have owners: use a scheme without it": (
                    scheme.preconditioner is not None
                ),
                "a scheme that is still to be chosen: choose one with `gradtide "
                "plan`": undecided(scheme) is not None,
                "a fusion that is still searched for: use one of a size": isinstance(
                    scheme.fusion, Search
                ),
            }.items()
        }
    )
