"""Every contestant trains the same model; some with rounded gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch.nn.utils import parameters_to_vector

from gradtide.lab import workloads
from gradtide.lab.contestants import BASELINES, enter, ring_bytes

NAMES = (*BASELINES, "wfbp", "dear(wire='bf16')")
NUM_STEPS = 4


def _train() -> dict[str, np.ndarray]:
    rank, size = dist.get_rank(), dist.get_world_size()
    trained = {}
    for name in NAMES:
        workload = workloads.build("digits", rank=rank, size=size)
        contestant = enter(name, workload, size)
        for step in range(NUM_STEPS):
            workload.loss(contestant.module, workload.batch(step)).backward()
            contestant.clip(1.0)
            workload.optimizer.step()
            workload.optimizer.zero_grad()
        contestant.flush()
        final = parameters_to_vector(workload.model.parameters())
        trained[name] = final.detach().numpy()
        contestant.leave()
    return trained


def test_all_train_the_same_model() -> None:
    first, second = run_ranks(2, _train)
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name], name)
        rounding = 1e-6 if name in ("ddp", "wfbp") else 3e-3
        np.testing.assert_allclose(first[name], first["ddp"], 0, rounding, err_msg=name)
    assert not np.array_equal(first["ddp(wire='bf16')"], first["ddp"])


@pytest.mark.parametrize(
    ("dtype", "width"), [(None, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_ring_bytes(dtype: torch.dtype | None, width: int) -> None:
    workload = workloads.build("digits", rank=0, size=4)
    assert ring_bytes(workload, 4, dtype) == 2 * 3 / 4 * 9978 * width
