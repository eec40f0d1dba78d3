"""What a race of the user's own says of the steps that schemes need."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gradtide.planner.pilot import SEED, cost, read
from gradtide.planner.prior import find
from gradtide.scheme import parse

RECORDS = Path(__file__).parents[2] / "benchmarks/records"
STEPS = range(10, 201, 10)


def course(slow: float, low: float = 0.0) -> list[tuple[float, float]]:
    """Losses of one that needs `slow` times the steps, and never gets below `low`."""
    return [(n, max(6 - math.log(n / slow), low)) for n in STEPS]


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


@pytest.mark.parametrize("slow", [0.8, 1.0, 1.3, 2.0])
def test_a_cost_is_in_steps_to_the_same_losses(slow: float) -> None:
    found = cost(course(1.0), course(slow))
    assert found is not None
    assert found.typical == pytest.approx(slow - 1)
    assert found.most == pytest.approx(slow * math.exp(2 * SEED) - 1)
    assert found.least == pytest.approx(slow * math.exp(-2 * SEED) - 1)
    assert found.tasks == 1


def test_one_that_made_fewer_steps_is_compared_where_both_were() -> None:
    found = cost(course(1.0), course(1.5)[:12])
    assert found is not None
    assert found.typical == pytest.approx(0.5)


def test_who_stays_far_behind_takes_for_ever() -> None:
    found = cost(course(1.0), course(1.0, low=5.0))
    assert found is not None
    assert math.isinf(found.typical)
    assert "hardly" in found.words


def test_a_loss_that_does_not_fall_tells_nothing(tmp_path: Path) -> None:
    flat = [(n, 1.0 + 0.1 * (n // 10 % 2)) for n in STEPS]
    assert cost(flat, course(1.0)) is None
    assert cost(course(1.0)[:5], course(1.0)) is None
    assert cost(course(1.0), []) is None
    path = record(tmp_path / "record.json", wfbp=flat, **{"wfbp(wire='int8')": flat})
    with pytest.raises(ValueError, match="hardly fell"):
        read(path)


def test_a_record_is_read_beside_its_exact_contestant(tmp_path: Path) -> None:
    sparse = "topka2a(0.02, schedule='local', warmup=24, wire='e3m0')"
    courses = {"ddp": course(1.0), sparse: course(0.8), "dear": course(1.0)}
    courses["ddp(wire='bf16')"] = course(1.0)
    found = read(record(tmp_path / "record.json", **courses))
    assert list(found) == [sparse]
    own = find(found, parse("topka2a(0.02, schedule='local', warmup=60, wire='e3m0')"))
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


def curves(name: str) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Recorded runs, by scheme and seed."""
    runs: list[Any] = json.loads((RECORDS / f"{name}.json").read_text())["runs"]
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for run in runs:
        points = [(look["step"], look["loss"]) for look in run["curve"]]
        found.setdefault(run["scheme"], {})[run["seed"]] = points
    return found


@pytest.mark.parametrize("name", ["learning_gpt_202611", "learning_wires_202611"])
def test_recorded_runs_from_other_seeds_are_within_the_range(name: str) -> None:
    """Of all runs at least nine in ten; of those that were run from several seeds."""
    exact, inside = curves("learning_gpt_202611")["wfbp"], []
    for scheme, seeds in curves(name).items():
        if scheme == "wfbp" or len(seeds) < 2:
            continue
        found = {seed: cost(exact[seed], one) for seed, one in seeds.items()}
        for seed, own in found.items():
            assert own is not None
            others = [c.typical for s, c in found.items() if s != seed and c]
            inside.append(own.least <= median(others) <= own.most)
    assert len(inside) >= 9
    assert sum(inside) >= 0.9 * len(inside)
