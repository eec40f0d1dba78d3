"""Warmup: other densities first."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gradtide.collectives.contrib.cltk import CLTk
from gradtide.collectives.contrib.gtopk import GTopK
from gradtide.collectives.dense import Dense
from gradtide.collectives.momentum_correction import MomentumCorrection
from gradtide.collectives.topk import TopK
from gradtide.collectives.warmup import Warmup
from gradtide.core.ops import Group
from gradtide.core.payload import Payload
from gradtide.selectors import Exact
from gradtide.testing import check_law, lockstep

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)


@pytest.mark.parametrize("size", SIZES)
def test_law(size: int) -> None:
    for inner in (TopK(0.02), GTopK(0.02), CLTk(0.02)):
        check_law(Warmup(inner, 2, (1.0, 0.2, 0.1)), size, steps=8)


def test_each_density_holds_for_the_stated_steps() -> None:
    size, n = 2, 1000
    collective = Warmup(TopK(0.01, Exact()), 3, (1.0, 0.25, 0.0625))
    flats = [torch.zeros(n) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    taken = []
    for _ in range(11):
        for flat in flats:
            flat += torch.randn(n)
        before = loads[0].num_sent
        flows = [
            collective.reduce(payload, Group(r, size))
            for r, payload in enumerate(loads)
        ]
        for mean, flat in zip(lockstep(flows), flats, strict=True):
            if mean.data_ptr() == flat.data_ptr():
                flat.zero_()
        taken.append(loads[0].num_sent - before)
    assert taken == [0] * 3 + [250] * 3 + [62] * 3 + [10] * 2


def test_a_collective_that_counts_steps_keeps_its_own_count() -> None:
    traffic: Counter[str] = Counter()
    flats = [torch.randn(1000) for _ in range(2)]
    loads = [Payload(flat, [flat]) for flat in flats]
    collective = Warmup(CLTk(0.01, Exact()), 2, (0.05,))
    for step in range(5):
        expected = torch.topk(
            flats[step % 2].abs(), 50 if step < 2 else 10
        ).indices.sort()
        flows = [
            collective.reduce(payload, Group(r, 2)) for r, payload in enumerate(loads)
        ]
        mean = lockstep(flows, traffic)[0]
        assert torch.equal(mean.nonzero().squeeze(1), expected.values)


def test_dense_steps_deliver_what_was_left_behind_and_keep_the_wire() -> None:
    flats = [torch.randn(64) for _ in range(2)]
    expected = [flat.clone() for flat in flats]

    def mean(collective: object, flats: list[torch.Tensor]) -> torch.Tensor:
        loads = [Payload(flat, [flat]) for flat in flats]
        flows = [
            collective.reduce(payload, Group(r, 2))  # type: ignore[attr-defined]
            for r, payload in enumerate(loads)
        ]
        return lockstep(flows)[0]

    dense = mean(Dense("bf16"), expected)
    assert torch.equal(mean(Warmup(TopK(wire="bf16")), flats), dense)


def test_around_a_wrapper_it_sets_the_density_inside() -> None:
    collective = Warmup(MomentumCorrection(TopK(0.01, Exact())), 1, (1.0, 0.1))
    flats = [torch.randn(1000) for _ in range(2)]
    loads = [Payload(flat, [flat]) for flat in flats]
    taken = []
    for _ in range(3):
        flows = [
            collective.reduce(payload, Group(r, 2)) for r, payload in enumerate(loads)
        ]
        for mean, flat in zip(lockstep(flows), flats, strict=True):
            if mean.data_ptr() == flat.data_ptr():
                flat.zero_()
        for flat in flats:
            flat += torch.randn(1000)
        taken.append(loads[0].num_sent)
    assert taken == [0, 100, 110]


def test_what_has_no_density_can_be_preceded_by_dense_steps_only() -> None:
    check_law(Warmup(Dense(), 2), 2, steps=4)
    with pytest.raises(ValueError, match="no density"):
        Warmup(Dense(), 2, (0.5,))


@pytest.mark.parametrize(
    ("steps", "densities", "words"),
    [(0, (1.0,), "at least 1"), (1, (1.0, 0.0), "above 0"), (1, (2.0,), "at most 1")],
)
def test_hyper_parameters_are_checked(steps, densities, words) -> None:
    with pytest.raises(ValueError, match=words):
        Warmup(TopK(), steps, densities)
