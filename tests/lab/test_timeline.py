"""The trace: what is drawn where, and that its format is the one that viewers read."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from tests.lab.samples import APPLIED, REQUESTS, STEP

from gradtide.lab.timeline import COMPUTE, WIRE, Span, spans, trace


def drawn(lane: str, backward_alone: float | None = None) -> list[Span]:
    found = spans(STEP, APPLIED, REQUESTS, backward_alone)
    return [span for span in found if span.lane == lane]


def test_waits_come_before_updates_in_forward_and_first_in_the_step() -> None:
    # Gaps before the updates: 10 to 11 and 11.25 to 13; 1.5 of 2.75 was waiting.
    share = 1.5 / 2.75
    assert [(s.name, s.start, s.end) for s in drawn(COMPUTE)] == [
        ("forward", 0, 4),
        ("waiting", pytest.approx(1 - share), 1),
        ("apply", 1, 1.25),
        ("waiting", pytest.approx(3 - 1.75 * share), 3),
        ("apply", 3, 3.25),
        ("backward", 4, 6),
        ("waiting", 6, 6.5),
        ("apply", 6.5, 7),
    ]


def test_ddp_waits_after_its_computing() -> None:
    names = [(s.name, s.start, s.end) for s in drawn(COMPUTE, 0.5) if s.start >= 4]
    assert names[:2] == [("backward", 4, 4.5), ("waiting", 4.5, 6)]


def test_the_wire_shows_requests_of_the_step_only() -> None:
    assert [(s.name, s.start, s.end) for s in drawn(WIRE)] == [
        ("grad1 AllGather", -0.5, pytest.approx(0.9)),
        ("grad0 AllGather", 1, pytest.approx(2.9)),
        ("grad0 ReduceScatter", 5, 8),
    ]


def events(phase: str) -> list[dict[str, Any]]:
    ours = spans(STEP, APPLIED, REQUESTS, None)
    made = trace({"ddp": [Span(COMPUTE, "forward", 0.0, 1.0)], "dear": ours})
    read = json.loads(json.dumps(made))
    return [event for event in read["traceEvents"] if event["ph"] == phase]


def test_lanes_are_named() -> None:
    names = {
        (e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in events("M")
    }
    assert names[1, 0, "process_name"] == "ddp"
    assert names[2, 0, "process_name"] == "dear"
    assert names[2, 0, "thread_name"] == "compute"
    assert names[2, 1, "thread_name"] == "wire"
    assert (1, 1, "thread_name") not in names


def test_events_are_complete_and_nest() -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events("X"):
        assert event.keys() == {"ph", "pid", "tid", "name", "cat", "ts", "dur"}
        assert event["ts"] >= 0
        assert event["dur"] > 0
        span = event["ts"], event["ts"] + event["dur"]
        lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    assert set(lanes) == {(1, 0), (2, 0), (2, 1)}
    for found in lanes.values():
        for a, b in combinations(sorted(found), 2):
            inside = a[0] <= b[0] and b[1] <= a[1] + 1e-6
            assert inside or b[0] >= a[1] - 1e-6 or a[0] == b[0]


def test_microseconds() -> None:
    (forward,) = [e for e in events("X") if e["pid"] == 1]
    assert (forward["ts"], forward["dur"]) == (0, 1e6)
