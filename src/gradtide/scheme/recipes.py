"""Recipes: names of schemes, and the one grammar in which they are varied.

name(density_or_rank, wire=, schedule=, every=, warmup=, momentum_correction=, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, cast

from gradtide import collectives
from gradtide.core.outer import OuterSGD
from gradtide.core.payload import Collective, density_of, traits
from gradtide.core.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.fusion import BySize, Fusion
from gradtide.kfac import DISTRIBUTIONS, KFAC
from gradtide.scheme.auto import Auto
from gradtide.scheme.config import Scheme, check
from gradtide.scheme.table import Table

SCHEDULES = {"sequential": SEQUENTIAL, "wfbp": WFBP, "dear": DEAR, "local": LOCAL}
SPARSE: dict[str, Callable[[], Collective]] = {
    "topk": lambda: collectives.TopK(),
    "gtopk": lambda: collectives.GTopK(),
    "topka2a": lambda: collectives.TopKA2A(),
    "topkdsa": lambda: collectives.TopkDSA(),
    "oktopk": lambda: collectives.OkTopk(),
    "micro": lambda: collectives.PartitionedTopK(partition=collectives.Even()),
    "exdyna": lambda: collectives.PartitionedTopK(partition=collectives.Dynamic()),
    "deft": lambda: collectives.PartitionedTopK(partition=collectives.ByNorm()),
    "cltk": lambda: collectives.CLTk(),
    "tiledtopk": lambda: collectives.TiledTopK(),
    "arctopk": lambda: collectives.ARCTopK(),
    "covap": lambda: collectives.COVAP(),
    "demo": lambda: collectives.DeMo(),
    "powersgd": lambda: collectives.PowerSGD(),
    "acpsgd": lambda: collectives.ACPSGD(),
}
# Few messages: sparse ones are so short that starting them is what takes time.
_LARGE = BySize(25.0, ends=25.0, pieces=1)
# Ranks that take turns to look for an entry send few of their own: steps wait long.
_LOCAL = dict.fromkeys(("micro", "exdyna", "deft"), replace(LOCAL, gain=1.4))
# DiLoCo's outer optimizer (Douillard et al., arXiv:2311.08105).
_NESTEROV = OuterSGD(0.7, momentum=0.9, nesterov=True)
_ROUNDS: dict[str, Callable[[], Scheme]] = {
    # Lin et al. (Don't use large mini-batches, use local SGD, ICLR 2020) have 16 steps.
    "local_sgd": lambda: Scheme(schedule=Schedule("step", every=16)),
    "diloco": lambda: Scheme(schedule=Schedule("step", every=30), outer=_NESTEROV),
    # Douillard et al., arXiv:2501.18512: 4 bits; half of the own parameters is kept.
    "streaming_diloco": lambda: Scheme(
        collectives.Dense("e3m0"),
        schedule=Schedule("step", every=30, delay=5, fragments=3, mix=0.5),
        outer=_NESTEROV,
    ),
    # Sarfi et al., arXiv:2508.15706: of 64 x 64 entries 64 in 2 bits, outer rate 1.
    "sparseloco": lambda: Scheme(
        collectives.TiledTopK(1 / 64, wire="2bit"),
        _LARGE,
        Schedule("step", every=30, decay=0.95),
    ),
}


def _sparse(make: Callable[[], Collective]) -> Callable[[], Scheme]:
    return lambda: Scheme(make(), _LARGE)


def _kfac(name: Any) -> Callable[[], Scheme]:
    return lambda: Scheme(preconditioner=KFAC(name))


RECIPES: Mapping[str, Scheme] = Table(
    {
        "auto": lambda: Scheme(Auto()),
        "sequential": lambda: Scheme(schedule=SEQUENTIAL),
        "wfbp": lambda: Scheme(schedule=WFBP),
        "dear": lambda: Scheme(schedule=DEAR),
        **{name: _sparse(make) for name, make in SPARSE.items()},
        **_ROUNDS,
        **{f"{name}_kfac": _kfac(name) for name in DISTRIBUTIONS},
    }
)

# Densities that `warmup` steps go through in equal shares, as far as they are above the
# collective's own: dense first, when gradients change fastest.
RAMP = (1.0, 0.25, 0.1, 0.05)
# Where steps are exchanged afterwards: times the collective's own, after twice as many
# dense shares. Averaged gradients learn better than steps of which much is sent.
STEPS_RAMP = (4, 2)


def recipe(
    name: str,
    /,
    *args: Any,
    schedule: Schedule | str | None = None,
    warmup: int = 0,
    momentum_correction: bool = False,
    levels: int | tuple[tuple[int, ...], ...] | None = None,
    every: int | None = None,
    delay: int | None = None,
    fragments: int | None = None,
    outer: OuterSGD | None = None,
    fusion: Fusion | None = None,
    **named: Any,
) -> Scheme:
    """Return the scheme of a recipe, with other hyper-parameters.

    A text is the same call: `recipe("oktopk", 0.01, schedule="dear", warmup=160)` is
    `parse("oktopk(0.01, schedule='dear', warmup=160)")`.

    Args:
        name: The recipe: `auto`, `sequential`, `wfbp`, `dear`, `topk`, `oktopk`, ...;
            "Schemes" in the documentation says which is for what.
        *args: Hyper-parameters of the recipe's collective, in their order: the density
            of sparse recipes, the rank of low-rank ones, the wire of dense ones.
        schedule: "sequential", "wfbp", "dear" or "local", or a `Schedule`. None, the
            default, leaves the recipe's own: "wfbp". "local" is LOCAL, for `micro`,
            `exdyna` and `deft` with a `gain` of 1.4; LOCAL itself has none.
            `sequential`, `wfbp` and `dear` are schedules themselves, and take none.
        warmup: With how many steps at higher densities to begin: in equal shares 1
            (dense), .25, .1 and .05, as far as these are above the recipe's density.
            Under "local" two thirds are dense, and the others have four times and twice
            the density. Before rounds of several steps, and with momentum correction,
            all of them are dense. The default, 0, is none.
        momentum_correction: Whether the optimizer's momentum is computed before
            selection: `MomentumCorrection`.
        levels: How many ranks share a host, see `Scheme`. None, the default, has
            `replicate` find it out; 1 exchanges among all ranks alike.
        every: How many steps each rank makes alone before what they did is exchanged,
            for recipes of rounds (`diloco`, ...) and for others with schedule="local".
            None, the default, leaves the recipe's own. Above 1, what "local" does for
            steps of Adam (a gain, steps ahead) is left out.
        delay: How many steps later that is applied, see `Schedule`. None, the default,
            leaves the recipe's own.
        fragments: In how many fragments of the model in turn, see `Schedule`. None, the
            default, leaves the recipe's own.
        outer: An `OuterSGD` for the mean of what was done. None, the default, leaves
            the recipe's own.
        fusion: Which gradients travel in one bucket, such as `BySize(5.0)`. None, the
            default, leaves the recipe's own.
        **named: Hyper-parameters of the recipe's collective by name, such as `density`,
            `wire` or `select`; of K-FAC recipes those of `KFAC`.

    Returns:
        The scheme, whose parts are of the right kind and go together.

    Raises:
        ValueError: There is no such recipe, it has no such hyper-parameter, or a value
            is outside its range.
    """
    if name not in RECIPES:
        raise ValueError(_unknown(name))
    scheme = replace(RECIPES[name], levels=levels)  # no recipe has levels of its own
    if fusion is not None:
        scheme = replace(scheme, fusion=fusion)
    part = "collective" if scheme.preconditioner is None else "preconditioner"
    own: Any = getattr(scheme, part)
    names = [field.name for field in fields(own)]
    if schedule is not None:
        scheme = replace(scheme, schedule=_schedule(name, schedule))
    turns = {"every": every, "delay": delay, "fragments": fragments}
    scheme = _in_rounds(scheme, {k: v for k, v in turns.items() if v is not None})
    if outer is not None:
        scheme = replace(scheme, outer=outer)
    if undecided := isinstance(own, Auto):  # it is handed on to what is decided on
        named |= {"warmup": warmup, "momentum_correction": momentum_correction}
    changes = _changes(name, names, args, named)
    if args and scheme.preconditioner is not None:
        raise ValueError(f"{name}: K-FAC's hyper-parameters are given by name")
    scheme = replace(scheme, **{part: replace(own, **changes)})
    return check(scheme if undecided else prepared(scheme, warmup, momentum_correction))


def prepared(
    scheme: Scheme, warmup: int = 0, momentum_correction: bool = False
) -> Scheme:
    """Return a scheme with a recipe's wrappers around its collective, see `recipe`."""
    collective = cast(Any, scheme.collective)
    if not isinstance(momentum_correction, bool):
        raise ValueError(f"momentum_correction={momentum_correction!r}: True or False")
    if momentum_correction and density_of(collective) is None:
        raise ValueError(f"momentum_correction=True: {collective!r} selects nothing")
    own = density_of(collective) or 1.0
    steps = scheme.schedule.launch == "step"
    ramp: tuple[float, ...] = ()
    if momentum_correction:
        collective = collectives.MomentumCorrection(collective)
    elif not steps:
        ramp = tuple(d for d in RAMP if d > own)
    elif not scheme.schedule.rounds:
        sparse = [times * own for times in STEPS_RAMP if times * own < 1]
        ramp = (*[1.0] * 2 * len(sparse), *sparse)
    ramp = ramp or (1.0,)
    if warmup != 0:
        if type(warmup) is not int or warmup < len(ramp):
            raise ValueError(
                f"warmup={warmup!r}: a number of steps, {len(ramp)} or more, for "
                f"densities {ramp}"
            )
        if traits(collective).dense and not steps:
            raise ValueError(f"warmup={warmup}: {collective!r} is dense at all times")
        collective = collectives.Warmup(collective, warmup // len(ramp), ramp)
    return replace(scheme, collective=collective)


def _schedule(name: str, wanted: Schedule | str) -> Schedule:
    """The schedule that a recipe gets; by "local" its own variant, if it has one."""
    if name in SCHEDULES:
        raise ValueError(
            f"{name}(schedule={wanted!r}): {name} is a schedule; the dense recipes are "
            "sequential, wfbp and dear, and local is for sparse ones"
        )
    found = SCHEDULES.get(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(found, Schedule):
        near = get_close_matches(str(wanted)[:100], SCHEDULES, n=1)
        told = f"did you mean {near[0]!r}? Use " if near else "use "
        raise ValueError(
            f"schedule={str(wanted)[:100]!r}: {told}{', '.join(map(repr, SCHEDULES))} "
            "or a Schedule"
        )
    return _LOCAL.get(name, LOCAL) if wanted == "local" else found


def _in_rounds(scheme: Scheme, turns: dict[str, Any]) -> Scheme:
    """The scheme with `every`, `delay` and `fragments`, as far as they are given."""
    if not turns:
        return scheme
    own = scheme.schedule
    if own.launch != "step":
        raise ValueError(
            f"{next(iter(turns))}= is for recipes of rounds, {', '.join(_ROUNDS)}, or "
            "for sparse ones with schedule='local'"
        )
    if turns.get("every", 1) > 1 and not own.rounds:
        own = Schedule("step")
    return replace(scheme, schedule=replace(own, **turns))


def _changes(
    name: str, names: Sequence[str], args: Sequence[Any], named: dict[str, Any]
) -> dict[str, Any]:
    """Hyper-parameters by name; raises ValueError for too many, or unknown ones."""
    unknown = [key for key in named if key not in names]
    if unknown or len(args) > len(names):
        known = [*names]
        if name in SPARSE or name in _ROUNDS:
            known += ["schedule", "warmup", "momentum_correction"]
            known += ["every", "delay", "fragments", "outer"]
        known += ["fusion", "levels"]
        wrong = repr(unknown[0]) if unknown else f"{len(args)} values without a name"
        near = meant(unknown[0], known, "") if unknown else ""
        told = f"{name} takes {', '.join(known)}, and not {wrong}"
        raise ValueError(f"{told}: {near}" if near else told)
    given = dict(zip(names, args, strict=False))
    if twice := [key for key in given if key in named]:
        raise ValueError(f"{name}: {twice[0]!r} is given twice")
    return {**given, **named}


def _unknown(name: str) -> str:
    """Why there is no such recipe, and what is meant or known."""
    from gradtide.scheme.spelling import respelled

    if respelled(name) != name:
        return f"{name!r} is an old spelling: use {respelled(name)}"
    told = meant(name, RECIPES, f"use one of {', '.join(RECIPES)}")
    return f"{name!r} is no recipe: {told}"


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """The name that is likely to be meant, as a question; `otherwise` without one."""
    head = name.partition("-")[0]  # suffixes are not a part of names any more
    near = get_close_matches(name, known, cutoff=0.75) or [head]
    return f"did you mean {near[0]!r}?" if near[0] in known else otherwise
