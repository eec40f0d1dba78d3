"""A drawn step is the step that was predicted, in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.planner.test_virtual import step

from gradtide.planner.clock.intervals import Interval
from gradtide.planner.network import Network
from gradtide.planner.timeline import Timeline, timeline
from gradtide.planner.virtual import simulate
from gradtide.scheme import parse

NEAR = Network.ideal(4, 2, 1e9)
SCHEMES = [
    "wfbp",
    "sequential",
    "dear(wire='bf16')",
    "topka2a(0.02)",
    "exdyna(0.01, schedule='local', wire='e3m0')",
    "diloco(every=1)",
]


def total(stretches: object) -> float:
    found: list[Interval] = list(stretches)  # type: ignore[call-overload]
    for (_, end), (begin, _) in pairwise(found):
        assert end <= begin
    assert all(begin < end for begin, end in found)
    return sum(end - begin for begin, end in found)


@pytest.mark.parametrize("delay", [0.0, 0.04])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_pieces_are_those_of_the_prediction(scheme: str, delay: float) -> None:
    network = NEAR.delayed(delay)
    told = simulate(step(), parse(scheme), network)
    found = timeline(step(), parse(scheme), network)
    assert found.seconds == pytest.approx(told.step - told.crowded)
    assert total(found.forward) == pytest.approx(told.forward)
    assert total(found.backward) == pytest.approx(told.backward)
    assert total(found.update) == pytest.approx(told.apply)
    assert total(found.waiting) == pytest.approx(told.exposed - told.crowded)
    parts = found.forward, found.backward, found.update, found.waiting
    assert sum(map(total, parts)) == pytest.approx(found.seconds)
    assert 0 < total(found.exchange) <= found.seconds * (1 + 1e-9)
    beside = total(found.working) + total(found.exchange)
    assert beside <= found.seconds * (1 + 1e-9)


def inside(found: Timeline) -> bool:
    pieces = [*found.forward, *found.backward, *found.exchange, *found.working]
    return all(0 <= begin < end <= found.seconds + 1e-12 for begin, end in pieces)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_is_within_the_step(scheme: str) -> None:
    assert inside(timeline(step(), parse(scheme), NEAR))


def test_a_round_is_drawn_where_it_ends() -> None:
    found = timeline(step(), parse("diloco(every=5)"), NEAR)
    told = simulate(step(), parse("diloco(every=5)"), NEAR)
    assert total(found.waiting) == pytest.approx(5 * told.exposed, rel=0.05)


def test_the_second_half_of_an_all_reduce_is_in_the_next_forward() -> None:
    dear, wfbp = (timeline(step(), parse(name), NEAR) for name in ("dear", "wfbp"))
    first = min(begin for begin, _ in dear.exchange)
    assert first < max(end for _, end in dear.forward)
    assert min(begin for begin, _ in wfbp.exchange) >= max(e for _, e in wfbp.forward)
    # It is applied there, too.
    assert min(begin for begin, _ in dear.update) < max(e for _, e in dear.forward)
