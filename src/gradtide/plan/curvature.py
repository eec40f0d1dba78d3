"""K-FAC's part of a step on the virtual clock.

The real `Preconditioner` and `Preconditioning` decide on owners, messages and order,
and drive the real flows, on tensors without memory. What computes is replaced
(`parts`). Guard: tests/plan/test_curvature.py, against real replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import nn
from torch.optim import SGD

from gradtide.engine import Engine
from gradtide.gradients import GradientBucket, Place
from gradtide.kfac.config import KFAC
from gradtide.kfac.layers import KINDS, Kind, Layer
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.plan.cutting import buckets, parameters
from gradtide.plan.network import Network
from gradtide.plan.parts import Parts, Told
from gradtide.plan.trace import Factors, StepTrace
from gradtide.plan.transport import VirtualTransport
from gradtide.preconditioning import Preconditioning
from gradtide.scheme import Scheme

CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
# Makes the parts: `Parts` for gradtide's own K-FAC, a subclass for another program's.
MakeParts: TypeAlias = Callable[[VirtualTransport, KFAC], Parts]
Moments: TypeAlias = dict[Kind, dict[int, list[tuple[Layer, float]]]]


@dataclass(frozen=True)
class Laid:
    """Where gradients go: in place of a `Placement`."""

    buckets: list[GradientBucket]
    places: Mapping[nn.Parameter, Place]


class Second:
    """The preconditioning of a run; `launch` is called when factors are full.

    With `parts` other programs than gradtide can be run.
    """

    def __init__(
        self,
        trace: StepTrace,
        config: KFAC,
        engine: Engine,
        laid: list[GradientBucket],
        launch: Callable[[], None],
        parts: MakeParts = Parts,
    ) -> None:
        used = parts(cast(VirtualTransport, engine.transport), config)
        self.queues, self.inverse = used.queues, used.inverse
        self.kfac = Preconditioner(
            _model(trace), config, engine, lambda: None, launch, parts=used
        )
        self.queues.owners = self.owners
        places = {slot.param: Place(b, slot) for b in laid for slot in b.slots}
        self.steps = Preconditioning(Laid(laid, places), self.kfac)
        self.optimizer = SGD([p for _, p in parameters(trace)], lr=1.0)
        self._number = {layer: i for i, layer in enumerate(self.kfac.layers)}
        self._moments = _moments(trace, self.kfac.layers)

    @property
    def told(self) -> Told:
        return cast(Told, self.kfac.statistics)

    def moment(self, kind: Kind, place: int) -> None:
        """The unit's forward is over (A), or its backward is about to begin (G)."""
        for layer, seconds in self._moments[kind].get(place, ()):
            self.told.compute(layer, kind, seconds)

    def owners(self, layer: Layer) -> tuple[int, int]:
        number, placed = self._number[layer], self.kfac.placed
        return placed.owner(number, "A"), placed.owner(number, "G")


def busiest(
    trace: StepTrace, scheme: Scheme, network: Network, parts: MakeParts = Parts
) -> int:
    """The rank to run: see [Note: Slowest rank]."""
    config = scheme.preconditioner
    if config is None or config.distribution != "dp":
        return 0
    transport = VirtualTransport(network)
    homes = buckets(trace, scheme, network)
    engine = Engine(transport, transport.clock)
    second = Second(trace, config, engine, homes, lambda: None, parts)
    loads = [0.0] * network.size
    factors = {factors.weight: factors.a + factors.g for factors in trace.layers}
    names = {p: name for name, p in parameters(trace)}
    for layer in second.kfac.layers:
        owner, _ = second.owners(layer)
        inverting = sum(layer.groups * second.inverse(layer.dim(k)) for k in KINDS)
        loads[owner] += inverting + factors[names[layer.weight]]
    return max(range(network.size), key=loads.__getitem__)


def _moments(trace: StepTrace, layers: list[Layer]) -> Moments:
    """By kind and place of a unit, the layers whose moment it is, and its seconds."""
    place = {p: i for i, (_, p) in enumerate(parameters(trace))}
    read = {unit: i for i, unit in enumerate(trace.forward_order)}
    factors = {factors.weight: factors for factors in trace.layers}
    found: Moments = {"A": {}, "G": {}}
    for layer in layers:
        own = [place[p] for p in layer.params]
        of = factors[trace.units[place[layer.weight]].name]
        last = max(own, key=read.__getitem__)
        found["A"].setdefault(last, []).append((layer, of.a))
        found["G"].setdefault(min(own), []).append((layer, of.g))
    return found


def _model(trace: StepTrace) -> nn.Module:
    """The layers of a trace as modules without memory, in order of registration."""
    if not trace.layers:
        raise ValueError(
            f"the trace {trace.name} knows no layers that K-FAC could precondition: "
            "record it with `gradtide profile trace`, on a CPU, from a model that has "
            "Linear or convolution layers"
        )
    named = dict(parameters(trace))
    return nn.ModuleList(_module(named, layer) for layer in trace.layers)


def _module(named: Mapping[str, nn.Parameter], layer: Factors) -> nn.Module:
    weight, bias = named[layer.weight], layer.bias is not None
    made: Any
    if weight.dim() == 2:
        made = nn.Linear(1, 1, bias, device="meta")
    else:
        n = layer.groups
        kind = CONVOLUTIONS[weight.dim()]
        made = kind(n, n, 1, groups=n, bias=bias, device="meta")
    made.weight = weight
    if layer.bias is not None:
        made.bias = named[layer.bias]
    return cast(nn.Module, made)
