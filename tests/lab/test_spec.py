"""What is found wrong before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradtide.lab.spec import Spec, check, split_schemes

SPEC = Spec(("ddp", "dear"), "replay:resnet50", 4, 1, 1e8, steps=10, rounds=3)


def test_split_at_top_level_commas_only() -> None:
    text = "ddp, Scheme(Dense(wire='bf16'), schedule=DEAR),Dense([1, 2]),dear"
    assert split_schemes(text) == (
        "ddp",
        "Scheme(Dense(wire='bf16'), schedule=DEAR)",
        "Dense([1, 2])",
        "dear",
    )


@pytest.mark.parametrize("text", ["", "ddp,", ",ddp", "ddp,,dear"])
def test_empty_scheme(text: str) -> None:
    with pytest.raises(ValueError, match="empty scheme"):
        split_schemes(text)


def test_blocks_sum_to_the_steps() -> None:
    assert SPEC.blocks() == [4, 3, 3]


def test_a_good_spec_passes() -> None:
    check(SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schemes": ("ddp", "nonsense")}, "'nonsense' is no scheme.*wfbp.*ddp"),
        ({"schemes": ("Scheme(Dense(wire=3))",)}, "wire"),
        ({"schemes": ("dear", "ddp", "dear")}, "names dear twice"),
        ({"workload": "imagenet"}, "no workload 'imagenet': choose one of gpt"),
        ({"workload": "gpt", "step_ms": 5.0}, "really computes"),
        ({"step_ms": -1.0}, "step_ms is -1.0"),
        ({"trace": Path("/nowhere.json")}, "cannot read the trace"),
        ({"trace": Path("/nowhere.json"), "step_ms": 5.0}, "give one"),
        ({"warmup": 0}, "--warmup 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"steps": 2}, "at least one step a round"),
        ({"hosts": 1}, "2 or more"),
    ],
)
def test_refusals_say_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(replace(SPEC, **change))


def test_a_trace_that_is_wrong_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(ValueError, match="no times for"):
        check(replace(SPEC, trace=tmp_path / "trace.json"))
