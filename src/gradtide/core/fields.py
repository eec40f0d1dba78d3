"""What hyper-parameters can be: fields of their types, and what is refused of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Kind = tuple[str, Callable[[Any], bool]]
NUMBERS: dict[Any, Kind] = {
    bool: ("True or False", lambda x: isinstance(x, bool)),
    int: ("a whole number", lambda x: type(x) is int),
    float: ("a finite number", lambda x: type(x) in (int, float) and math.isfinite(x)),
    NoneType: ("None", lambda x: x is None),
}


def refuse(wrong: Mapping[str, bool]) -> None:
    """Raise ValueError with the first of these texts that is true."""
    for text, true in wrong.items():
        if true:
            raise ValueError(text)


def check_fields(value: Any) -> None:
    """Raise ValueError for a field, or one of a field's, that is not of its type.

    A field whose type is a protocol needs its methods. Fields of types that cannot be
    resolved are left alone: collectives of the user's own may have any.
    """
    owner: Any = type(value)
    for name, (kind, fits) in _kinds(owner).items():
        found = getattr(value, name)
        if not fits(found):
            raise ValueError(
                f"{type(value).__name__}({name}={found!r}): it has to be {kind}"
            )
        if is_dataclass(found):
            check_fields(found)


@cache  # to read annotations takes far longer than to compare with them
def _kinds(owner: type[Any]) -> dict[str, Kind]:
    """What each field of a dataclass can be; none, if its types cannot be resolved."""
    try:
        hints = get_type_hints(owner)
    except (NameError, TypeError):
        return {}
    return {field.name: _kind(hints[field.name]) for field in fields(owner)}


def _kind(hint: Any) -> Kind:
    """What a type is called in plain words, and whether a value is of it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in NUMBERS:
        return NUMBERS[hint]
    if origin is Literal:
        return " or ".join(map(repr, args)), lambda x: x in args
    if origin in (Union, UnionType):
        kinds = [_kind(arg) for arg in args]
        names = " or ".join(name for name, _ in kinds)
        return names, lambda x: any(fits(x) for _, fits in kinds)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        name, fits = _kind(args[0])
        named = f"a tuple of {name} each"
        return named, lambda x: isinstance(x, tuple) and all(map(fits, x))
    if getattr(hint, "_is_protocol", False):
        own = [
            name
            for name, x in vars(hint).items()
            if callable(x) and (name == "__call__" or not name.startswith("_"))
        ]
        words = f"a {hint.__name__} such as a constructor makes, with {', '.join(own)}"
        return (
            words,
            lambda x: (
                not isinstance(x, type)
                and all(callable(getattr(x, n, None)) for n in own)
            ),
        )
    if isinstance(hint, type) and origin is None:  # 3.10 says so of generics
        return f"a {hint.__name__}", lambda x: isinstance(x, hint)
    return "", lambda _: True
