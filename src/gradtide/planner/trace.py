"""What a planner knows of a training step: sizes, orders and times, as data.

Knows nothing of how they were measured (`watch`) nor of any network (`network`).

[Note: Whose time] A step is cut at the moments that matter to an exchange: when a
parameter is first read, and when its gradient is ready. A unit's `forward` is what is
computed from the moment its parameter is read until the next unit's is read, so a
forward that has to wait for a parameter waits first and then takes `forward`. Its
`backward` is what is computed from the moment the gradient before it was ready until
its own is. Of parameters that are read at once, the last has the time of their module;
of gradients that get ready at once, the first. What lies between, the loss, belongs to
no unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gradtide.fusion import Trace
from gradtide.planner.data.document import Document, is_number
from gradtide.scheme.recommended import Steps

DOCUMENT = Document("trace", "gradtide step trace")
# Not all files of this version have these.
LATER = {"device", "layers", "processor", "shape", "steps"}
# Numbers from the least to the most, and what they are.
NUMBERS = {int: (1, 1 << 40, "a count"), float: (0, 1e6, "seconds")}
ITEMSIZES = (2, 4, 8)  # bytes of what gradients are made of

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """A parameter that is exchanged; times in seconds, see [Note: Whose time]."""

    name: str
    numel: int
    itemsize: int  # bytes of one element of its gradient
    forward: float
    backward: float
    optimizer: float  # its share of one optimizer step
    shape: tuple[int, ...] = ()  # of the parameter; empty where it is not known

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Factors:
    """A layer that K-FAC can precondition; `weight` and `bias` are names of units.

    Its factors A are computed and packed after its forward, G before its backward.
    """

    weight: str
    bias: str | None
    a: float  # seconds
    g: float
    groups: int = 1  # as a convolution has them


@dataclass(frozen=True)
class StepTrace:
    """A model's step without any exchange; times in seconds."""

    name: str
    units: tuple[Unit, ...]  # as their gradients get ready
    optimizer: float  # of one whole optimizer step
    loss: float = 0.0  # between the forward of the last unit and the first backward
    # Indices into `units` as parameters are first read; without it, the opposite order.
    forward_order: tuple[int, ...] = ()
    replayed: bool = False  # forward and backward are waits, which nothing slows
    layers: tuple[Factors, ...] = ()  # in the order of registration, if known
    processor: float = 0.0  # seconds of all threads of a rank, in a step; 0: not known
    steps: Steps = "any"  # the kind of its optimizer; "any": not known
    device: str = ""  # as it calls itself, or "cpu"; empty: not known

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError(
                f"{self.name}: a trace without units: nothing is exchanged"
            )
        if not self.forward_order:
            backwards = tuple(range(len(self.units)))[::-1]
            object.__setattr__(self, "forward_order", backwards)
        if sorted(self.forward_order) != list(range(len(self.units))):
            raise ValueError(
                f"{self.name}: forward_order has to hold every index into the "
                f"{len(self.units)} units once: record the trace anew"
            )
        if self.steps not in get_args(Steps):
            known = ", ".join(get_args(Steps))
            raise ValueError(f"{self.name}: steps is {self.steps!r}, not of {known}")
        self._check_layers()

    def _check_layers(self) -> None:
        units = {unit.name: unit for unit in self.units}
        for layer in self.layers:
            weight = units.get(layer.weight)
            if weight is None or (layer.bias is not None and layer.bias not in units):
                raise ValueError(
                    f"{self.name}: the layer of {layer.weight} has a tensor that is no "
                    "unit: record the trace anew"
                )
            if not 2 <= len(weight.shape) <= 5 or weight.shape[0] % layer.groups:
                raise ValueError(
                    f"{self.name}: {layer.weight} has the shape {weight.shape}, and "
                    f"{layer.groups} groups: no layer of K-FAC; record the trace anew"
                )

    @property
    def forward(self) -> float:
        """Seconds of the whole forward, but for the loss."""
        return sum(unit.forward for unit in self.units)

    @property
    def backward(self) -> float:
        """Seconds of the whole backward, but for the loss."""
        return sum(unit.backward for unit in self.units)

    @property
    def compute(self) -> float:
        """Seconds of a step on one rank that exchanges nothing."""
        return self.forward + self.loss + self.backward + self.optimizer

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def fusion(self) -> Trace:
        """What a fusion is told."""
        return Trace(
            [unit.nbytes for unit in self.units],
            [unit.forward for unit in self.units],
            [unit.backward for unit in self.units],
        )

    def optimized(self, seconds: float) -> StepTrace:
        """The same step, of which the optimizer takes so many seconds."""
        shares = [u.optimizer if self.optimizer else float(u.numel) for u in self.units]
        factor = seconds / (sum(shares) or 1.0)
        both = zip(self.units, shares, strict=True)
        units = tuple(replace(unit, optimizer=factor * share) for unit, share in both)
        return replace(self, units=units, optimizer=seconds)

    def slower(self, factor: float) -> StepTrace:
        """The same step on a rank that computes `factor` times as long."""
        times = ("forward", "backward", "optimizer")
        units = tuple(
            replace(unit, **{name: factor * getattr(unit, name) for name in times})
            for unit in self.units
        )
        rest = {"optimizer": factor * self.optimizer, "loss": factor * self.loss}
        return replace(self, units=units, **rest)  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Write JSON."""
        DOCUMENT.save(path, self)


def load(path: Path) -> StepTrace:
    """The trace that `save` wrote; `ValueError` says what is wrong with it."""
    found = _read(StepTrace, DOCUMENT.read(path), str(path))
    if not found.forward + found.backward:
        raise ValueError(f"{path}: a step that takes no time: record it anew")
    return found


def _read(kind: type[T], found: Any, where: str) -> T:
    """One of the dataclasses above, from its fields as JSON has them."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, found {short(found)}")
    hints = get_type_hints(kind)
    missing = sorted(hints.keys() - LATER - found.keys())
    if missing:
        raise ValueError(f"{where}: no {' and no '.join(missing)}: record it anew")
    own = [name for name in hints if name in found]
    return kind(**{name: _value(hints[name], found, name, where) for name in own})


def _value(hint: Any, found: Mapping[str, Any], name: str, where: str) -> Any:
    value = found[name]
    if hint in NUMBERS:
        least, most, what = NUMBERS[hint]
        if not is_number(value, hint) or not least <= value <= most:
            wrong = f"{where}: {name} is {short(value)}"
            raise ValueError(f"{wrong}, expected {what}, {least} to {most:g}")
        if name == "itemsize" and value not in ITEMSIZES:
            raise ValueError(f"{where}: itemsize is {value}, expected {ITEMSIZES}")
        return hint(value)
    if hint == tuple[int, ...]:
        return _whole(found, name, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: {name} is no list: record the trace anew")
        kind, one = get_args(hint)[0], name.removesuffix("s")
        return tuple(_read(kind, x, f"{where}, {one} {i}") for i, x in enumerate(value))
    if hint is bool:
        return bool(value)
    return None if value is None and hint == str | None else str(value)


def _whole(found: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    """The indices in `forward_order`, or the lengths in `shape`."""
    value, numel = found[name], found.get("numel")
    whole = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if name == "shape" and not (whole and (not value or math.prod(value) == numel)):
        raise ValueError(
            f"{where}: shape is {short(value)}, expected lengths whose product is "
            f"{short(numel)}: record the trace anew"
        )
    if not whole:
        raise ValueError(f"{where}: {name} is no list of indices: record it anew")
    return tuple(value)
