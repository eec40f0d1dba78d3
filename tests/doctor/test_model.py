"""Models in a few words, and what the planner says of them."""

from __future__ import annotations

import pytest

from gradtide.doctor.advice import gain, parse_model, rule
from gradtide.planner.network import Network


def test_a_model_is_so_many_parameters_and_seconds() -> None:
    found = parse_model("params=25M, step=300ms")
    assert found.numel == 25_000_000
    assert found.compute == pytest.approx(0.3)
    assert parse_model("step=2s,params=1.5b").numel == 1_500_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "params=25M",
        "params=25M,step=300",
        "params=x,step=1s",
        "a=1,params=1M",
        "params=1,step=1s",
        "params=1e30,step=1s",
        "params=1M,step=0s",
        "params=\uff11M,step=1s",  # a full-width digit
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="--model"):
        parse_model(text)


def test_the_gain_is_that_of_the_planner() -> None:
    model = parse_model("params=10M,step=200ms")
    words, steps = gain(model, Network.ideal(4, 1, 1e8))
    (recommended,) = (name for name in steps if f": use {name}: " in words)
    assert recommended != "wfbp"
    assert steps[recommended] < steps["wfbp"]
    assert "times as long" in words
    words, _ = gain(model, Network.ideal(4, 1, 1e11))
    assert "Don't compress" in words


def test_without_a_model_a_rule_is_left() -> None:
    # 2 x 3/4 x 4 MB at 100 Mb/s
    assert "a million parameters takes 480 ms" in rule(Network.ideal(4, 1, 1e8))
    assert "--model" in rule(Network.ideal(1, 4, 1e8))
