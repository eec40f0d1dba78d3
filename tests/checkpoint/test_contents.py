"""What can be saved of a run, and random numbers that go on."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from gradtide.checkpoint import files
from gradtide.checkpoint.contents import (
    Items,
    check_random,
    copied,
    random_states,
    set_random,
)


class Pair(NamedTuple):
    a: int
    b: int


def read(value: Any) -> Any:
    return files.unpacked(files.packed(value, {}), "x")[1]


def test_copies_share_nothing_and_can_be_read_again() -> None:
    x = torch.arange(4.0)
    value = {
        "x": x,
        1: [x[:2], {"deep": (None, True, 2.5, "ä", b"b", 1j)}],
        "odd": [np.float64(1.5), np.int32(3), torch.Size([2]), torch.float16],
        "kinds": [Counter("aab"), OrderedDict(a=1), defaultdict(int, {2: 3}), {4}],
        "pair": Pair(1, 2),
    }
    found = copied(value, "value")
    x.zero_()
    assert found["x"].tolist() == [0, 1, 2, 3]
    found["long"] = [bytes(range(256)), b"", {"b": b"x"}]
    again = read(found)
    assert again["long"] == found["long"]
    assert again["x"].tolist() == [0, 1, 2, 3]
    assert again[1][1] == value[1][1]
    assert again["odd"] == [1.5, 3, torch.Size([2]), torch.float16]
    assert again["kinds"] == value["kinds"]
    assert isinstance(again["kinds"][0], Counter)
    assert again["pair"] == (1, 2)


def test_what_is_one_in_memory_stays_one() -> None:
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(layer, nn.Linear(3, 3))
    tied[1].weight = layer.weight
    found = copied(tied.state_dict(), "model")
    assert found["0.weight"] is found["1.weight"]
    assert found["0.bias"] is not found["1.bias"]


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize("odd", [object(), Colour.RED, np.zeros(3), lambda: 1, int])
def test_what_could_not_be_read_again_is_refused_by_its_place(odd: Any) -> None:
    with pytest.raises(TypeError, match=r"scheduler\['a'\]\[\.\.\.\] is a .*saved"):
        copied({"a": [odd]}, "scheduler")


def test_items_are_told_apart() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    generator = torch.Generator().manual_seed(3)
    items = Items({"s": scheduler, "g": generator, "epoch": lambda: 7})
    saved = read(items.copies())
    expected = torch.rand(3, generator=generator)
    optimizer.step()
    scheduler.step()
    items.check(saved)
    items.load(saved)
    assert items.values == {"epoch": 7}
    assert scheduler.last_epoch == 0
    assert torch.equal(torch.rand(3, generator=generator), expected)


@pytest.mark.parametrize("item", [3, "text", None, torch.optim.SGD, [1]])
def test_what_is_no_item_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"epoch is a .*lambda: epoch"):
        Items({"epoch": item})


@pytest.mark.parametrize("saved", [None, [], {}, {"a": 1}, {"g": 1}, {"g": None}])
def test_states_of_other_items_are_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"items|torch\.Generator"):
        Items({"g": torch.Generator()}).check(saved)


def test_an_item_that_does_not_take_its_state_is_named() -> None:
    items = Items({"g": torch.Generator()})
    items.check({"g": torch.zeros(3)})
    with pytest.raises(ValueError, match="g does not take its state"):
        items.load({"g": torch.zeros(3)})


def test_random_numbers_go_on() -> None:
    device = torch.device("cpu")

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    before = draw, random_states(device)
    saved = read(copied(before[1], "random"))
    expected = draw()
    check_random(saved)
    assert draw() != expected
    set_random(saved, device)
    assert draw() == expected


@pytest.mark.parametrize("part", ["torch", "python", "numpy"])
@pytest.mark.parametrize("odd", [None, 3, [], [1, 2, 3], torch.zeros(2), "x" * 5])
def test_what_are_no_random_states_is_refused(part: str, odd: Any) -> None:
    saved = random_states(torch.device("cpu"))
    expected = torch.get_rng_state()
    with pytest.raises(ValueError, match="random numbers"):
        check_random({**saved, part: odd})
    assert torch.equal(torch.get_rng_state(), expected)
