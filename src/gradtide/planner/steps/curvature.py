"""K-FAC's part of a step on the virtual clock.

The real `Preconditioner` and `Preconditioning` decide on owners, messages and order,
and drive the real flows, on tensors without memory. What computes is replaced
(`parts`). Guard: tests/planner/steps/test_curvature.py, against real replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn
from torch.optim import SGD

from gradtide.core.engine import Engine
from gradtide.kfac.config import KFAC
from gradtide.kfac.layers import CONVOLUTIONS, KINDS, Kind, Layer
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.network import Network
from gradtide.planner.rehearsal.rehearsal import buckets, parameters
from gradtide.planner.steps.parts import Parts, Told
from gradtide.planner.trace import StepTrace
from gradtide.runtime.exchange.preconditioned import Preconditioning
from gradtide.runtime.layout.buckets import GradientBucket, Place
from gradtide.scheme import Scheme

# Makes the parts: `Parts` for gradtide's own K-FAC, a subclass for another program's.
MakeParts: TypeAlias = Callable[[VirtualTransport, KFAC], Parts]
Moments: TypeAlias = dict[Kind, dict[int, list[tuple[Layer, float]]]]


class Laid(NamedTuple):
    """Where gradients go: in place of a `Placement`."""

    buckets: list[GradientBucket]
    places: Mapping[nn.Parameter, Place]


class Second:
    """The preconditioning of a run; `launch` is called when factors are full."""

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
        # What stands for a gradient is the parameter itself.
        self.stage = Preconditioning(Laid(laid, places), self.kfac, lambda p: p)
        self.optimizer = SGD([p for _, p in parameters(trace)], lr=1.0)
        self._moments = _moments(trace, self.kfac.layers)

    @property
    def told(self) -> Told:
        return cast(Told, self.kfac.statistics)

    def moment(self, kind: Kind, place: int) -> None:
        """The unit's forward is over (A), or its backward is about to begin (G)."""
        for layer, seconds in self._moments[kind].get(place, ()):
            self.told.compute(layer, kind, seconds)

    def owners(self, layer: Layer) -> tuple[int, int]:
        return self.kfac.owners[layer, "A"], self.kfac.owners[layer, "G"]


def busiest(trace: StepTrace, scheme: Scheme, network: Network) -> int:
    """The rank to run: see [Note: Slowest rank]."""
    config = scheme.preconditioner
    if config is None or config.distribution != "dp":
        return 0
    transport = VirtualTransport(network)
    cut = buckets(trace, scheme, network)
    engine = Engine(transport, transport.clock)
    second = Second(trace, config, engine, cut, lambda: None)
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
    named, modules = dict(parameters(trace)), nn.ModuleList()
    for layer in trace.layers:
        weight, bias, n = named[layer.weight], layer.bias is not None, layer.groups
        made: Any
        if weight.dim() == 2:
            made = nn.Linear(1, 1, bias, device="meta")
        else:
            kind = CONVOLUTIONS[weight.dim() - 3]
            made = kind(n, n, 1, groups=n, bias=bias, device="meta")
        made.weight = weight
        if layer.bias is not None:
            made.bias = named[layer.bias]
        modules.append(made)
    return modules
