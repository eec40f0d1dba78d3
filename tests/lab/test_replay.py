"""The replayed workloads: shapes, order, waits, gradients and traces."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradtide.lab.workloads import build, replay, shapes

pytestmark = pytest.mark.alone

COUNTS = {
    "resnet50": (25_557_032, 161),
    "densenet201": (20_013_928, 604),
    "bert-base": (109_482_240, 199),
    "bert-large": (335_141_888, 391),
    "bert-base-pretraining": (110_106_428, 206),
    "bert-large-pretraining": (336_226_108, 398),
    "gpt2": (124_439_808, 148),
    "gpt-30m": (29_938_688, 100),
}


def small_network(
    monkeypatch: pytest.MonkeyPatch, work: tuple[int, ...] = (1, 0, 2)
) -> list[shapes.Unit]:
    """Put three small units in resnet50's place, and a small pool."""
    parts = [
        shapes.Unit("stem", (("weight", (8, 4)),), work[0]),
        shapes.Unit("stage.0.norm", (("weight", (4,)), ("bias", (4,))), work[1]),
        shapes.Unit("stage.0.head", (("weight", (2, 3, 2)),), work[2]),
    ]
    monkeypatch.setitem(shapes.ARCHITECTURES, "resnet50", lambda: iter(parts))
    monkeypatch.setattr(replay, "SPARE", 1 << 16)
    return parts


@pytest.mark.parametrize("architecture", COUNTS)
def test_counts(architecture: str) -> None:
    units = shapes.units(architecture)
    tensors = [shape for unit in units for _, shape in unit.shapes]
    assert (sum(map(math.prod, tensors)), len(tensors)) == COUNTS[architecture]
    assert len({unit.name for unit in units}) == len(units)
    assert all(unit.work > 0 for unit in units)


@pytest.mark.parametrize(
    ("architecture", "giga"),
    # Published counts of multiply-adds (4.09 G) or known closed forms, times two.
    [("resnet50", 8.2), ("bert-base", 22.4), ("gpt2", 291.0)],
)
def test_work_is_that_of_the_network(architecture: str, giga: float) -> None:
    work = sum(unit.work for unit in shapes.units(architecture))
    assert work / 1e9 == pytest.approx(giga, rel=0.03)


def test_names_and_shapes_in_order_of_registration() -> None:
    model = build("replay:resnet50", rank=0, size=1).model
    named = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert len(named) == 161
    assert named[0] == ("conv1.weight", (64, 3, 7, 7))
    assert named[12:14] == [
        ("layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        ("layer1.0.downsample.1.weight", (256,)),
    ]
    assert named[-1] == ("fc.bias", (1000,))


def test_units_run_in_order_and_gradients_come_in_reverse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units = small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=0.1)
    seen: list[str] = []
    for name, module in workload.model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    for name, parameter in workload.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append(name)
        )
    workload.loss(workload.model, workload.batch(0)).backward()
    names = [unit.name for unit in units]
    assert seen[:3] == names
    assert [name.rpartition(".")[0] for name in seen[3:]] == [
        "stage.0.head",
        "stage.0.norm",
        "stage.0.norm",
        "stem",
    ]


def test_waits_sum_to_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=15.0)
    assert workload.waits == pytest.approx((0.005, 0.010))
    begin = time.perf_counter()
    for step in range(10):
        workload.loss(workload.model, workload.batch(step)).backward()
    seconds = time.perf_counter() - begin
    assert seconds >= 0.149  # at most MIN_WAIT is still owed
    assert seconds < 0.3  # generous: the machine may be busy


def test_short_waits_are_put_together_and_oversleeping_is_deducted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        slept.append(seconds)
        clock += seconds + 1e-4

    fake = SimpleNamespace(sleep=sleep, perf_counter=lambda: clock)
    monkeypatch.setattr(replay, "time", fake)
    pace = replay.Pace()
    for _ in range(10):
        pace.wait(0.4e-3)
    assert slept == pytest.approx([1.2e-3, 1.1e-3, 1.1e-3])
    assert pace.owed == pytest.approx(4e-3 - clock)


def test_time_in_hooks_is_added_to_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=15.0)
    for parameter in workload.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.01))
    begin = time.perf_counter()
    workload.loss(workload.model, workload.batch(0)).backward()
    assert time.perf_counter() - begin >= 0.014 + 4 * 0.01


def test_a_stall_is_not_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0])
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(replay, "time", fake)
    pace = replay.Pace()
    with pace.counted():
        pass
    assert pace.owed == -replay.MAX_CREDIT


def gradients(rank: int, step: int, seed: int = 0) -> list[torch.Tensor]:
    workload = build("replay:resnet50", rank=rank, size=2, seed=seed, step_ms=0.1)
    workload.loss(workload.model, workload.batch(step)).backward()
    return [p.grad for p in workload.model.parameters() if p.grad is not None]


def test_gradients_depend_on_rank_and_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_network(monkeypatch)
    reference = gradients(rank=0, step=5)
    assert len(reference) == 4
    for same, again in zip(reference, gradients(rank=0, step=5), strict=True):
        assert torch.equal(same, again)
    for rank, step, seed in ((1, 5, 0), (0, 6, 0), (0, 5, 1)):
        others = gradients(rank, step, seed)
        assert not any(map(torch.equal, reference, others))


def test_gradients_are_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to a gradient in place, the pool stays as it was."""
    small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=0.1)
    assert isinstance(workload.model, replay.Replay)
    pool = workload.model.order[0].pool.noise
    before = pool.clone()
    for step in range(3):
        workload.loss(workload.model, workload.batch(step)).backward()
        for parameter in workload.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
    assert torch.equal(pool, before)


def test_noise_is_heavy_tailed_and_correlated_between_ranks() -> None:
    one, two = (replay.Pool(1, seed=0, rank=rank).noise[:1_000_000] for rank in (0, 1))
    assert torch.corrcoef(torch.stack([one, two]))[0, 1] == pytest.approx(
        1 / 3, abs=0.1
    )
    kurtosis = one.pow(4).mean() / one.square().mean() ** 2
    assert kurtosis > 15  # 3 for a normal variable, 35 for this one


def test_frozen_steps_leave_parameters_near_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=0.1)
    for step in range(5):
        workload.loss(workload.model, workload.batch(step)).backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    assert all(0 < p.abs().max() < 1e-5 for p in workload.model.parameters())


def test_global_random_state_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    before = torch.get_rng_state()
    gradients(rank=0, step=0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_tied_head_waits_and_has_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        shapes.Unit("wte", (("weight", (4, 2)),), 1),
        shapes.Unit("lm_head", (), 9),
    ]
    monkeypatch.setitem(shapes.ARCHITECTURES, "gpt2", lambda: iter(parts))
    monkeypatch.setattr(replay, "SPARE", 1 << 16)
    workload = build("replay:gpt2", rank=0, size=1, step_ms=10.0)
    begin = time.perf_counter()
    workload.loss(workload.model, workload.batch(0)).backward()
    assert time.perf_counter() - begin >= 0.009
    assert [name for name, _ in workload.model.named_parameters()] == ["wte.weight"]


def test_waits_work_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    workload = build("replay:resnet50", rank=0, size=1, step_ms=0.1)
    with torch.no_grad():
        assert workload.loss(workload.model, workload.batch(3)).item() == 0
    assert isinstance(workload.model, nn.Module)


def entries(**changes: Any) -> list[dict[str, Any]]:
    names = ("stem", "stage.0.norm", "stage.0.head")
    seconds = {"forward_seconds": 0.001, "backward_seconds": 0.002}
    first, *others = [{"name": name, **seconds} for name in names]
    return [*others, {**first, **changes}]


def test_a_trace_gives_the_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_network(monkeypatch)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(entries(forward_seconds=0.5)))
    workload = build("replay:resnet50", rank=0, size=1, trace=path)
    assert workload.waits == pytest.approx((0.502, 0.006))
    assert isinstance(workload.model, replay.Replay)
    assert workload.model.order[0].timing == (0.5, 0.002)
    with pytest.raises(ValueError, match="give one"):
        build("replay:resnet50", rank=0, size=1, trace=path, step_ms=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"units": []}', "holds a dict: a trace is a list"),
        ("[3]", "unit 0: expected an object"),
        ('[{"name": "stem"}]', "no forward_seconds and no backward_seconds"),
        (json.dumps(entries(name=3)), "name is 3"),
        (json.dumps(entries(forward_seconds="1")), r"\(stem\): forward_seconds is '1'"),
        (json.dumps(entries(backward_seconds=-1)), "backward_seconds is -1"),
        (json.dumps(entries(forward_seconds=math.nan)), "forward_seconds is nan"),
        (json.dumps(entries()[:2]), "no times for stem"),
        (json.dumps([*entries(), *entries()]), "stage.0.norm occurs twice"),
        (json.dumps([*entries(), *entries(name="tail")[2:]]), "no such units: tail"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, message: str
) -> None:
    small_network(monkeypatch)
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        build("replay:resnet50", rank=0, size=1, trace=path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the trace"):
        build("replay:resnet50", rank=0, size=1, trace=tmp_path / "none.json")
