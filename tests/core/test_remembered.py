"""What an algorithm goes on with where buckets are cut anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradtide.core.payload import Payload, carried, count_on, counts
from gradtide.runtime.layout.slots import Slot

LENGTHS = 2, 3, 4


def _bucket(params: list[nn.Parameter], **state: Tensor) -> list[tuple[Slot, Payload]]:
    """Parameters one after the other, each with the payload of their bucket."""
    slots, begin = [], 0
    for i, p in enumerate(params):
        slots.append(Slot(f"p{i}", p, i, begin))
        begin += p.numel()
    payload = Payload(torch.zeros(begin), [], state)
    return [(slot, payload) for slot in slots]


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n)) for n in LENGTHS]


def _count(number: int) -> Tensor:
    return torch.tensor(number)


def test_an_algorithm_counts_on() -> None:
    state = {"steps": _count(3), "last": _count(2), "threshold": torch.tensor(0.5)}
    state |= {"bounds": torch.tensor([1, 2])}
    assert counts(state) == {"steps": 3, "last": 2}
    count_on(state, {"steps": 7, "rounds": 1})
    assert counts(state) == {"steps": 7, "last": 2, "rounds": 1}
    assert state["steps"].dtype == torch.int64


def test_what_has_an_entry_for_every_element_comes_along() -> None:
    a, b, c = _params()
    old = _bucket([a], velocity=torch.arange(2.0))
    old += _bucket([b, c], velocity=torch.arange(2.0, 9.0))
    new = [slot for slot, _ in _bucket([c, a, b])]
    now = carried(new, torch.zeros(9), [old[2], old[0], old[1]])
    assert now["velocity"].tolist() == [5, 6, 7, 8, 0, 1, 2, 3, 4]


def test_who_has_none_begins_with_zero() -> None:
    a, b, _ = _params()
    old = _bucket([a], velocity=torch.ones(2)) + _bucket([b])
    now = carried([slot for slot, _ in _bucket([a, b])], torch.zeros(5), old)
    assert now["velocity"].tolist() == [1, 1, 0, 0, 0]


def test_numbers_of_steps_stay_where_they_are_equal() -> None:
    a, b, _ = _params()
    new = [slot for slot, _ in _bucket([a, b])]
    for other, expected in ((4, {"steps": 4}), (5, {})):
        old = _bucket([a], steps=_count(4)) + _bucket([b], steps=_count(other))
        assert counts(carried(new, torch.zeros(5), old)) == expected
    old = _bucket([a], steps=_count(4)) + _bucket([b])
    assert carried(new, torch.zeros(5), old) == {}


def test_what_is_about_a_bucket_as_a_whole_is_learnt_anew() -> None:
    a, b, _ = _params()
    old = _bucket([a, b], threshold=torch.tensor(0.5), bounds=torch.arange(5))
    new = [slot for slot, _ in _bucket([a])]
    assert carried(new, torch.zeros(2), old[:1]) == {}
