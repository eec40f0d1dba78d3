"""What a profile writes and a planner reads: JSON that says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

VERSION = 1
LEVELS = 8  # of lists and objects within each other
LARGEST = 1e18  # of a number in a file, whatever it means

T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """A kind of file: what users call it, and what it says that it is."""

    noun: str  # as in `gradtide profile NOUN`, which makes one
    format: str

    def save(self, path: Path, content: Any) -> None:
        """Write a dataclass as JSON."""
        path.write_text(dumps(self.format, asdict(content)), "utf-8")

    def read(self, path: Path) -> dict[str, Any]:
        """What was saved; `ValueError` says what is wrong with the file."""
        found = read_json(path, self.noun)
        if not isinstance(found, dict) or found.pop("format", None) != self.format:
            raise ValueError(f"{path} is no {self.format}: {self.remedy(path)}")
        if (version := found.pop("version", None)) != VERSION:
            raise ValueError(
                f"{path} has version {version} of the format, this gradtide reads "
                f"{VERSION}: {self.remedy(path)}"
            )
        return found

    def remedy(self, path: Path) -> str:
        return f"make one with `gradtide profile {self.noun} --out {path}`"


def dumps(format: str, content: Mapping[str, Any]) -> str:
    """JSON that says what it is."""
    document = {"format": format, "version": VERSION, **content}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_json(path: Path, noun: str) -> Any:
    """What a file holds; `ValueError` if it cannot be read or is not JSON."""
    nested = f"{path} is nested deeper than a {noun} ever is: name another file"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the {noun} {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(nested) from None
    if _deeper(found, LEVELS):
        raise ValueError(nested)
    return found


def _deeper(found: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than so many levels."""
    if not isinstance(found, dict | list):
        return False
    inside = found.values() if isinstance(found, dict) else found
    return not levels or any(_deeper(x, levels - 1) for x in inside)


def decode(kind: type[T], found: Any) -> T:
    """A dataclass from what `asdict` and JSON have made of it.

    Fields that are missing have their defaults. Raises ValueError for a number that is
    none, and what Python does where `found` has no fields, or others.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _field(name, hints.get(name), x) for name, x in found.items()})


def _field(name: str, hint: Any, found: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if found is None else _field(name, args[0], found)
    if origin is tuple:
        return tuple(_field(name, args[0], x) for x in found)
    if origin is Mapping:
        return {key: _field(f"{name}[{key!r}]", args[1], x) for key, x in found.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return decode(hint, found)
    if hint in (int, float) and not is_number(found, hint):
        expected = "a whole number" if hint is int else "a number"
        raise ValueError(f"{name} is {short(found)}, expected {expected} up to 1e18")
    return found


def is_number(found: Any, kind: type) -> bool:
    """Whether what JSON holds is a number of a kind, finite and of a size that is."""
    return type(found) in (int, kind) and -LARGEST <= found <= LARGEST
