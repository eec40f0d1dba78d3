"""What programs say to DistributedDataParallel, and ask of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from gradtide.ddp_arguments import (
    Log,
    logging_data,
    only_device,
    own_group,
    reducer,
    sends_buffers,
    wires_of_hooks,
)


@pytest.mark.parametrize(
    ("sync", "broadcast", "expected"),
    [
        (None, None, True),
        (False, None, False),
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_who_sends_buffers(
    sync: bool | None, broadcast: bool | None, expected: bool
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert sends_buffers(sync, broadcast) is expected
    words = [str(one.message) for one in told]
    assert len(words) == (broadcast is not None)
    assert all("use forward_sync_buffers" in one for one in words)


def test_the_one_device() -> None:
    for none in (None, []):
        assert only_device(none, "cpu") is None
    assert only_device([2], "cuda") == [2]
    assert only_device([torch.device("cuda", 1)], "cuda") == [1]
    for ids, kind in (([0], "cpu"), ([0, 1], "cuda")):
        with pytest.raises(ValueError, match="one GPU, or None"):
            only_device(ids, kind)
    with pytest.raises(TypeError, match="by name, scheme='dear'"):
        only_device("dear", "cpu")


def test_the_group() -> None:
    assert own_group(None, None) is None  # torch.distributed is not initialised
    with pytest.raises(TypeError, match="process_group is a list"):
        own_group([0, 1], None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        own_group(None, SimpleNamespace(ndim=2))
    group = object()
    mesh = SimpleNamespace(ndim=1, get_group=lambda mesh_dim: (group, mesh_dim))
    assert own_group(None, mesh) == (group, 0)


def test_hooks_of_torchs_that_a_wire_stands_for() -> None:
    wires = wires_of_hooks()
    assert wires[default_hooks.bf16_compress_hook] == "bf16"
    assert wires[default_hooks.allreduce_hook] is None
    assert default_hooks.fp16_compress_wrapper not in wires


def test_what_is_logged() -> None:
    net = nn.Linear(2, 3)
    net.bias.requires_grad_(False)
    log: Any = Log()
    ddp: Any = SimpleNamespace(module=net, device_ids=[1], output_device=None)
    for name in "broadcast_buffers", "find_unused_parameters", "static_graph":
        setattr(ddp, name, True)
    ddp.gradient_as_bucket_view, ddp.logger = False, log
    engine = SimpleNamespace(group=SimpleNamespace(size=4, rank=1))
    replica: Any = SimpleNamespace(engine=engine, scheme="wfbp", num_exchanges=5)
    data = logging_data(ddp, replica, None)
    assert (data["world_size"], data["rank"], data["iteration"]) == (4, 1, 5)
    assert (data["num_parameter_tensors"], data["total_parameter_size_bytes"]) == (
        1,
        24,
    )
    assert (data["device_ids"], data["output_device"]) == ("1", -1)
    assert not {"comm_hook", "has_error"} & data.keys()
    log.set_error_and_log("no")
    data = logging_data(ddp, replica, "a hook")
    assert (data["comm_hook"], data["has_error"], data["error"]) == ("a hook", 1, "no")


def test_what_stands_for_a_reducer() -> None:
    called = []
    found = reducer(lambda: called.append(1))
    found.prepare_for_backward([])
    assert called == [1]
    found.prepare_for_forward()
    assert not found._rebuild_buckets()
    assert called == [1]
