"""What a collective asks for, found out by running it on fewer numbers; and buckets.

The real flow runs for some steps on random gradients, and its requests are noted. What
was noted is the script of a bucket: the virtual engine plays it, at the size of the
real bucket, whenever the bucket is launched.

[Note: Sizes] A flow whose requests depend on sizes alone runs on tensors without
memory, at full size. Others select from numbers. They run at some sizes, each twice the
one before, and the totals of every request lie on a straight line through the two
nearest: counts stay, entries grow. The largest size leaves every rank some entries for
every other, so that no rounding to whole entries or to messages' alignment matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import nn

from gradtide.collectives import Dense
from gradtide.collectives.levels import by_levels
from gradtide.core.engine import Engine
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload, Traits, density_of, settled, traits
from gradtide.fusion import Cost, Trace
from gradtide.planner.clock.symbolic_requests import between
from gradtide.planner.clock.transport import VirtualTransport
from gradtide.planner.data.device import Device
from gradtide.planner.network import Network
from gradtide.planner.rehearsal.flows import (
    LOCKSTEP,
    Act,
    Script,
    Shapes,
    by_numbers,
    by_shapes,
)
from gradtide.planner.rehearsal.op_counts import Work
from gradtide.planner.trace import StepTrace
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.layout.placement import Named, lay_out
from gradtide.scheme import Scheme, with_levels

ENTRIES = 128  # that a rank has for every other, where a script is continued
FEWEST = 8
PART = 256  # elements for every rank: a multiple of what wires encode together
FIRST = 64  # elements for every rank up to which a bucket is rehearsed as it is
LONGEST = 1 << 15  # of a rank's part: indices in it take 16 bits, also if it is uneven
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
MOST = 1 << 21  # elements of all flows together, as far as FEWEST allows

# - Scripts ----------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def scripts(
    collective: object, numel: int, dtype: torch.dtype, shapes: Shapes, size: int
) -> Sequence[Script]:
    """The exchanges of a bucket of `numel` elements in the first two or three steps.

    The collective is a `settled` one; `shapes` are those of the bucket's parts, for
    collectives that work on matrices.
    """
    own = traits(collective)
    if own.depends_on == "shapes":
        return by_shapes(collective, numel, dtype, shapes, size)
    if own.depends_on == "size":
        return by_shapes(collective, numel, dtype, (), size)
    if own.depends_on == "length":
        part = PART * size
        one, two = (by_shapes(collective, n, dtype, (), size) for n in (part, 2 * part))
        return (_between(one[-1], two[-1], numel / part - 2, numel / (2 * part)),) * 2
    low, high = rungs = _rungs(collective, numel, size)
    before, found = by_numbers(collective, rungs, dtype, size)
    if low < high:
        weight, ratio = (numel - high) / (high - low), numel / high
        pairs = zip(before, found, strict=True)
        found = tuple(_between(a, b, weight, ratio) for a, b in pairs)
    if own.searches_part:
        # Its own selection scans a part, but sorts what is as small as a rehearsal.
        found = tuple(map(_without_sorting, found))
        return [_selecting(script, "Threshold", numel / size) for script in found]
    selector = type(getattr(collective, "select", None)).__name__
    return [_selecting(script, selector, float(numel)) for script in found]


def script_of(played: Sequence[Script], step: int) -> Script:
    """That of any step: after the first, the others in turn."""
    return played[0 if step == 0 else 1 + (step - 1) % (len(played) - 1)]


def _between(one: Script, two: Script, weight: float, ratio: float) -> Script:
    """`symbolic_requests.between`; work grows by `ratio`.

    Not in a straight line: messages of more than one block of indices bring more work
    than shorter ones, and a line through both would bring it again and again.
    """
    before, last = ([act.asked for act in script.acts] for script in (one, two))
    requests = between(before, last, weight, ratio)
    works = [act.work.times(ratio) for act in two.acts]
    acts = tuple(map(Act, works, requests))
    return two._replace(acts=acts, work=two.work.times(ratio))


def _without_sorting(script: Script) -> Script:
    acts = [act._replace(work=act.work._replace(ordered=0.0)) for act in script.acts]
    return script._replace(acts=tuple(acts))


def _selecting(script: Script, selector: str, scanned: float) -> Script:
    """With its selection before all else, unless nothing sparse is sent."""
    if not script.sparse:
        return script
    first, *others = script.acts
    first = first._replace(work=first.work._replace(scanned=scanned))
    return script._replace(acts=(first, *others), selector=selector)


def _rungs(collective: Any, numel: int, size: int) -> tuple[int, int]:
    """The two sizes from which the script for `numel` is made; or `numel` itself."""
    first = FIRST * size
    if numel <= first:
        return numel, numel
    density = density_of(collective) or 0.01
    room = MOST // min(size, LOCKSTEP)
    entries = max(FEWEST, min(ENTRIES, int(room * density / size)))
    small = 3 * traits(collective).small / (density * 4)
    rung, most = first, max(min(entries / density, LONGEST) * size, small)
    while rung < min(numel, most):
        rung *= 2
    return rung // 2, rung


# - Playing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsed:
    """The script of a collective, `settled`, in the place of the collective."""

    transport: VirtualTransport
    collective: object
    shapes: Shapes
    step: Callable[[], int]

    @property
    def traits(self) -> Traits:
        return Traits(divisible=traits(self.collective).divisible)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        flat, transport = payload.flat, self.transport
        found = scripts(
            self.collective, flat.numel(), flat.dtype, self.shapes, group.size
        )
        script, device = script_of(found, self.step()), transport.network.device
        for work, asked in script.acts:
            transport.work(_seconds(work, script.selector, device))
            yield asked if len(asked) > 1 else asked[0]
        transport.work(_seconds(script.work, script.selector, device))
        return flat


def _seconds(work: Work, selector: str, device: Device) -> float:
    """What the processor takes; nothing for nothing."""
    scanning = device.selecting(selector)(work.scanned) if work.scanned else 0.0
    return (
        scanning
        + device.take_in(work.moved, work.calls)
        + device.scatter.each * work.entries
        + (device.nearby or device.scatter).each * work.nearby
        + device.sort.each * work.ordered
    )


def exchange_seconds(nbytes: int, scheme: Scheme, network: Network) -> float:
    """Seconds of one exchange of `nbytes` of float32, alone on the queue."""
    numel = max(-(-nbytes // 4 // network.size), 1) * network.size
    flat = torch.empty(numel, device="meta")
    payload = Payload(flat, [flat])
    transport = VirtualTransport(network)
    engine = Engine(transport, transport.clock)
    inner = settled(scheme.collective)
    rehearsed = Rehearsed(transport, inner, ((numel,),), lambda: 2)
    collective = by_levels(rehearsed, with_levels(scheme, network.members).levels)
    flow = collective.reduce(payload, engine.group)
    engine.finish(engine.launch("alone", flow))
    return transport.clock()


# - Buckets ----------------------------------------------------------------------------


def buckets(trace: StepTrace, scheme: Scheme, network: Network) -> list[GradientBucket]:
    """The buckets that a replica would cut, of `parameters`.

    The fusion is told the times of the trace, and what an exchange of so many bytes
    costs on the network (`exchange_seconds`).
    """
    seconds = cache(partial(exchange_seconds, scheme=scheme, network=network))
    known = trace.fusion()

    def informed(trace: Trace, cost: Cost) -> list[slice]:
        if len(trace.nbytes) == len(known.nbytes):
            trace = replace(trace, forward=known.forward, backward=known.backward)
        return scheme.fusion(trace, seconds)

    pieces = scheme.schedule.fragments
    return lay_out(
        parameters(trace), informed, Dense(), network.size, num_fragments=pieces
    )


@lru_cache(maxsize=16)
def parameters(trace: StepTrace) -> Sequence[Named]:
    """The units as parameters on the device "meta", in their order."""
    found = []
    for unit in trace.units:
        shape, dtype = unit.shape or (unit.numel,), DTYPES[unit.itemsize]
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        found.append((unit.name, parameter))
    return found
