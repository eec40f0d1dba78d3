"""What a step trace says, and that a file is checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradtide.planner.trace import Factors, StepTrace, Unit, load

HEAD = Unit("head.weight", 30, 4, 0.01, 0.02, optimizer=0.003, shape=(5, 6))
BODY = Unit("body.weight", 10, 2, forward=0.04, backward=0.08, optimizer=0.001)
TRACE = StepTrace("two", (HEAD, BODY), optimizer=0.004, loss=0.005)


def test_sums_over_units() -> None:
    assert TRACE.forward == pytest.approx(0.05)
    assert TRACE.backward == pytest.approx(0.1)
    assert TRACE.compute == pytest.approx(0.05 + 0.1 + 0.005 + 0.004)
    assert (TRACE.numel, TRACE.nbytes) == (40, 140)
    told = TRACE.fusion()
    assert told.nbytes == [120, 20]
    assert (told.forward, told.backward) == ([0.01, 0.04], [0.02, 0.08])


def test_the_forward_goes_the_other_way_unless_told() -> None:
    assert TRACE.forward_order == (1, 0)
    told = StepTrace("two", (HEAD, BODY), 0.0, forward_order=(0, 1))
    assert told.forward_order == (0, 1)


@pytest.mark.parametrize("order", [(0,), (0, 0), (1, 2)])
def test_an_order_that_is_none(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every index into the 2 units once"):
        StepTrace("two", (HEAD, BODY), 0.0, forward_order=order)


def test_no_units() -> None:
    with pytest.raises(ValueError, match="without units"):
        StepTrace("none", (), 0.0)


def test_round_trip(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == TRACE


def test_a_file_without_shapes_is_read(tmp_path: Path) -> None:
    def forget(found: dict[str, Any]) -> None:
        for unit in found["units"]:
            del unit["shape"]

    _spoil(forget, tmp_path / "trace.json")
    assert [unit.shape for unit in load(tmp_path / "trace.json").units] == [(), ()]


def _spoil(change: Callable[[dict[str, Any]], None], path: Path) -> None:
    TRACE.save(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(format="other"),
            "is no gradtide step trace: make one with",
        ),
        (lambda t: t.update(version=2), "version 2 of the format, this gradtide"),
        (lambda t: t.pop("optimizer"), "no optimizer: record it anew"),
        (lambda t: t.update(loss=-1), "loss is -1, expected seconds"),
        (lambda t: t.update(loss=True), "loss is True"),
        (lambda t: t.update(units={}), "units is no list"),
        (lambda t: t["units"].append(3), "unit 2: expected an object, found 3"),
        (lambda t: t["units"][1].pop("numel"), "unit 1: no numel"),
        (lambda t: t["units"][0].update(numel=0), "unit 0: numel is 0"),
        (lambda t: t["units"][0].update(forward=float("nan")), "forward is nan"),
        (lambda t: t["units"][0].update(shape=[5, 5]), "whose product is 30"),
        (lambda t: t["units"][0].update(shape=30), "shape is 30, expected lengths"),
        (lambda t: t.update(forward_order=[0.0, 1]), "no list of indices"),
        (lambda t: t.update(forward_order=[1, 1]), "every index"),
    ],
)
def test_files_that_are_no_trace(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    _spoil(change, tmp_path / "trace.json")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "trace.json")


@pytest.mark.parametrize("text", ["[]", "3", "{}", '"x"'])
def test_other_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="gradtide profile trace"):
        load(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the trace"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(tmp_path / "text.json")


LAYER = Factors("head.weight", "body.weight", a=0.1, g=0.2)


def test_layers_survive_a_round_trip(tmp_path: Path) -> None:
    trace = StepTrace("two", (HEAD, BODY), 0.0, layers=(LAYER,), processor=0.25)
    trace.save(tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == trace


def test_a_file_from_before_layers_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    TRACE.save(file)
    document = json.loads(file.read_text())
    del document["layers"], document["processor"]
    file.write_text(json.dumps(document))
    assert load(file) == TRACE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": "tail.weight"}, "no unit: record the trace anew"),
        ({"bias": "tail.bias"}, "no unit"),
        ({"weight": "body.weight"}, "no layer of K-FAC"),
        ({"groups": 2}, "2 groups"),
        ({"groups": 0}, "groups is 0"),
        ({"a": -1.0}, "layer 0: a is -1.0"),
        ({"g": None}, "g is None"),
    ],
)
def test_layers_that_are_none(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    StepTrace("two", (HEAD, BODY), 0.0, layers=(LAYER,)).save(file)
    document = json.loads(file.read_text())
    document["layers"][0].update(changes)
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        load(file)
