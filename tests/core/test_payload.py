"""A payload gives out entries and takes them back, without passes over the bucket."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradtide.core.payload import Payload, next_step


def at(*indices: int) -> Tensor:
    return torch.tensor(indices, dtype=torch.int32)


def test_what_is_taken_is_gone_until_it_is_given_back() -> None:
    payload = Payload(torch.arange(6.0), [])
    values = payload.pop_entries(at(1, 4))
    assert values.tolist() == [1, 4]
    assert payload.flat.tolist() == [0, 0, 2, 3, 0, 5]
    assert payload.num_sent == 2
    payload.add_residual(at(1, 4), values)
    assert payload.flat.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_raises_the_alarm(bad: float) -> None:
    payload = Payload(torch.ones(4), [])
    payload.pop_entries(at(0, 1))
    assert float(payload.nonfinite) == 0.0
    payload.flat[2] = bad
    payload.pop_entries(at(2))
    payload.pop_entries(at(3))
    assert math.isnan(float(payload.nonfinite))
    assert payload.flat.isfinite().all()


def test_a_mean_is_zero_but_where_it_is_not() -> None:
    payload = Payload(torch.zeros(5), [])
    first = payload.sparse_mean(at(0, 3), torch.tensor([1.0, 2.0]))
    assert first.tolist() == [1, 0, 0, 2, 0]
    second = payload.sparse_mean(at(1), torch.tensor([3.0]))
    assert second.tolist() == [0, 3, 0, 0, 0]
    assert second.data_ptr() == first.data_ptr()


def test_entries_of_all_ranks_are_added_up_and_cleared_the_next_time() -> None:
    payload = Payload(torch.zeros(5), [])
    where = torch.tensor([[0, 3], [3, 4]], dtype=torch.int32)
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    mean = payload.mean_of_entries(where, values)
    assert mean.tolist() == [0.5, 0, 0, 3, 4]
    found = payload.entries_of(mean)
    assert found is not None
    assert set(found.tolist()) == {0, 3, 4}
    again = payload.mean_of_entries(where[:, :1], values[:, :1])
    assert again.tolist() == [0.5, 0, 0, 2, 0]
    assert again.data_ptr() == mean.data_ptr()
    assert again._version == payload._version  # nobody else wrote: no pass over it


@pytest.mark.parametrize("indirect", [False, True])
def test_a_mean_that_somebody_wrote_to_is_cleared(indirect: bool) -> None:
    payload = Payload(torch.zeros(4), [])
    gradient = payload.sparse_mean(at(0), torch.tensor([1.0])).view(2, 2)
    with torch.no_grad():
        if indirect:
            torch._foreach_add_([gradient[1]], 7.0)
        else:
            gradient += 7.0
    assert payload.sparse_mean(at(1), torch.tensor([2.0])).tolist() == [0, 2, 0, 0]


def test_count_counts() -> None:
    state: dict[str, Tensor] = {}
    assert [next_step(state) for _ in range(3)] == [0, 1, 2]
    assert next_step({"step": torch.tensor(7)}) == 7
