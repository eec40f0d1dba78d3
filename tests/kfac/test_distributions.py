"""Rows of the four distributions, and what the times of a step make of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from torch import nn

from gradtide.kfac import distributions
from gradtide.kfac.assign import Assignment
from gradtide.kfac.config import KFAC
from gradtide.kfac.costs import Carried, Costs
from gradtide.kfac.distributions import servers, share
from gradtide.kfac.layers import Layer, supported
from gradtide.transport.nccl import NcclTransport
from gradtide.transport.ring import carried

DIMS = (8, 16, 16, 32, 8)


def layers() -> list[Layer]:
    stack = [nn.Linear(a, b, bias=False) for a, b in pairwise(DIMS)]
    return supported(nn.Sequential(*stack), None)


def ring(size: int) -> Carried:
    return lambda *nbytes: carried(*nbytes, size)


def assignment(
    config: KFAC, layers: list[Layer], size: int, known: Costs
) -> Assignment:
    return distributions.assignment(config, layers, size, known, ring(size))


KNOWN = Costs({d: d**3 * 1e-6 for d in DIMS}, start=1e-3, per_element=1e-6)
READY = tuple(0.01 * i for i in (0, 1, 2, 3, 7, 6, 5, 4))  # A forward, G backward


@pytest.mark.parametrize("distribution", ["mpd", "spd", "pad", "dp"])
def test_without_times_messages_are_not_decided(distribution: str) -> None:
    config = KFAC(distribution)  # type: ignore[arg-type]
    assert assignment(config, layers(), 3, KNOWN).messages == ()


@pytest.mark.parametrize(
    "config",
    [KFAC("spd"), KFAC("pad"), KFAC("pad", workers=1.0), KFAC("pad", workers=0.5)],
)
def test_messages_follow_the_clock(config: KFAC) -> None:
    """Late factors do not wait for what is long there, and one order of time is one
    partition, whatever the order of the layers."""
    known = replace(KNOWN, start=1e-5)
    placed = assignment(config, layers(), 3, replace(known, ready=READY))
    assert list(placed.messages) == sorted(placed.messages)
    assert placed.messages[3] < placed.messages[4]
    assert len(set(placed.messages)) > 2
    # The first two layers in the other order of time.
    turned = (READY[1], READY[0], *READY[2:])
    other = assignment(config, layers(), 3, replace(known, ready=turned))
    assert other.messages[1] <= other.messages[0]


def test_an_expensive_start_makes_one_message_of_each_half() -> None:
    slow = replace(KNOWN, start=10.0, ready=READY)
    assert assignment(KFAC("spd"), layers(), 3, slow).messages == (0,) * 4 + (1,) * 4


def test_a_sum_for_one_owner_takes_longer_than_for_all() -> None:
    known = Costs({}, start=1e-3, per_element=1e-8)
    even = known.reduce(np.full(8, 1e6), ring(8))
    parts = np.array([8e6, *[0.0] * 7])
    assert even == pytest.approx(known.send(8e6))
    # Seven hops, a piece behind each other.
    assert 1.15 * even < known.reduce(parts, ring(8)) < 2 * even
    fine = known.reduce(parts, partial(NcclTransport.carried, None))
    assert fine == pytest.approx(known.send(8e6 * 8 / 7))
    assert known.reduce(np.array([8e6]), ring(1)) == 0  # nobody to send it to


def test_pad_sends_together_what_is_for_different_owners() -> None:
    """Two layers of one size and two owners: apart, each keeps a link busy alone."""
    model = supported(nn.Sequential(*(nn.Linear(512, 8, False) for _ in range(4))), 512)
    known = Costs({512: 1.0, 8: 1e-3}, start=0.0, per_element=1e-6, ready=(1e-9,) * 8)
    placed = assignment(KFAC("pad"), model, 4, known)
    assert sorted(placed.owners[:4]) == [0, 1, 2, 3]
    assert len(set(placed.messages[:4])) == 1


def test_the_partition_of_pad_heeds_arrivals() -> None:
    """What arrives last is little work for its rank, so that all end together."""
    known = Costs(dict.fromkeys(DIMS, 1.0), start=0.0, per_element=0.0)
    config = KFAC("pad", workers=1.0)
    at_once = assignment(config, layers(), 2, replace(known, ready=(1e-9,) * 8))
    assert at_once.owners.count(0) == 4
    late = (0.0, 0.0, 0.0, 0.0, 6.0, 3.0, 2.0, 1.0)
    waits = assignment(config, layers(), 2, replace(known, ready=late))
    assert waits.owners.count(0) > waits.owners.count(1)


def wide(inputs: int, outputs: int) -> list[Layer]:
    return supported(nn.Sequential(nn.Linear(inputs, outputs, bias=False)), None)


@pytest.mark.parametrize(
    ("inputs", "outputs", "every", "expected"),
    [
        (64, 8, 1, 1 / 4),  # 512 of gradients, 2116 of inverses
        (64, 8, 4, 1 / 4),
        (64, 8, 5, 1.0),  # every fifth step
        (16, 16, 1, 1 / 4),  # 256 and 272
        (16, 16, 2, 1.0),
    ],
)
def test_pad_hands_out_what_takes_less_time(
    inputs: int, outputs: int, every: int, expected: float
) -> None:
    known = Costs({inputs: 1.0, outputs: 1.0}, start=0.0, per_element=1e-6)
    model = wide(inputs, outputs)
    config = KFAC("pad", inverse_every=every)
    assert share(config, model, 4, known) == expected
    placed = assignment(config, model, 4, known)
    assert all(len(workers) == 4 * expected for workers in placed.workers)
    for other in (KFAC("mpd"), KFAC("spd"), KFAC("pad", workers=1.0)):
        assert share(other, model, 4, known) == 1


def test_a_start_that_costs_more_than_the_bytes_is_not_paid_in_every_step() -> None:
    known = Costs({64: 1.0, 8: 1.0}, start=1.0, per_element=1e-6)
    config = KFAC("pad", inverse_every=2)
    assert share(config, wide(64, 8), 4, known) == 1


def test_what_travels_of_an_inverse_depends_on_its_form() -> None:
    """Eigenvectors do not pack: twice the elements, and so one worker is better."""
    known = Costs({64: 1.0, 8: 1.0}, start=0.0, per_element=1e-6)
    forms = {
        form: KFAC("pad", inverse_every=6, form=form)  # type: ignore[arg-type]
        for form in ("inverse", "eigen")
    }
    shares = {f: share(config, wide(64, 8), 4, known) for f, config in forms.items()}
    assert shares == {"inverse": 1.0, "eigen": 1 / 4}


def test_workers_serve_as_many_as_each_other() -> None:
    assert servers(range(1, 3), 5) == [1, 1, 2, 2, 1]
    assert servers(range(3), 3) == [0, 1, 2]
