"""A rank's device, and what joins ranks that share one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradtide.lab import devices
from gradtide.lab.devices import backend, device_of, own_device, placed
from gradtide.lab.spec import Spec, check
from gradtide.lab.workloads import build


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As if there were two GPUs; those that became the current one."""
    current: list[torch.device] = []
    there = SimpleNamespace(device_count=lambda: 2, set_device_index=current.append)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(device=torch.device))
    monkeypatch.setattr(devices.torch, "accelerator", there, raising=False)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRADTIDE_LAB_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    return current


def test_ranks_have_devices_in_turn(
    two: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found.append(own_device("cuda"))
    assert found == two == [torch.device("cuda", i) for i in (0, 1, 0)]
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device("cpu") == torch.device("cpu")
    assert len(two) == 4


@pytest.mark.parametrize(
    ("device", "ranks", "emulated", "expected"),
    [
        ("cpu", 1, False, "gloo"),
        ("cuda", 2, False, None),
        ("cuda", 3, False, "gloo"),
        ("cuda", 1, True, "gloo"),
    ],
)
def test_what_joins_ranks(
    device: str,
    ranks: int,
    emulated: bool,
    expected: str | None,
    two: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if emulated:
        monkeypatch.setenv("GRADTIDE_LAB_HOSTS", "2")
    assert backend(device) == expected


@pytest.mark.parametrize("name", ["gpt-small", "digits", "mlp"])
def test_batches_follow_the_model(name: str) -> None:
    workload = build(name, 0, 2)
    model = workload.model.to("meta")
    assert device_of(model).type == "meta"
    assert all(part.is_meta for part in placed(workload.batch(0), model))
    loss = workload.loss(model, workload.batch(0))
    assert loss.is_meta


def test_what_has_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("ddp", "dear"), "replay:gpt2", 2, 1, None
    with pytest.raises(ValueError, match="torch finds no such device here"):
        check(Spec(*place, 3, device="meta"))
    monkeypatch.setattr("gradtide.lab.spec.check_device", lambda name: None)
    with pytest.raises(ValueError, match="waits in place of computing"):
        check(Spec(*place, 3, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-small", "digits"])
def test_a_workload_trains_on_a_gpu(name: str) -> None:
    spec = Spec(("ddp", "dear"), name, 2, 1, None, 3, device="cuda")
    check(spec)
    workload = spec.build(0)
    first = workload.loss(workload.model, workload.batch(0))
    first.backward()
    workload.optimizer.step()
    assert first.is_cuda
    assert workload.loss(workload.model, workload.batch(0)) < first
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model)["loss"] > 0
