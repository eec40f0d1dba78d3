"""Measurements made up by hand, for tests of what is made of them."""

from __future__ import annotations

from gradtide.core.engine import Record as Request
from gradtide.lab.record import Result
from gradtide.lab.report import Record
from gradtide.lab.spec import Spec
from gradtide.lab.timeline import spans
from gradtide.lab.trial import Interval, Mark, Step
from gradtide.lab.workloads.workload import Timing

SPEC = Spec(("ddp",), "replay:resnet50", 4, 1, 1e8, steps=30)

# A DeAR step from 10 to 17: forward to 14 with two updates (each 0.25 long) and 1.5 of
# waiting, backward to 16 with nothing, the rest to 17 with 0.5 of waiting.
STEP = Step(Mark(10, 5.0), Mark(14, 6.5), Mark(16, 6.5), Mark(17, 7.0))
APPLIED: list[Interval] = [(9.0, 9.5), (11.0, 11.25), (13.0, 13.25), (18.0, 19.0)]
REQUESTS = [
    Request("grad1", "ReduceScatter", 100, 8.0, 9.0),
    Request("grad1", "AllGather", 100, 9.5, 10.9),
    Request("grad0", "AllGather", 100, 11.0, 12.9),
    Request("grad0", "ReduceScatter", 100, 15.0, 18.0),
]


def row(scheme: str, step_seconds: float, **more: float | dict[str, float]) -> Result:
    return Result(
        scheme=scheme,
        step_seconds=step_seconds,
        step_seconds_p25=0.9 * step_seconds,
        step_seconds_p75=1.1 * step_seconds,
        payload_bytes=1.5e8,
        cpu_seconds=0.25,
        forward_seconds=0.2 * step_seconds,
        backward_seconds=0.3 * step_seconds,
        exposed_seconds=0.4 * step_seconds,
        apply_seconds=0.1 * step_seconds,
        **more,  # type: ignore[arg-type]
    )


def record(*rows: Result) -> Record:
    origin = {
        "command": "gradtide compare",
        "commit": None,
        "versions": {"torch": "2"},
        "machine": {"cores": 2},
    }
    drawn = spans(STEP, APPLIED, REQUESTS, None)
    timelines = {r.scheme: drawn for r in rows}
    return Record(origin, SPEC, list(rows), timelines, Timing(1.0, 2.0))
