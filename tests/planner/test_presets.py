"""Processors by name: from data sheets, until a profile has measured one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from gradtide.lab.options import Processor
from gradtide.planner.data.presets import OTHER, PRESETS, like, preset
from gradtide.planner.network import Device, Network
from gradtide.planner.search import equipped, rank
from gradtide.planner.trace import StepTrace, load
from gradtide.planner.watch import Watch
from gradtide.scheme import parse
from gradtide.simulate.grid import read_trace


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-PCIE-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX A1000", OTHER),
        ("NVIDIA L40S", OTHER),
        ("Tesla V100S-PCIE-32GB", "v100"),
        ("AMD Instinct MI300X", OTHER),
        ("cpu", "cpu"),
        ("", "cpu"),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(name: str, key: str) -> None:
    assert like(name) is PRESETS[key]


def test_the_help_and_the_page_name_them_all() -> None:
    (option,) = get_args(Processor)[1:]
    assert option.help == f"Whose times to assume: {', '.join(PRESETS)}."
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    assert ", ".join(f"`{name}`" for name in PRESETS) in page


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"--device gpu: choose one of cpu, t4, .*"):
        preset("gpu")


def test_a_profile_takes_the_place_of_a_preset_and_an_option_that_of_both() -> None:
    trace = replace(read_trace("replay:resnet50"), device="NVIDIA H100 PCIe")
    assumed = Network.ideal(4, 1, 1e9)
    measured = replace(assumed, device=Device(), interference=1.5)
    assert equipped(assumed, None, trace).device is PRESETS["h100"].device
    assert equipped(measured, None, trace) is measured
    there = equipped(measured, "V100", trace)
    assert there.device is PRESETS["v100"].device
    assert there.interference == PRESETS["v100"].slowed
    assert there.starved == PRESETS["v100"].starved


def test_a_trace_says_where_it_was_made(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = Watch(model, optimizer, steps=1, warmup=0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trace = watch.trace("small")
    assert trace.device == "cpu"
    trace.save(tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == trace


def on(name: str, trace: StepTrace) -> dict[str, float]:
    there = Network.ideal(16, 4, 1e10).on(preset(name))
    schemes = {text: parse(text) for text in ("exdyna(0.01, warmup=160)",)}
    ranked = rank(trace, there, schemes, tune=False)
    return {choice.name: choice.prediction.apply for choice in ranked}


@pytest.mark.slow
def test_a_gpus_update_is_not_that_of_a_core() -> None:
    trace = read_trace("replay:bert-large")
    core, card = on("cpu", trace), on("v100", trace)
    assert core["wfbp"] > 0.6
    assert card["wfbp"] == pytest.approx(0.012, rel=0.1)
