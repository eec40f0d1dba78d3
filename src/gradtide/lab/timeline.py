"""One typical step of every contestant, as a trace that ui.perfetto.dev opens.

[Note: Where waits are drawn] The clock says how long each phase waited, not when.
Backward waits for what is under way when its computing is done: its wait is drawn last.
The optimizer's step waits before it updates: first. A forward that holds deferred
updates waits before each of them: its wait is spread over the gaps before them in
proportion. What DDP waited is what its backward took beyond computing alone (see
[Note: The breakdown] in `summary`), drawn last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradtide.core.telemetry import Interval, Record
from gradtide.lab.trial import Step

COMPUTE, WIRE, INSIDE = "compute", "wire", "inside the host"
_LANES = {COMPUTE: 0, WIRE: 1, INSIDE: 2}
_MICROSECONDS = 1e6  # of a second: what the format counts in


class Span(NamedTuple):
    """Something that took time; seconds from the step's beginning."""

    lane: str
    name: str
    start: float
    end: float


def spans(
    step: Step,
    applied: Sequence[Interval],
    records: Sequence[Record],
    backward_alone: float | None,
) -> list[Span]:
    """What rank 0 did in one step, and which requests were on the wire meanwhile.

    `backward_alone` (seconds) is given where nobody counted the waiting.
    """
    zero, forward, backward, end = (mark.time for mark in step)
    waited = step.waited()
    if backward_alone is not None:
        waited[1] = max(0.0, backward - forward - backward_alone)
    updates = [(a, b) for a, b in applied if zero <= a and b <= forward]
    found = [
        Span(COMPUTE, "forward", zero, forward),
        *_forward_waits(zero, updates, waited[0], forward),
        *(Span(COMPUTE, "apply", a, b) for a, b in updates),
        Span(COMPUTE, "backward", forward, backward - waited[1]),
        Span(COMPUTE, "waiting", backward - waited[1], backward),
        Span(COMPUTE, "waiting", backward, backward + waited[2]),
        Span(COMPUTE, "apply", backward + waited[2], end),
        *(
            Span(INSIDE if r.inside else WIRE, f"{r.bucket} {r.request}", *r[3:5])
            for r in records
            if r.end > zero and r.start < end
        ),
    ]
    return [
        Span(lane, name, start - zero, stop - zero)
        for lane, name, start, stop in sorted(found, key=lambda s: (s.start, -s.end))
        if stop > start
    ]


def trace(timelines: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """The Chrome trace event format: a process per contestant, a thread per lane."""
    events: list[dict[str, Any]] = []
    for process, (contestant, found) in enumerate(timelines.items(), start=1):
        events += [
            _metadata(process, 0, "process_name", name=contestant),
            _metadata(process, 0, "process_sort_index", sort_index=process),
        ]
        for lane in sorted({span.lane for span in found}, key=_LANES.__getitem__):
            events.append(_metadata(process, _LANES[lane], "thread_name", name=lane))
        # The trace's clock does not go below zero: requests may have begun earlier.
        early = min([0.0, *(span.start for span in found)])
        events += [_complete(process, span, early) for span in found]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _forward_waits(
    zero: float, updates: Sequence[Interval], waited: float, forward: float
) -> list[Span]:
    if waited <= 0:
        return []
    edges = [zero, *(end for _, end in updates)]
    gaps = [(a, b) for a, (b, _) in zip(edges, updates, strict=False)]
    gaps = gaps or [(zero, forward)]
    share = min(1.0, waited / max(sum(b - a for a, b in gaps), 1e-9))
    return [Span(COMPUTE, "waiting", b - (b - a) * share, b) for a, b in gaps]


def _metadata(process: int, thread: int, key: str, **said: object) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": key, "args": said}


def _complete(process: int, span: Span, early: float) -> dict[str, Any]:
    # Ends are rounded, not lengths: neighbours must touch, not overlap.
    start, end = (round((t - early) * _MICROSECONDS, 3) for t in (span.start, span.end))
    return {
        "ph": "X",
        "pid": process,
        "tid": _LANES[span.lane],
        "name": span.name,
        "cat": span.lane,
        "ts": start,
        "dur": round(end - start, 3),
    }
