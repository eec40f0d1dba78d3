"""Who waits asks others to end their round, in a store; no process group is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from gradtide.core.grace import Grace
from gradtide.core.torch_internals.distributed import TCPStore
from gradtide.core.transport import CommunicationError
from gradtide.transport.grace import StoreGrace

SECONDS = 0.2
LONG = 10.0  # seconds for what comes in the end
Make = Callable[[], StoreGrace]
KIND: type[Grace] = StoreGrace  # all that training asks for is there


@pytest.fixture
def address() -> Iterator[str]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1 {store.port}"
    del store


@pytest.fixture
def make(address: str) -> Iterator[Make]:
    made = []

    def one() -> StoreGrace:
        made.append(grace := StoreGrace(SECONDS))
        grace.begin("1", address)
        return grace

    yield one
    for grace in made:
        grace.close()


def always() -> bool:
    return True


def comes(grace: StoreGrace, position: int) -> bool:
    """Whether a rank comes to be asked to go to a position."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        if grace.asked == position:
            return True
        time.sleep(0.01)
    return False


def test_who_is_late_is_asked_after_the_grace_and_for_one_exchange(make: Make) -> None:
    fast, slow = make(), make()
    assert slow.asked is None
    fast.seconds = 100.0
    with fast.waiting(8, always):
        time.sleep(2 * SECONDS)
        assert slow.asked is None
        fast.seconds = SECONDS
        assert comes(slow, 8)
        with slow.waiting(8, always):
            assert slow.asked == 8
    assert slow.asked is None
    time.sleep(2 * SECONDS)
    assert slow.asked is None


def test_a_word_that_comes_too_late_changes_nothing(make: Make) -> None:
    """The slow rank has come before it has looked."""
    fast, slow = make(), make()
    with fast.waiting(8, always):
        time.sleep(1.5 * SECONDS)
        with slow.waiting(8, always):
            ...
    time.sleep(2 * SECONDS)
    assert slow.asked is None
    assert fast.asked is None
    with fast.waiting(4, always):
        assert comes(slow, 4)


def test_a_rank_waits_for_others_only_when_nothing_is_on_its_way(make: Make) -> None:
    fast, slow, there = make(), make(), [False]
    with fast.waiting(8, lambda: there[0]):
        time.sleep(3 * SECONDS)
        assert slow.asked is None
        there[0] = True
        assert comes(slow, 8)


def test_where_a_rank_is_lost_the_others_are_asked_at_once(make: Make) -> None:
    fast, slow = make(), make()
    fast.seconds = 100.0
    with pytest.raises(CommunicationError), fast.waiting(8, always):
        raise CommunicationError
    assert comes(slow, 8)


def test_a_word_of_another_generation_changes_nothing(make: Make, address: str) -> None:
    fast, slow = make(), make()
    slow.begin("2", address)
    with fast.waiting(8, always):
        time.sleep(2 * SECONDS)
        assert slow.asked is None
    fast.begin("2", address)
    with fast.waiting(4, always):
        assert comes(slow, 4)
        slow.rest()
        assert slow.asked is None


def test_a_store_that_is_gone_hurts_nobody(make: Make, address: str) -> None:
    fast = make()
    fast.begin("1", "127.0.0.1 9")
    with fast.waiting(8, always):
        time.sleep(2 * SECONDS)
    fast.begin("2", address)
    slow = make()
    slow.begin("2", address)
    with fast.waiting(8, always):
        assert comes(slow, 8)
