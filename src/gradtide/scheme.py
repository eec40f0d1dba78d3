"""Schemes: what is exchanged, in which buckets, when, and what is made of it.

A scheme's name is its constructor call, so the command line, the log, the record and
the test say the same: `parse(repr(scheme)) == scheme`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

from gradtide.bucket import Collective, layers, traits
from gradtide.collectives import (
    ACPSGD,
    COLLECTIVES,
    PARTITIONS,
    WRAPPERS,
    Agreed,
    Auto,
    ByNorm,
    Corrected,
    Dense,
    Dynamic,
    Even,
    GTopK,
    Leader,
    OkTopk,
    PowerSGD,
    TopK,
    TopKA2A,
    TopkDSA,
    Warmup,
)
from gradtide.collectives.corrected import takes_over
from gradtide.fields import check_fields
from gradtide.fusion import FUSIONS, BySize, Fusion
from gradtide.kfac import DISTRIBUTIONS, KFAC
from gradtide.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.select import SELECTORS


@dataclass(frozen=True)
class Scheme:
    """A complete way to average gradients; `collective` is applied to every bucket.

    With a `preconditioner` the optimizer gets what that makes of the averages.
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
    "topk": TopK(),
    "gtopk": GTopK(),
    "topka2a": TopKA2A(),
    "topkdsa": TopkDSA(),
    "oktopk": OkTopk(),
    "micro": Agreed(partition=Even()),
    "exdyna": Agreed(partition=Dynamic()),
    "deft": Agreed(partition=ByNorm()),
    "leader": Leader(),
    "powersgd": PowerSGD(),
    "acpsgd": ACPSGD(),
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
    """The scheme that a recipe's name or a constructor call stands for.

    A call may use constants, the names in NAMES, and dotted paths to frozen dataclasses
    of modules that the program has imported: text, which may come out of a checkpoint,
    imports nothing. A bare collective stands for a scheme with default fusion and
    schedule; a recipe may be called with hyper-parameters of its preconditioner if it
    has one, otherwise with those of its collective, `warmup`, a number of steps
    (RAMP), and `corrected`. Raises ValueError naming what is wrong and what
    is known.
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
    """The scheme itself; raises ValueError where a part of it has the wrong kind."""
    for part in (scheme.collective, scheme.fusion):
        if is_dataclass(part) and not isinstance(part, type):
            check_fields(part)
    for part, method in ((scheme.collective, "reduce"), (scheme.fusion, "__call__")):
        if isinstance(part, type) or not hasattr(part, method):
            raise ValueError(f"{part!r} in {scheme!r} has no method {method!r}")
    if not isinstance(scheme.schedule, Schedule):
        raise ValueError(
            f"{scheme.schedule!r} is not a Schedule (SEQUENTIAL, WFBP, DEAR, LOCAL)"
        )
    _check_auto(scheme)
    if not isinstance(scheme.preconditioner, KFAC | None):
        raise ValueError(f"{scheme.preconditioner!r} is not a KFAC(...) or None")
    check_fields(scheme.schedule)
    if scheme.preconditioner is not None:
        check_fields(scheme.preconditioner)
    if scheme.schedule.launch == "step":
        _check_local(scheme)
    return scheme


def _check_auto(scheme: Scheme) -> None:
    """`auto` decides on everything itself."""
    outer, *wrapped = layers(scheme.collective)
    if any(traits(each).undecided for each in wrapped):
        raise ValueError(
            f"{scheme.collective!r}: what auto decides on cannot be wrapped; use "
            "auto(lossy=True, warmup=160)"
        )
    alone = scheme.schedule == WFBP and scheme.preconditioner is None
    if traits(outer).undecided and not alone:
        raise ValueError(
            f"{scheme!r}: auto begins as wfbp and decides on the schedule itself, and "
            "cannot be combined with K-FAC: leave both out"
        )


def _check_local(scheme: Scheme) -> None:
    """What is exchanged are steps, not gradients."""
    if scheme.preconditioner is not None:
        raise ValueError(
            f"{scheme!r}: K-FAC is made of averaged gradients, which are not to be had "
            "where steps are exchanged: use WFBP or DEAR"
        )
    if takes_over(scheme.collective):
        raise ValueError(
            f"{scheme!r}: the steps that are exchanged have the optimizer's momentum: "
            "leave out corrected"
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
    """The recipe with other hyper-parameters of its collective: oktopk(0.001).

    Or of its preconditioner: spd_kfac(damping=0.01). With `warmup=N` the first
    N steps go down to the collective's density by RAMP. With `corrected=True` the
    optimizer's momentum is computed before selection, and all N steps are dense:
    where much is sent, masking leaves little of the momentum. Where steps are exchanged
    afterwards two thirds are dense, and the others go down by STEPS_RAMP.
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
        collective = Corrected(collective)
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
        collective = Warmup(collective, steps // len(ramp), ramp)
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
