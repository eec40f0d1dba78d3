"""Ranks that measure agree: on what comes next, and that one of them has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.ranks import TIMEOUT, run_ranks

from gradtide.core.ops import AllReduce
from gradtide.planner import measure as measuring
from gradtide.planner.auto.decision import Decision, Present, Seen, decide
from gradtide.planner.measure import measure
from gradtide.planner.measuring import device_timing as workbench
from gradtide.planner.measuring import request_timing as points
from gradtide.planner.measuring.bench import Bench, RankError
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace, Unit
from gradtide.scheme import Auto
from gradtide.selectors import SELECTORS
from gradtide.transport import Transport, connect

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a selector's first call imports, forked ranks inherit."""
    for selector in SELECTORS:
        selector()(torch.randn(64), 4, {})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little work between requests."""
    monkeypatch.setattr(workbench, "SIZES", (1 << 10, 1 << 12))
    monkeypatch.setattr(workbench, "SELECTED", (1 << 10, 1 << 12))
    monkeypatch.setattr(points, "LARGEST", 1 << 21)


@contextmanager
def connected() -> Iterator[Transport]:
    transport = connect(None, CPU)
    yield transport
    transport.close()


def test_what_everyone_says() -> None:
    def work() -> list[Any]:
        with connected() as transport:
            bench, rank = Bench(transport, CPU), transport.group.rank
            return [
                bench.everyone(lambda: rank),
                bench.first(lambda: f"from {rank}"),
                bench.middle(lambda: 10.0 * rank),
                bench.prepared(lambda: object()) is not None,
            ]

    expected = [[0, 1, 2], "from 0", 10, True]
    assert run_ranks(3, work) == [expected] * 3


def on_rank(rank: int, where: Any, name: str, change: Callable[..., Any]) -> None:
    """In a forked rank: `where.name` is `change` of it, if this is the one."""
    if torch.distributed.get_rank() == rank:
        setattr(where, name, change(getattr(where, name)))


def failing(after: int) -> Callable[..., Any]:
    """A function that is called so often and then raises."""

    def change(whole: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(after))

        def work(*args: Any) -> Any:
            if next(calls, None) is None:
                raise MemoryError("of all things")
            return whole(*args)

        return work

    return change


FAILURES = [
    (0, measuring, "_rows", 0),
    (2, measuring, "_rows", 0),
    (1, Bench, "empty", 0),
    (1, Bench, "empty", 5),
    (0, points, "AllToAll", 2),  # a first look and two sizes come at any speed
    (2, points, "shape", 0),
    (1, workbench, "_copy", 1),
    (2, workbench, "_spent", 4),
    (0, workbench, "fit", 2),
    (1, workbench, "ReduceScatter", 0),
]


@pytest.mark.product
@pytest.mark.parametrize(
    ("rank", "where", "name", "after"),
    FAILURES,
    ids=[f"{rank}-{name}-{after}" for rank, _, name, after in FAILURES],
)
def test_what_is_raised_on_one_rank_is_raised_on_all_at_once(
    rank: int, where: Any, name: str, after: int
) -> None:
    def work() -> tuple[float, float]:
        on_rank(rank, where, name, failing(after))
        with connected() as transport:
            begin = time.monotonic()
            with pytest.raises(RankError, match=f"rank {rank} raised MemoryError: of"):
                measure(transport, 0.2, CPU)
            passed = time.monotonic() - begin
            # Requests are still answered: nobody is a request behind.
            x = torch.ones(1)
            Bench(transport, CPU).ask(AllReduce(x))()
            return float(x), passed

    for total, passed in run_ranks(3, work):
        assert total == 3
        assert passed < TIMEOUT


@pytest.mark.slow
def test_ranks_whose_clocks_and_speeds_differ_do_the_same() -> None:
    def work() -> tuple[Network, int]:
        with connected() as transport:
            rank, asked = transport.group.rank, [0]
            speed = [1.0, 30.0, 0.1][rank]  # of the rank's clock
            Bench.now = lambda self: 1e4 * rank + speed * time.perf_counter()  # type: ignore[method-assign]
            submit = transport.submit

            def late(*args: Any) -> Any:
                asked[0] += 1
                if rank == 2:
                    time.sleep(0.004 * (asked[0] % 3))
                return submit(*args)

            transport.submit = late  # type: ignore[method-assign, assignment]
            return measure(transport, 0.2, CPU), asked[0]

    first, *others = run_ranks(3, work)
    assert others == [first] * 2


def test_auto_stays_where_a_rank_fails_while_it_measures() -> None:
    trace = StepTrace("one", (Unit("w", 1000, 4, 0.01, 0.02, 0.0),), 0.001)

    def work() -> Decision:
        on_rank(1, workbench, "_scatter", failing(1))
        with connected() as transport:
            seen = lambda: Seen(trace, "")  # noqa: E731
            return decide(transport, Auto(), seen, CPU, Present())

    for decision in run_ranks(3, work):
        assert decision.failed
        assert "rank 1 raised MemoryError: of all things" in decision.words


def test_sorting_is_timed_on_other_entries_each_time() -> None:
    def work() -> bool:
        with connected() as transport:
            order = workbench._order(Bench(transport, CPU), 1000)
            (first, _), (second, _) = order(), order()  # type: ignore[misc]
            return torch.equal(first, second)

    assert run_ranks(2, work) == [False, False]
