"""What ranks leave for each other in the store, and who waits for whom there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradtide.core.ops import Group
from gradtide.core.transport import Progress
from gradtide.transport.fault import FailureReporter


def reporter(store: Any, rank: int, gone: Callable[[int], bool]) -> FailureReporter:
    return FailureReporter(store, Group(rank, 3), Progress(), gone, 0)


def test_who_hung_up_and_still_looks_is_waited_for() -> None:
    """Its door is closed, but the store it reads may be in the rank that would end."""
    store = dist.HashStore()
    host = reporter(store, 0, lambda _: True)
    peer = reporter(store, 1, lambda _: False)
    peer.fail(None)
    begin = time.monotonic()
    host.await_known(0.3)
    assert time.monotonic() - begin >= 0.3
    peer.fail(None, looked=True)
    begin = time.monotonic()
    host.await_known(10)
    assert time.monotonic() - begin < 5


def test_who_is_gone_without_a_word_is_not_waited_for() -> None:
    begin = time.monotonic()
    reporter(dist.HashStore(), 0, lambda _: True).await_known(10)
    assert time.monotonic() - begin < 5
