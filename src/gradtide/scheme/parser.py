"""The text of a scheme: a recipe, or the constructor call that Python would have."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from gradtide import collectives
from gradtide.core.outer import OuterSGD
from gradtide.core.payload import Collective
from gradtide.core.schedule import Schedule
from gradtide.fusion import FUSIONS
from gradtide.kfac import KFAC
from gradtide.scheme.auto import Auto
from gradtide.scheme.config import Scheme, check
from gradtide.scheme.recipes import RECIPES, SCHEDULES, meant, recipe
from gradtide.scheme.table import Table
from gradtide.selectors import SELECTORS

_PARTS = (Auto, *SELECTORS, Scheme, Schedule, *FUSIONS, KFAC, OuterSGD)
_HERE: dict[str, Any] = {part.__name__: part for part in _PARTS}
_HERE |= {name.upper(): schedule for name, schedule in SCHEDULES.items()}
NAMES: Mapping[str, Any] = Table(
    {
        **{name: partial(getattr, collectives, name) for name in collectives.PARTS},
        **{name: partial(_HERE.get, name) for name in _HERE},
    }
)


def as_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme, or the one that a text stands for; raises ValueError for others."""
    if isinstance(scheme, Scheme):
        return check(scheme)
    if not isinstance(scheme, str):
        kind = type(scheme).__name__
        raise ValueError(
            f"the scheme is a {kind}: pass a text like 'dear', or a Scheme"
        )
    return parse(scheme)


def parse(text: str) -> Scheme:
    """Return the scheme that a text stands for: a recipe's name or a constructor call.

    A call may use constants, the names of the parts that `gradtide` exports, and dotted
    paths to frozen dataclasses of modules that the program has imported. A text may
    come out of a checkpoint, so it imports and runs nothing else. A recipe is called as
    `recipe` is from Python: "oktopk(0.01, schedule='dear', warmup=160)",
    "spd_kfac(damping=0.01)". A collective alone has the default fusion and schedule.

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
        if isinstance(value, Collective | Auto) and not isinstance(value, type):
            value = Scheme(value)
        if not isinstance(value, Scheme):
            raise ValueError(f"not a scheme: {_known()}")
        return check(value)
    except Exception as error:  # a constructor of the user's may raise anything
        raise ValueError(_refusal(text, error)) from error


def _refusal(text: str, error: Exception) -> str:
    """Why a text is no scheme; if it is one in an old spelling, what to write now."""
    from gradtide.scheme.spelling import respelled

    today = respelled(text) if len(text) <= OLD else text
    if today != text:
        parse(today)  # what else is wrong with it is said of today's spelling
        return f"scheme {text!r} is an old spelling: use {today}"
    return f"scheme {_short(text)}: {str(error)[:2000]}"


# Characters, room for the cuts of thousands of tensors; and brackets that are opened.
LONGEST, BRACKETS = 20_000, 30
OLD = 1000  # characters: up to here old spellings are looked for
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
        raise ValueError(f"{_called(token)} where a value should be: {_known()}")
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
        return recipe(token, *args, **named)
    return _part(token)(*args, **named)


def _arguments(tokens: list[str], end: str) -> tuple[list[Any], dict[str, Any], bool]:
    """Those up to `end`, in order and by name, and whether a comma is behind them."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    comma = True
    while tokens[-1] != end:
        if not comma:
            raise ValueError(
                f"{_called(tokens[-1])} where a comma or {end!r} should be"
            )
        if tokens[-2:-1] == ["="]:
            name = tokens.pop()
            tokens.pop()
            if name in named:
                raise ValueError(f"{_short(name)} is given twice")
            if _is_bare(tokens):
                raise ValueError(
                    f"{name}={_short(tokens[-1])[1:-1]} has lost its quotes: write "
                    f"{name}={_short(tokens[-1])}, and in a shell the whole scheme "
                    "between double quotes"
                )
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


def _is_bare(tokens: list[str]) -> bool:
    """Whether the next value is a word that nothing is called by."""
    word = tokens[-1]
    known = word in _CONSTANTS or word in RECIPES or word in NAMES or "." in word
    return word.isidentifier() and not known and tokens[-2:-1] != ["("]


def _called(token: str) -> str:
    return _short(token) if token else "the text ends"


def _part(name: str) -> Any:
    """What is known by a name, without dots or with."""
    if name in NAMES:
        return NAMES[name]
    if "." in name:
        return _loaded(name)
    if name == "ddp":
        raise ValueError(
            "'ddp' is torch's own class, which compare and race know as a contestant: "
            "use wfbp, which does what it does"
        )
    like = NAMES if name[:1].isupper() else RECIPES
    told = meant(name[:100], [*RECIPES, *NAMES], f"use one of {', '.join(like)}")
    raise ValueError(f"{_short(name)} is not known: {told}")


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
        f"use one of {', '.join(RECIPES)}, or a constructor call such as "
        "Scheme(Dense(), fusion=BySize(10.0)); `gradtide schemes --all` lists what "
        "there is"
    )
