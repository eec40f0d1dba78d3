"""What a race of the user's own says of the steps that schemes need."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gradtide.planner.pilot import cost, find, read
from gradtide.scheme import parse

STEPS = range(10, 101, 10)


def course(slow: float, low: float = 0.0) -> list[tuple[float, float]]:
    """Losses of one that needs `slow` times the steps, and never gets below `low`."""
    return [(n, max(3 - 0.01 * n / slow, low)) for n in STEPS]


def record(path: Path, **courses: list[tuple[float, float]]) -> Path:
    rows = [
        {
            "scheme": name,
            "course": {"steps": [n for n, _ in one], "loss": [x for _, x in one]},
        }
        for name, one in courses.items()
    ]
    path.write_text(json.dumps({"results": rows}))
    return path


def test_a_cost_is_in_steps_to_the_same_losses() -> None:
    found = cost(course(1.0), [(2 * n, x) for n, x in course(1.0)])
    assert found.shares == pytest.approx((1.0, 1.0, 1.0))
    assert found.tasks == 1
    assert cost(course(1.0), course(1.0)).shares == pytest.approx((0, 0, 0))
    sooner = cost(course(1.0), course(0.8))
    assert sooner.typical == pytest.approx(-0.2)


def test_losses_that_it_never_had_take_for_ever() -> None:
    found = cost(course(1.0), course(1.25))
    assert found.least == pytest.approx(0.25)
    assert math.isinf(found.most)
    never = cost(course(1.0), course(1.0, low=2.9))
    assert math.isinf(never.typical)
    assert "hardly" in never.words


def test_a_record_is_read_beside_its_exact_contestant(tmp_path: Path) -> None:
    sparse = "topka2a(0.02, schedule='local', warmup=24, wire='e3m0')"
    courses = {"ddp": course(1.0), sparse: course(0.8), "dear": course(1.0)}
    courses["ddp(wire='bf16')"] = course(1.0)
    found = read(record(tmp_path / "record.json", **courses))
    assert list(found) == [sparse]
    own = find(found, parse("topka2a(0.02, schedule='local', warmup=240, wire='e3m0')"))
    assert own == found[sparse]
    assert find(found, parse("topka2a(0.01, schedule='local', wire='e3m0')")) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "no record of a race"),
        ('{"results": [{"scheme": "wfbp", "course": 3}]}', "no record of a race"),
        ("[", "is not JSON"),
    ],
)
def test_what_is_no_record_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        read(tmp_path / "record.json")


def test_a_race_without_an_exact_one_tells_nothing(tmp_path: Path) -> None:
    path = record(tmp_path / "record.json", **{"wfbp(wire='int8')": course(1.0)})
    with pytest.raises(ValueError, match="race ddp or wfbp"):
        read(path)
