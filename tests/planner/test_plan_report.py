"""Known cases through the whole planner, as a table, as JSON, and from the shell."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gradtide.cli import app
from gradtide.planner import report
from gradtide.planner.advice import Advice, advise
from gradtide.planner.network import Network
from gradtide.planner.prior import Cost
from gradtide.planner.report import dumps, show, told_of
from gradtide.planner.search import DENSE, equipped, rank
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import Prediction
from gradtide.scheme import parse
from gradtide.simulate.grid import read_trace, replayed

SPARSE = {name: parse(name) for name in ("topk", "topka2a", "oktopk")}


def trace(seconds: float, units: int = 10, numel: int = 2_500_000) -> StepTrace:
    """100 MB of gradients; a third of `seconds` is forward."""
    each = seconds / units
    made = (Unit(f"w{i}", numel, 4, each / 3, each * 2 / 3, 1e-3) for i in range(units))
    return StepTrace("made", tuple(made), 1e-3 * units)


def advice(seconds: float, network: Network) -> Advice:
    choices = rank(trace(seconds), network, SPARSE, tune=False)
    return advise(choices, network.size)


@pytest.mark.product
@pytest.mark.parametrize(
    ("seconds", "ranks", "rate", "expected", "rule"),
    [
        (3.0, 8, 1e10, {"wfbp"}, "overlap suffices"),
        (0.3, 32, 1e10, {"wfbp", "dear"}, "no margin"),
        (0.3, 8, 1e8, {"oktopk", "oktopk(schedule='dear')"}, None),
    ],
)
def test_known_cases(
    seconds: float, ranks: int, rate: float, expected: set[str], rule: str | None
) -> None:
    found = advice(seconds, Network.ideal(ranks, 1, rate))
    assert found.recommended.name in expected
    assert {r.name for r in found.rules} >= ({rule} if rule else set())
    if rule is None:
        assert not found.rules
        assert found.break_even(found.recommended) > 2


def test_two_ranks_gather_what_they_select() -> None:
    found = advice(0.3, Network.ideal(2, 1, 1e8))
    steps = {choice.name: choice.step for choice in found.choices}
    assert steps["topk"] < steps["topka2a"]
    assert "two ranks" in {rule.name for rule in found.rules}


@pytest.mark.parametrize(
    ("made_on", "device", "told"),
    [
        ("v100", "a100", "are those of v100: on this device they are others"),
        ("cpu", "h100", "are those of cpu: on this device they are others"),
        ("NVIDIA H100 PCIe", "h100", ""),
        ("v100", None, ""),
        ("", "a100", ""),  # nobody knows
    ],
)
def test_it_says_whose_compute_is_not_that_of_the_device(
    made_on: str, device: str | None, told: str
) -> None:
    made = replace(trace(0.3), device=made_on)
    there = equipped(Network.ideal(4, 1, 1e9), device, made)
    words = told_of(there, made)
    assert told in words
    assert bool(told) == ("others" in words)


def test_milliseconds_that_are_told_are_those_of_the_device_that_is() -> None:
    for step_ms, others in ((None, True), (68.0, False)):
        made = read_trace("replay:resnet50", step_ms, "a100")
        there = equipped(Network.ideal(4, 1, 1e9), "a100", made)
        assert ("others" in told_of(there, made)) is others


@pytest.mark.slow
def test_many_ranks_refuse_the_gather() -> None:
    found = advice(0.3, Network.ideal(200, 1, 1e9))
    assert [choice.name for choice in found.choices if choice.refused] == ["topk"]
    assert "below a density of 0.0078" in found.choices[-1].refused


def test_json_says_what_the_plan_says() -> None:
    network = Network.ideal(8, 1, 1e8)
    found = advice(0.3, network)
    told = json.loads(dumps(found, trace(0.3), network))
    assert told["format"] == "gradtide plan"
    assert told["recommended"] == found.recommended.name
    assert parse(told["scheme"]) == found.recommended.scheme
    assert [row["name"] for row in told["choices"]] == [c.name for c in found.choices]
    for row, choice in zip(told["choices"], found.choices, strict=True):
        assert parse(row["scheme"]) == choice.scheme
        assert Prediction(**row["prediction"]) == choice.prediction
        assert row["kind"] == choice.kind
        assert (row["break_even"] is None) == (choice.kind != "lossy")
        assert row["reasons"] == found.reasons(choice)
    assert (
        dumps(advice(0.3, network), trace(0.3), network)
        == json.dumps(told, indent=1) + "\n"
    )


def test_the_table_shows_all_dense_and_some_lossy_schemes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "MOST", 1)
    network = Network.ideal(200, 1, 1e9)
    found = advice(0.3, network)
    file = StringIO()
    Console(width=200, file=file).print(show(found, trace(0.3), network))
    text = file.getvalue()
    rows = {line.split()[0] for line in text.splitlines() if line.split()}
    assert rows >= {*DENSE, "oktopk"}
    assert "topka2a" not in rows
    assert "of no use here: topk: sends" in text
    assert found.verdict[:40] in text


# - From the shell ---------------------------------------------------------------------


def call(folder: Path, **changed: str | None) -> Result:
    file = folder / "trace.json"
    trace(0.3).save(file)
    options: dict[str, str | None] = {
        "--trace": str(file),
        "--ranks": "8",
        "--rate": "1gbit",
        "--schemes": "topk,oktopk(0.001)",
        **{f"--{name.replace('_', '-')}": value for name, value in changed.items()},
    }
    words = [w for k, v in options.items() if v is not None for w in (k, v)]
    return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "200"})


def test_the_command(tmp_path: Path) -> None:
    Network.ideal(4, 2, 1e9).save(tmp_path / "network.json")
    result = call(
        tmp_path,
        network=str(tmp_path / "network.json"),
        ranks="16",
        json=str(tmp_path / "plan.json"),
    )
    assert result.exit_code == 0, result.output
    assert "8 hosts x 2 ranks" in result.output
    told: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    assert {row["name"] for row in told["choices"]} == {
        *DENSE,
        "topk",
        "oktopk(0.001)",
    }


def test_a_link_is_as_slow_as_its_slower_way(tmp_path: Path) -> None:
    found = [call(tmp_path, **how) for how in ({"rate": "1gbit", "up": "50mbit"}, {})]
    slow = call(tmp_path, rate="50mbit")
    assert found[0].output == slow.output != found[1].output
    vary = call(tmp_path, rate="50mbit", stragglers="20%")
    assert "8 hosts x 1 ranks, whose steps vary by 20 %" in vary.output
    lost = call(tmp_path, rate="50mbit", delay="40ms", loss="0.1%")
    assert "with links that lose 0.1 % of packets" in lost.output


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": None}, "say for which network"),
        ({"rate": None}, "say for which network"),
        ({"rate": "fast"}, "not a rate"),
        ({"up": "none"}, "a link has a limit"),
        ({"up": "20mbit", "rate": None}, "say --rate"),
        ({"stragglers": "often"}, "is no share"),
        ({"loss": "some"}, "is no share"),
        ({"loss": "100%"}, "nothing arrives"),
        ({"loss": "1%", "internet": "transatlantic", "rate": None}, "leave out"),
        ({"ranks": "1"}, "nobody to average with"),
        ({"ranks": "9", "ranks_per_host": "2"}, "choose a multiple"),
        ({"schemes": "nonsense"}, "nonsense"),
        ({"network": "nowhere.json"}, "cannot read"),
    ],
)
def test_refusals(tmp_path: Path, changed: dict[str, str | None], words: str) -> None:
    result = call(tmp_path, **changed)
    assert result.exit_code == 2
    assert words in result.output


def test_k_fac_is_ranked_by_the_steps_that_it_saves() -> None:
    asked = {name: parse(name) for name in ("topk", "spd_kfac")}
    network = Network.ideal(4, 1, 1e9)
    found = advise(rank(replayed("resnet50", 200.0), network, asked), 4)
    told = StringIO()
    Console(file=told, width=100).print(
        show(found, replayed("resnet50", 200.0), network)
    )
    assert "factor_comm" in told.getvalue()
    assert "spd_kfac" not in told.getvalue().partition("of no use here")[2]
    assert "60 % fewer (-83 to -27 % on 2 tasks)" in " ".join(told.getvalue().split())
    choices = json.loads(dumps(found, replayed("resnet50", 200.0), network))["choices"]
    (curved,) = (choice for choice in choices if choice["name"] == "spd_kfac")
    assert not curved["refused"]
    assert curved["scheme"] == repr(parse("spd_kfac"))  # its fusion is not tuned
    assert curved["prediction"]["breakdown"]["inverse_comp"] > 0
    assert all(c["prediction"]["busy"] is None for c in choices if c is not curved)


def test_no_k_fac_by_default() -> None:
    names = {choice.name for choice in rank(trace(0.1), Network.ideal(4, 1, 1e9))}
    assert not any("kfac" in name for name in names)


@pytest.mark.parametrize("margin", [0.4, math.inf])
def test_what_has_no_end_is_none_in_the_file(margin: float) -> None:
    network = Network.ideal(8, 1, 1e8)
    choices = rank(trace(0.3), network, SPARSE, tune=False)
    known = {"topk": Cost(margin, 0.1, math.inf, 1)}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for found in (advise(choices, 8, 0.4), advise(choices, 8, known=known)):
        text = dumps(found, trace(0.3), network)
        told = json.loads(text, parse_constant=refuse)
        costs = {each["name"]: each["cost"] for each in told["choices"]}
    assert costs["topk"]["most"] is None
