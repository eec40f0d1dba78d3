"""Schemes: what is exchanged, in which buckets, when, and what is made of it.

A scheme's name is its constructor call, so the command line, the log, the record and
the test say the same: `parse(repr(scheme)) == scheme`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, cast

from gradtide import collectives
from gradtide.collectives import COLLECTIVES, PARTITIONS, WRAPPERS, Auto, Dense
from gradtide.collectives.corrected import takes_over
from gradtide.core.fields import check_fields
from gradtide.core.payload import Collective, layers, traits
from gradtide.core.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.fusion import FUSIONS, BySize, Fusion
from gradtide.kfac import DISTRIBUTIONS, KFAC
from gradtide.selectors import SELECTORS


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

    Raises:
        ValueError: A part refuses its own fields when it is made. Parts of the wrong
            kind, and such as do not go together, are refused by `replicate` and by
            `parse`.
    """

    collective: Collective = Dense()  # noqa: RUF009  (frozen: cannot be shared by mistake)
    fusion: Fusion = BySize()  # noqa: RUF009
    schedule: Schedule = WFBP
    preconditioner: KFAC | None = None

    def __repr__(self) -> str:
        named = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)]
        if self.preconditioner is None:  # as most have none
            named.pop()
        return f"Scheme({', '.join(named)})"


_WIRED = {"": Dense(), "-bf16": Dense("bf16"), "-fp16": Dense("fp16")}
_SCHEDULES = {"sequential": SEQUENTIAL, "wfbp": WFBP, "dear": DEAR}
_SUFFIXES = {"": WFBP, "-dear": DEAR}
_SPARSE: dict[str, Collective] = {
    "topk": collectives.TopK(),
    "gtopk": collectives.GTopK(),
    "topka2a": collectives.TopKA2A(),
    "topkdsa": collectives.TopkDSA(),
    "oktopk": collectives.OkTopk(),
    "micro": collectives.Agreed(partition=collectives.Even()),
    "exdyna": collectives.Agreed(partition=collectives.Dynamic()),
    "deft": collectives.Agreed(partition=collectives.ByNorm()),
    "leader": collectives.Leader(),
    "powersgd": collectives.PowerSGD(),
    "acpsgd": collectives.ACPSGD(),
}
# Densities that `warmup` steps go through in equal shares, as far as they are above the
# collective's own: dense first, when gradients change fastest.
RAMP = (1.0, 0.25, 0.1, 0.05)
# Where steps are exchanged afterwards: times the collective's own, after twice as many
# dense shares. Averaged gradients learn better than steps of which much is sent.
STEPS_RAMP = (4, 2)
# Few messages: sparse ones are so short that starting them is what takes time.
_LARGE = BySize(25.0, ends=25.0, pieces=1)

# Ranks that take turns to look for an entry send few of their own: steps wait long.
_LATE = Schedule("step", gain=1.4)
_LOCAL = {"micro": _LATE, "exdyna": _LATE, "deft": _LATE}
RECIPES: dict[str, Scheme] = {
    "auto": Scheme(Auto()),
    **{
        f"{name}{suffix}": Scheme(collective, schedule=schedule)
        for suffix, collective in _WIRED.items()
        for name, schedule in _SCHEDULES.items()
    },
    **{
        f"{name}{suffix}": Scheme(collective, _LARGE, schedule)
        for name, collective in _SPARSE.items()
        for suffix, schedule in _SUFFIXES.items()
    },
    **{
        f"{name}-local": Scheme(collective, _LARGE, _LOCAL.get(name, LOCAL))
        for name, collective in _SPARSE.items()
    },
    **{
        f"{name}_kfac{suffix}": Scheme(
            schedule=schedule, preconditioner=KFAC(cast(Any, name))
        )
        for name in DISTRIBUTIONS
        for suffix, schedule in _SUFFIXES.items()
    },
}

NAMES: dict[str, Any] = {
    **{cls.__name__: cls for cls in (*COLLECTIVES, *WRAPPERS, *PARTITIONS, *SELECTORS)},
    **{cls.__name__: cls for cls in (Auto, Scheme, Schedule, *FUSIONS, KFAC)},
    **{name.upper(): schedule for name, schedule in _SCHEDULES.items()},
    "LOCAL": LOCAL,
}


def parse(text: str) -> Scheme:
    """Return the scheme that a text stands for: a recipe's name or a constructor call.

    A call may use constants, the names of the parts that `gradtide` exports, and dotted
    paths to frozen dataclasses of modules that the program has imported. A text may
    come out of a checkpoint, so it imports and runs nothing else. A recipe may be
    called with other hyper-parameters of its collective, or of its K-FAC:
    "oktopk(0.001)", "spd_kfac(damping=0.01)"; `warmup=N` has it begin with N steps at
    higher densities, and `corrected=True` has it compute the optimizer's momentum
    before selection. A collective alone has the default fusion and schedule.

    Args:
        text: The text, of at most 20000 characters and 30 pairs of brackets.

    Returns:
        The scheme, whose parts are of the right kind and go together.

    Raises:
        ValueError: The text is no scheme. The message says what is wrong, and what is
            known or meant.
    """
    if len(text) > LONGEST or text.count("(") + text.count("[") > BRACKETS:
        raise ValueError(
            f"scheme {_short(text)}: at most {LONGEST} characters and {BRACKETS} pairs "
            "of brackets; build a Scheme(...) in Python instead"
        )
    try:
        tokens = _tokens(text)
        value = _value(tokens)
        if tokens != [""]:
            raise ValueError(f"{_short(tokens[-1])} behind its end: {_known()}")
        if hasattr(value, "reduce") and not isinstance(value, type):
            value = Scheme(value)
        if not isinstance(value, Scheme):
            raise ValueError(f"not a scheme: {_known()}")
        return check(value)
    except Exception as error:  # a constructor of the user's may raise anything
        raise ValueError(f"scheme {_short(text)}: {str(error)[:2000]}") from error


def check(scheme: Scheme) -> Scheme:
    """The scheme itself; raises ValueError where a part of it has the wrong kind, or
    parts do not go together."""
    check_fields(scheme)
    outer, *wrapped = layers(scheme.collective)
    kfac = scheme.preconditioner is not None
    if any(traits(each).undecided for each in wrapped):
        raise ValueError(
            f"{scheme.collective!r}: what auto decides on cannot be wrapped; use "
            "auto(lossy=True, warmup=160)"
        )
    if traits(outer).undecided and (kfac or scheme.schedule != WFBP):
        raise ValueError(
            f"{scheme!r}: auto begins as wfbp and decides on the schedule itself, and "
            "cannot be combined with K-FAC: leave both out"
        )
    local = scheme.schedule.launch == "step"
    if local and kfac:
        raise ValueError(
            f"{scheme!r}: K-FAC is made of averaged gradients, which are not to be had "
            "where steps are exchanged: use WFBP or DEAR"
        )
    if local and takes_over(scheme.collective):
        raise ValueError(
            f"{scheme!r}: the steps that are exchanged have the optimizer's momentum: "
            "leave out corrected"
        )
    return scheme


def undecided(scheme: Scheme) -> Auto | None:
    """The hyper-parameters of a scheme that is still to be chosen; None of others."""
    own = scheme.collective
    return cast(Auto, own) if traits(own).undecided else None


def start(scheme: Scheme) -> Scheme:
    """What to train with until there is a decision; the scheme itself if it is one.

    A lossy `Auto` keeps its place: checkpoints then have room for the residuals of the
    scheme that is decided on.
    """
    auto = undecided(scheme)
    return scheme if auto is None or auto.lossy else replace(scheme, collective=Dense())


def knows_optimizer(scheme: Scheme) -> bool:
    """Whether training has to know the optimizer, beyond the moments of its steps."""
    schedule = scheme.schedule
    return (
        schedule.update == "forward"
        or schedule.launch == "step"
        or scheme.preconditioner is not None
        or takes_over(scheme.collective)
        or undecided(scheme) is not None
    )


# Characters, room for the cuts of thousands of tensors; and brackets that are opened.
LONGEST, BRACKETS = 20_000, 30
_CONSTANTS = {"None": None, "True": True, "False": False}
_TOKEN = re.compile(
    r"""\s*(?:[a-z_][\w.-]*|-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"""
    r"""|'[^'\\]*'|"[^"\\]*"|[][(),=]|$|(?P<other>.))""",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)


def _tokens(text: str) -> list[str]:
    """Names, constants and marks in `text`, from its end, which is an empty one, on."""
    found = []
    for match in _TOKEN.finditer(text.strip()):
        if match["other"]:
            raise ValueError(f"{match['other']!r} is not allowed in a scheme")
        found.append(match[0].strip())
    return found[::-1]


def _value(tokens: list[str]) -> Any:
    """What the next of `tokens` stand for; they are taken off."""
    token = tokens.pop()
    if token in ("(", "["):
        items, named, closed = _arguments(tokens, ")" if token == "(" else "]")
        if named:
            raise ValueError(f"{next(iter(named))!r} names no argument of a call")
        alone = token == "(" and len(items) == 1 and not closed
        return items[0] if alone else tuple(items)
    if not token or token in ")],=":
        raise ValueError(f"{token!r} where a value should be: {_known()}")
    if token[0] in "'\"":
        return token[1:-1]
    if token[0] in "-.0123456789":
        return int(token) if token.lstrip("-").isdigit() else float(token)
    if token in _CONSTANTS:
        return _CONSTANTS[token]
    if tokens[-1] != "(":
        return RECIPES[token] if token in RECIPES else _part(token)
    tokens.pop()
    args, named, _ = _arguments(tokens, ")")
    if token in RECIPES:
        return _adjust(RECIPES[token], args, named)
    return _part(token)(*args, **named)


def _arguments(tokens: list[str], end: str) -> tuple[list[Any], dict[str, Any], bool]:
    """Those up to `end`, in order and by name, and whether a comma is behind them."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    comma = True
    while tokens[-1] != end:
        if not comma:
            raise ValueError(f"{_short(tokens[-1])} where a comma or {end!r} should be")
        if tokens[-2:-1] == ["="]:
            name = tokens.pop()
            tokens.pop()
            if name in named:
                raise ValueError(f"{_short(name)} is given twice")
            named[name] = _value(tokens)
        elif named:
            raise ValueError(f"an argument without a name behind {[*named][-1]!r}=...")
        else:
            args.append(_value(tokens))
        comma = tokens[-1] == ","
        if comma:
            tokens.pop()
    tokens.pop()
    return args, named, comma


def _part(name: str) -> Any:
    """What is known by a name, without dots or with."""
    if name in NAMES:
        return NAMES[name]
    if "." in name:
        return _loaded(name)
    near = get_close_matches(name, [*RECIPES, *NAMES], cutoff=0.75)
    if near:
        raise ValueError(f"{_short(name)} is not known: did you mean {near[0]!r}?")
    raise ValueError(f"{_short(name)} is not known: {_known()}")


def _adjust(recipe: Scheme, args: list[Any], named: dict[str, Any]) -> Scheme:
    """The recipe with other hyper-parameters: of its preconditioner if it has one,
    spd_kfac(damping=0.01), otherwise of its collective, oktopk(0.001).

    With `warmup=N` the first N steps go down to the collective's density by RAMP; where
    steps are exchanged, two thirds are dense and the others go down by STEPS_RAMP. With
    `corrected=True` the optimizer's momentum is computed before selection.
    """
    kfac = recipe.preconditioner
    if kfac is not None:
        if args:
            raise TypeError("K-FAC's hyper-parameters are given by name")
        return replace(recipe, preconditioner=replace(kfac, **named))
    names = [f.name for f in fields(cast(Any, recipe.collective))]
    if len(args) > len(names):
        raise TypeError(f"{recipe.collective!r} has {len(names)} hyper-parameters")
    changes = {**dict(zip(names, args, strict=False)), **named}
    steps = 0 if "warmup" in names else changes.pop("warmup", 0)
    corrected = "corrected" not in names and changes.pop("corrected", False)
    collective = replace(cast(Any, recipe.collective), **changes)
    if not isinstance(corrected, bool):
        raise ValueError(f"corrected={corrected!r}: True or False")
    if corrected and "density" not in names:
        raise TypeError(f"corrected=True: {collective!r} selects nothing")
    if corrected:
        collective = collectives.Corrected(collective)
    if steps != 0:
        own = getattr(collective, "density", 1.0)
        ramp = tuple(d for d in RAMP if d > own) or (1.0,)
        if recipe.schedule.launch == "step":
            sparse = [times * own for times in STEPS_RAMP if times * own < 1]
            ramp = (*[1.0] * 2 * len(sparse), *sparse) or (1.0,)
        if type(steps) is not int or steps < len(ramp):
            raise ValueError(
                f"warmup={steps!r}: a number of steps, {len(ramp)} or more, for "
                f"densities {ramp}"
            )
        collective = collectives.Warmup(collective, steps // len(ramp), ramp)
    return replace(recipe, collective=collective)


def _loaded(path: str) -> type:
    """A frozen dataclass of the user's own, by its dotted path; nothing is imported."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), "__dict__", {}).get(name)
    params = getattr(found, "__dataclass_params__", None)
    if isinstance(found, type) and params and params.frozen:
        return found
    raise ValueError(
        f"{_short(path)} is not a frozen dataclass of a module that this program has "
        "imported, and a scheme's text imports nothing"
    )


def _short(text: str) -> str:
    return repr(text if len(text) < 100 else f"{text[:100]}...")


def _known() -> str:
    return (
        f"use one of {', '.join(RECIPES)}, or a constructor call from "
        f"{', '.join(n for n in NAMES)} such as Scheme(Dense(), fusion=BySize(10.0))"
    )
