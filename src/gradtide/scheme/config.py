"""A scheme: what is exchanged, in which buckets, when, and what is made of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace

from gradtide.collectives import Dense, TopK
from gradtide.collectives.levels import by_levels
from gradtide.collectives.momentum_correction import uses_optimizer_momentum
from gradtide.core.fields import check_fields, refuse
from gradtide.core.levels import Hosts, Members, alike, rows
from gradtide.core.outer import OuterSGD
from gradtide.core.payload import Collective, layers
from gradtide.core.schedule import WFBP, Schedule
from gradtide.fusion import BySize, Fusion, Search
from gradtide.kfac import KFAC
from gradtide.scheme.auto import Auto


@dataclass(frozen=True)
class Scheme:
    """A complete way to average gradients: what travels, in which buckets, and when.

    A scheme's text is its constructor call: `parse(repr(scheme)) == scheme`. From
    Python it is built from the same names, as in
    `gradtide.Scheme(gradtide.OkTopk(0.01), schedule=gradtide.DEAR)`.

    Args:
        collective: What travels of every bucket: `Dense`, `OkTopk`, ..., a wrapper
            around one, or a frozen dataclass of your own with a method `reduce`. The
            default is `Dense()`, because it is exact.
        fusion: Which gradients travel in one bucket: `BySize`, a search, ... The
            default, `BySize()`, needs no measurement. Sparse recipes have `BySize(25.0,
            ends=25.0, pieces=1)`.
        schedule: When buckets leave, and when parameters change: SEQUENTIAL, WFBP,
            DEAR, LOCAL, or another `Schedule`. The default, WFBP, is that of
            DistributedDataParallel: gradients are there when backward returns.
        preconditioner: A `KFAC` that preconditions the averages before the optimizer
            gets them. None, the default, leaves them as they are.
        levels: How many ranks share a host, and its link: they average densely among
            themselves, and only what a host has in common travels by the collective.
            Where ranks are not numbered host by host it is the ranks of every host, as
            many for each: ((0, 2), (1, 3)). None, the default, has `replicate` find it
            out. 1 exchanges among all ranks alike, wherever they are.
        outer: An `OuterSGD` that takes the mean of what the ranks did for a step of its
            own, where steps are exchanged. None, the default, takes the mean itself.

    Raises:
        ValueError: A part refuses its own fields when it is made. Parts of the wrong
            kind, and such as do not go together, are refused by `replicate` and by
            `parse`.
    """

    collective: Collective | Auto = Dense()  # noqa: RUF009  (frozen: cannot be shared by mistake)
    fusion: Fusion = BySize()  # noqa: RUF009
    schedule: Schedule = WFBP
    preconditioner: KFAC | None = None
    levels: int | tuple[tuple[int, ...], ...] | None = None
    outer: OuterSGD | None = None

    @property
    def exchange(self) -> Collective:
        """What averages a bucket: the collective, between hosts of several ranks."""
        assert not isinstance(self.collective, Auto), "it has a start"
        return by_levels(self.collective, self.levels)

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        given = [f"{name}={value!r}" for name, value in values if value is not None]
        return f"Scheme({', '.join(given)})"


def check(scheme: Scheme) -> Scheme:
    """The scheme itself; raises ValueError where a part of it has the wrong kind, or
    parts do not go together."""
    if isinstance(scheme.schedule, str):
        raise ValueError(
            f"Scheme(schedule={scheme.schedule!r}): it has to be a Schedule such as "
            "WFBP or DEAR; a recipe takes a name: recipe('oktopk', schedule='dear')"
        )
    outer, *wrapped = layers(scheme.collective)
    if any(isinstance(each, Auto) for each in wrapped):
        raise ValueError(
            f"{scheme.collective!r}: what auto decides on cannot be wrapped; use "
            "auto(lossy=True, warmup=160)"
        )
    check_fields(scheme)
    if isinstance(scheme.levels, tuple):
        _check_hosts(sum(map(len, scheme.levels)), scheme.levels)
    schedule, local = scheme.schedule, scheme.schedule.launch == "step"
    kfac = scheme.preconditioner is not None
    wrong = {
        f"levels={scheme.levels}: the number of ranks on each host, 1 or more": (
            isinstance(scheme.levels, int) and scheme.levels < 1
        ),
        f"{scheme!r}: auto begins as wfbp and decides on the schedule itself, and "
        "cannot be combined with K-FAC: leave both out": (
            isinstance(outer, Auto) and (kfac or schedule != WFBP)
        ),
        f"outer={scheme.outer!r} makes a step of what steps did, and {schedule!r} "
        "exchanges gradients: use Schedule('step', every=30)": (
            scheme.outer is not None and not local
        ),
        f"{scheme.fusion!r} times single steps, and those of a round are not "
        "alike: use a fusion that is not searched for, such as BySize()": (
            schedule.rounds and isinstance(scheme.fusion, Search)
        ),
        f"{scheme!r}: K-FAC is made of averaged gradients, which are not to be had "
        "where steps are exchanged: use WFBP or DEAR": local and kfac,
        f"{scheme!r}: the steps that are exchanged have the optimizer's momentum: "
        "leave out momentum_correction": (local and takes_momentum_over(scheme)),
    }
    refuse(wrong)
    return scheme


def undecided(scheme: Scheme) -> Auto | None:
    """The hyper-parameters of a scheme that is still to be chosen; None of others."""
    own = scheme.collective
    return own if isinstance(own, Auto) else None


def takes_momentum_over(scheme: Scheme) -> bool:
    """Whether a scheme computes the optimizer's momentum, or may some day."""
    own = scheme.collective
    if isinstance(own, Auto):
        return own.momentum_correction
    return uses_optimizer_momentum(own)


def knows_optimizer(scheme: Scheme) -> bool:
    """Whether training has to know the optimizer, beyond the moments of its steps."""
    schedule = scheme.schedule
    return (
        schedule.update == "forward"
        or schedule.launch == "step"
        or scheme.preconditioner is not None
        or takes_momentum_over(scheme)
        or undecided(scheme) is not None
    )


def with_levels(scheme: Scheme, members: Members) -> Scheme:
    """The scheme on hosts that have these ranks.

    Hosts of unlike numbers are divided: 4 and 2 ranks are three hosts of 2. Where that
    leaves every rank alone, there is a warning. Raises ValueError where the scheme
    itself says otherwise, and that cannot be.
    """
    size, found = sum(map(len, members)), alike(members)
    if scheme.levels is None:
        counts = [len(host) for host in members]
        if found == 1 and 1 < max(counts) < size:
            warnings.warn(
                f"hosts of {', '.join(map(str, counts))} ranks: no number divides "
                "these, so each rank sends over its host's link for itself; start "
                "as many ranks on every host, or say levels=1 to have it so",
                stacklevel=2,
            )
        whole = found in (1, size) or found == members[:1]
        return scheme if whole else replace(scheme, levels=found)
    _check_hosts(size, scheme.levels)
    if isinstance(found, tuple) and scheme.levels == len(found[0]):
        return replace(scheme, levels=found)
    return scheme


def _check_hosts(size: int, hosts: Hosts) -> None:
    try:
        rows(size, hosts)
    except ValueError as error:
        raise ValueError(
            f"levels={hosts}: {error}; leave levels out, or use levels=1"
        ) from None


def start(scheme: Scheme) -> Scheme:
    """What to train with until there is a decision; the scheme itself if it is one.

    Where `Auto` is lossy it is a sparse collective, of which everything travels:
    checkpoints then have room for the residuals of the scheme that is decided on.
    """
    auto = undecided(scheme)
    if auto is None:
        return scheme
    return replace(scheme, collective=TopK(1.0) if auto.lossy else Dense())
