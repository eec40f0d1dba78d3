"""Means that go to owners, and answers that all are sent: in lockstep."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from gradtide.collectives import Dense
from gradtide.collectives.levels import by_levels
from gradtide.collectives.owners import Answers, Owners, Span, answers_of, places
from gradtide.core.levels import levels_of
from gradtide.core.ops import Cut, Flow, Group, in_halves
from gradtide.core.payload import Collective, Payload
from gradtide.testing import lockstep
from gradtide.wire import Wire, codec_of

RANKS = [1, 2, 3, 4, 5, 7, 8, 16]
SHAPES = [(3, 5), (40, 7), (1, 1), (2, 9), (11, 11), (30, 2), (5,)]


def spans(size: int) -> tuple[list[Span], int]:
    """Tensors of unlike lengths, padded as in a bucket; some ranks own none."""
    found, begin = [], 0
    for i, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        owner = None if i % 4 == 2 else (i * i) % max(size - 1, 1)
        found.append(Span(begin, begin + numel, owner))
        begin += -(-numel // size) * size
    return found, begin


def bucket(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Another for each rank, with sums that depend on the order of adding."""
    rng = torch.Generator().manual_seed(rank)
    large = 10.0 ** (rank % 5 - 2)
    return (torch.randn(length, generator=rng, dtype=torch.float64) * large).to(dtype)


def flows(
    collective: Collective, groups: list[Group], length: int, dtype: torch.dtype
) -> list[tuple[Flow, Tensor]]:
    """With halves, of each rank; and its bucket."""
    found = []
    for group in groups:
        flat = bucket(group.rank, length, dtype)
        flow = collective.reduce(Payload(flat, [flat]), group)
        found.append((in_halves(flow, group), flat))
    return found


def answered(
    flow: Flow, owners: Owners, flat: Tensor, of: list[Span], rank: int, seen: list[int]
) -> Flow:
    """Make of a mean at its cut what the owner would: here its double, or nothing."""
    reply = None
    try:
        while True:
            asked = flow.send(reply)
            reply = yield asked
            if isinstance(asked, Cut):
                for i, (begin, end, owner) in enumerate(of):
                    if owner == rank:
                        seen.append(i)
                        own = flat[begin:end] * 2
                        owners.answers.put(i, own if i % 3 else None)
                owners.answered = True
    except StopIteration as stop:
        result: Tensor = stop.value
        return result


@pytest.mark.parametrize("wire", [None, "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", RANKS[1:])  # alone nobody divides anything
def test_owners_have_the_bits_of_the_mean_and_all_have_their_answers(
    size: int, dtype: torch.dtype, wire: Wire
) -> None:
    of, length = spans(size)
    for hosts in [1, *(h for h in range(2, size) if size % h == 0)]:
        collective = by_levels(Dense(wire), hosts)
        groups = [Group(rank, size) for rank in range(size)]
        how = collective, groups, length, dtype
        (mean, *others) = lockstep([flow for flow, _ in flows(*how)])
        assert all(torch.equal(mean, other) for other in others)
        seen: list[int] = []
        every, driven, fallback = [], [], []
        for group, (flow, flat) in zip(groups, flows(*how), strict=True):
            levels = levels_of(group, hosts)
            answers = answers_of(of, group, torch.float64, flat.device)
            owners = Owners(of, length, group, levels, answers)
            own = owners.driven(flow, flat, codec_of(wire, dtype))
            every.append(owners)
            driven.append(answered(own, owners, flat, of, group.rank, seen))
        owned = {i for i, span in enumerate(of) if span.owner is not None}
        for result in lockstep(driven):
            for i in {*range(len(of))} - owned:
                assert torch.equal(result[slice(*of[i][:2])], mean[slice(*of[i][:2])])
        assert {*seen} == owned
        for owners in every:
            found = dict(owners.answers.found())
            assert {*found} == {i for i in owned if i % 3}
            for i, answer in found.items():
                begin, end, _ = of[i]
                assert torch.equal(answer, (mean[begin:end] * 2).double())
        # Where nobody is to answer, all have the means.
        for owners, (flow, flat) in zip(every, flows(*how), strict=True):
            fallback.append(owners.driven(flow, flat, codec_of(wire, dtype)))
        assert all(torch.equal(mean, own) for own in lockstep(fallback))


@pytest.mark.parametrize("size", [4, 8])
def test_fewer_bytes_travel_than_with_means_for_all(size: int) -> None:
    n = size * size * 120
    of = [Span(n * r // size, n * (r + 1) // size, (r + 1) % size) for r in range(size)]
    traffic: Counter[str] = Counter()
    driven, seen = [], list[int]()
    for rank in range(size):
        group, flat = Group(rank, size), bucket(rank, n, torch.float32)
        answers = answers_of(of, group, torch.bfloat16, flat.device)
        owners = Owners(of, n, group, None, answers)
        flow = in_halves(Dense().reduce(Payload(flat, [flat]), group), group)
        own = owners.driven(flow, flat, codec_of(None, flat.dtype))
        driven.append(answered(own, owners, flat, of, rank, seen))
    lockstep(driven, traffic)
    once = (size - 1) * n  # of one byte an entry, by all ranks
    assert traffic["ReduceScatter"] == 4 * once
    assert traffic["AllToAll"] == 4 * n  # here each part is another rank's as a whole
    assert traffic["AllGather"] == pytest.approx(2 * once, rel=0.05)
    assert traffic["AllGather"] + traffic["AllToAll"] < 4 * once


def test_a_part_lies_elsewhere_where_hosts_have_several_ranks() -> None:
    hosts = ((0, 2), (1, 3))
    levels = [levels_of(Group(rank, 4), hosts) for rank in range(4)]
    found = [places(Group(rank, 4), levels[rank]) for rank in range(4)]
    assert found == [[0, 1, 2, 3]] * 4
    assert places(Group(0, 4), levels_of(Group(0, 4), 2)) == [0, 2, 1, 3]
    assert places(Group(0, 4), None) == [0, 1, 2, 3]


def test_an_answer_that_is_there_no_more_is_none() -> None:
    answers = Answers([4], {0: 0}, Group(0, 1), torch.float32, torch.device("cpu"))
    answers.put(0, torch.ones(2, 2))
    assert [(i, own.tolist()) for i, own in answers.found()] == [(0, [1.0] * 4)]
    answers.put(0, None)
    assert not [*answers.found()]


@pytest.mark.parametrize("wire", ["int8", "e3m0"])
def test_answers_in_few_bits_are_the_same_for_their_owner(wire: Wire) -> None:
    group, cpu = Group(0, 1), torch.device("cpu")
    answers = Answers([3000, 1], {0: 0, 1: 0}, group, torch.bfloat16, cpu, wire)
    answer = torch.linspace(-1, 1, 3000, dtype=torch.bfloat16).view(300, 10)
    answers.put(0, answer)
    answers.put(1, None)
    ((index, found),) = answers.found()
    assert (index, found.dtype, found.shape) == (0, torch.bfloat16, (3000,))
    bound = {"int8": 0.01, "e3m0": 0.3}[str(wire)]
    torch.testing.assert_close(found.view(300, 10), answer, rtol=0, atol=bound)
    exact = Answers([3000, 1], {0: 0, 1: 0}, group, torch.bfloat16, cpu)
    lengths = [len(each.request().tensor) for each in (answers, exact)]
    assert lengths[0] < {"int8": 0.6, "e3m0": 0.35}[str(wire)] * lengths[1]
