"""The script of a collective in its place: one exchange of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradtide.bucket import Payload
from gradtide.engine import Engine
from gradtide.ops import Cut, Flow, Group
from gradtide.plan.device import Device
from gradtide.plan.labour import Work
from gradtide.plan.network import Network
from gradtide.plan.rehearsal import script_of, scripts
from gradtide.plan.transport import VirtualTransport
from gradtide.scheme import Scheme


@dataclass(frozen=True)
class Rehearsed:
    """The script of a collective in the place of the collective."""

    transport: VirtualTransport
    collective: object
    shapes: Sequence[tuple[int, ...]]
    step: Callable[[], int]

    def reduce(self, load: Payload, group: Group) -> Flow:
        played = scripts(
            self.collective,  # type: ignore[arg-type]
            load.flat.numel(),
            load.flat.dtype,
            tuple(self.shapes),
            group.size,
        )
        script, device = script_of(played, self.step()), self.transport.network.device
        for act in script.acts:
            self.transport.work(_seconds(act.work, script.selector, device))
            if not act.asked:
                yield Cut(load.flat)
            elif act.several:
                yield act.asked
            else:
                yield act.asked[0]
        self.transport.work(_seconds(script.work, script.selector, device))
        return load.flat


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
    """Seconds of one exchange of a bucket of `nbytes` of float32, alone on the lane."""
    numel = max(-(-nbytes // 4 // network.size), 1) * network.size
    flat = torch.empty(numel, device="meta")
    load = Payload(flat, [flat])
    transport = VirtualTransport(network)
    engine = Engine(transport, transport.clock)
    rehearsed = Rehearsed(transport, scheme.collective, [(numel,)], lambda: 2)
    engine.finish(engine.launch("alone", rehearsed.reduce(load, engine.group)))
    return transport.clock()
