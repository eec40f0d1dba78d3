"""Rows of the four distributions, and what the times of a step make of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from torch import nn

from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Costs
from gradtide.kfac.distributions import assignment, servers
from gradtide.kfac.layers import Layer, supported

DIMS = (8, 16, 16, 32, 8)


def layers() -> list[Layer]:
    stack = [nn.Linear(a, b, bias=False) for a, b in pairwise(DIMS)]
    return supported(nn.Sequential(*stack), None)


KNOWN = Costs({d: d**3 * 1e-6 for d in DIMS}, start=1e-3, per_element=1e-6)
READY = tuple(0.01 * i for i in (0, 1, 2, 3, 7, 6, 5, 4))  # A forward, G backward


@pytest.mark.parametrize("distribution", ["mpd", "spd", "pad", "dp"])
def test_without_times_messages_are_not_decided(distribution: str) -> None:
    config = KFAC(distribution)  # type: ignore[arg-type]
    assert assignment(config, layers(), 3, KNOWN).messages == ()


@pytest.mark.parametrize("config", [KFAC("spd"), KFAC("pad"), KFAC("pad", workers=0.5)])
def test_messages_follow_the_clock(config: KFAC) -> None:
    """Late factors do not wait for what is long there, and one order of time is one
    partition, whatever the order of the layers."""
    placed = assignment(config, layers(), 3, replace(KNOWN, ready=READY))
    assert list(placed.messages) == sorted(placed.messages)
    assert placed.messages[3] < placed.messages[4]
    assert len(set(placed.messages)) > 2
    # The first two layers in the other order of time.
    turned = (READY[1], READY[0], *READY[2:])
    other = assignment(config, layers(), 3, replace(KNOWN, ready=turned))
    assert other.messages[1] <= other.messages[0]


def test_an_expensive_start_makes_one_message_of_each_half() -> None:
    slow = replace(KNOWN, start=10.0, ready=READY)
    assert assignment(KFAC("spd"), layers(), 3, slow).messages == (0,) * 4 + (1,) * 4


def test_the_partition_of_pad_heeds_arrivals() -> None:
    """What arrives last is little work for its rank, so that all end together."""
    known = Costs(dict.fromkeys(DIMS, 1.0), start=0.0, per_element=0.0)
    at_once = assignment(KFAC("pad"), layers(), 2, replace(known, ready=(1e-9,) * 8))
    assert at_once.owners.count(0) == 4
    late = (0.0, 0.0, 0.0, 0.0, 6.0, 3.0, 2.0, 1.0)
    waits = assignment(KFAC("pad"), layers(), 2, replace(known, ready=late))
    assert waits.owners.count(0) > waits.owners.count(1)


def test_workers_serve_as_many_as_each_other() -> None:
    assert servers(range(1, 3), 5) == [1, 1, 2, 2, 1]
    assert servers(range(3), 3) == [0, 1, 2]
