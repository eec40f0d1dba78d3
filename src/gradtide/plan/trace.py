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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradtide.fusion import Trace
from gradtide.plan.document import Document

DOCUMENT = Document("trace", "gradtide step trace", 1, "gradtide profile trace")


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

    `a` and `g` are seconds of computing and packing its factors A, after its forward,
    and G, before its backward. `groups` as a convolution has them.
    """

    weight: str
    bias: str | None
    a: float
    g: float
    groups: int = 1


@dataclass(frozen=True)
class StepTrace:
    """A model's step without any exchange.

    `units` are in the order in which their gradients get ready. `forward_order` holds
    the indices into `units` in the order in which parameters are first read; without
    it, that is the opposite order. All times are in seconds. Where the forward and the
    backward are `replayed`, they are waits, which a busy processor does not slow down.
    `layers` are those that K-FAC can precondition, in the order of registration; none
    where nothing is known of them. `processor` is what a step costs the processor of a
    rank, in seconds of all its threads (0: not known, or nothing).
    """

    name: str
    units: tuple[Unit, ...]
    optimizer: float  # of one whole optimizer step
    loss: float = 0.0  # between the forward of the last unit and the first backward
    forward_order: tuple[int, ...] = ()
    replayed: bool = False
    layers: tuple[Factors, ...] = ()
    processor: float = 0.0

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
        shares = [unit.optimizer for unit in self.units]
        if not self.optimizer:
            shares = [float(unit.numel) for unit in self.units]
        factor = seconds / (sum(shares) or 1.0)
        units = (
            replace(unit, optimizer=factor * share)
            for unit, share in zip(self.units, shares, strict=True)
        )
        return replace(self, units=tuple(units), optimizer=seconds)

    def save(self, path: Path) -> None:
        """Write JSON."""
        DOCUMENT.save(path, asdict(self))


def load(path: Path) -> StepTrace:
    """The trace that `save` wrote; `ValueError` says what is wrong with it."""
    found = DOCUMENT.read(path)
    # Not all files of this version have these.
    later: dict[str, Any] = {"layers": [], "processor": 0.0}
    names = {field.name for field in fields(StepTrace)} - later.keys()
    _complete(found, names, str(path))
    found = later | found
    units, layers = found["units"], found["layers"]
    for name, value in (("units", units), ("layers", layers)):
        if not isinstance(value, list):
            raise ValueError(f"{path}: {name} is no list: record the trace anew")
    return StepTrace(
        name=str(found["name"]),
        units=tuple(_unit(unit, f"{path}, unit {i}") for i, unit in enumerate(units)),
        optimizer=_number(found, "optimizer", str(path)),
        loss=_number(found, "loss", str(path)),
        forward_order=_order(found["forward_order"], str(path)),
        replayed=bool(found["replayed"]),
        layers=tuple(
            _factors(layer, f"{path}, layer {i}") for i, layer in enumerate(layers)
        ),
        processor=_number(found, "processor", str(path)),
    )


def _unit(found: Any, where: str) -> Unit:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, found {found!r}")
    # Not all files of this version have shapes.
    _complete(found, {field.name for field in fields(Unit)} - {"shape"}, where)
    numel = _count(found, "numel", where)
    return Unit(
        str(found["name"]),
        numel,
        _count(found, "itemsize", where),
        forward=_number(found, "forward", where),
        backward=_number(found, "backward", where),
        optimizer=_number(found, "optimizer", where),
        shape=_shape(found.get("shape", []), numel, where),
    )


def _factors(found: Any, where: str) -> Factors:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, found {found!r}")
    _complete(found, {field.name for field in fields(Factors)}, where)
    bias = found["bias"]
    return Factors(
        str(found["weight"]),
        None if bias is None else str(bias),
        a=_number(found, "a", where),
        g=_number(found, "g", where),
        groups=_count(found, "groups", where),
    )


def _shape(found: Any, numel: int, where: str) -> tuple[int, ...]:
    lengths = isinstance(found, list) and all(type(n) is int for n in found)
    if not lengths or (found and math.prod(found) != numel):
        raise ValueError(
            f"{where}: shape is {found!r}, expected lengths whose product is {numel}: "
            "record the trace anew"
        )
    return tuple(found)


def _complete(found: Mapping[str, Any], names: set[str], where: str) -> None:
    missing = sorted(names - found.keys())
    if missing:
        raise ValueError(f"{where}: no {' and no '.join(missing)}: record it anew")


def _number(found: Mapping[str, Any], name: str, where: str) -> float:
    value = found[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: {name} is {value!r}, expected seconds, 0 or more")
    return float(value)


def _count(found: Mapping[str, Any], name: str, where: str) -> int:
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}, expected a count, 1 or more")
    return value


def _order(found: Any, where: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise ValueError(
            f"{where}: forward_order is no list of indices: record it anew"
        )
    return tuple(found)
