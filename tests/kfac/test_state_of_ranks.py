"""K-FAC stopped and resumed: bit for bit, and by another number of ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.kfac.test_product import KFACS, OPTIMIZERS, batch, network, scheme
from tests.ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

import gradtide

Run = tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]


def start(text: str) -> Run:
    model = network()
    opt = OPTIMIZERS["sgd"](model.parameters())
    return model, opt, gradtide.replicate(model, opt, text)


def go(run: Run, steps: range) -> list[float]:
    model, opt, sync = run
    for step in steps:
        x, y = batch(step, dist.get_rank())
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def save(run: Run) -> bytes:
    model, opt, sync = run
    buffer = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict(), sync.state_dict()], buffer)
    return buffer.getvalue()


def load(run: Run, saved: bytes, merged: dict[str, Any] | None = None) -> None:
    model, opt, sync = run
    ours, momentum, state = torch.load(io.BytesIO(saved), weights_only=True)
    model.load_state_dict(ours)
    opt.load_state_dict(momentum)
    sync.load_state_dict(state if merged is None else merged)


@pytest.mark.product(each=12)
@pytest.mark.parametrize(
    ("schedule", "cases"),
    [
        ("WFBP", [(0, "mpd"), (1, "pad"), (3, "dp-seldom"), (3, "spd-eigen")]),
        ("DEAR", [(1, "mpd"), (4, "dp-seldom"), (3, "pad-half"), (3, "pad-seldom")]),
    ],
)
def test_resumed_is_equal(schedule: str, cases: list[tuple[int, str]]) -> None:
    def run() -> list[bool]:
        equal = []
        for stop, kfac in cases:
            text = scheme("Dense()", KFACS[kfac], schedule)
            whole = start(text)
            go(whole, range(stop))
            saved = save(whole)
            resumed = start(text)
            load(resumed, saved)
            steps = range(stop, stop + 4)
            equal.append(go(whole, steps) == go(resumed, steps))
        return equal

    assert all(map(all, run_ranks(2, run)))


def test_another_number_of_ranks_takes_everything_over() -> None:
    names = ("pad", "mpd", "pad-half", "dp")
    texts = [scheme("Dense()", KFACS[name], "WFBP") for name in names]

    def before() -> list[bytes]:
        runs = [start(text) for text in texts]
        for run in runs:
            go(run, range(3))
        return [save(run) for run in runs]

    ranks = run_ranks(3, before)

    def factors(sync: gradtide.Replica) -> dict[tuple[str, str], float]:
        assert sync.kfac is not None
        return {
            (layer.name, kind): float(running.double().sum())
            for layer, curvature in sync.kfac.curvatures.items()
            for kind, running in curvature.running.items()
            if running is not None
        }

    def after(size: int) -> list[dict[tuple[str, str], float]]:
        found = []
        for i, text in enumerate(texts):
            states = [
                torch.load(io.BytesIO(ranks[r][i]), weights_only=True)[2]
                for r in range(3)
            ]
            merged = {k: v for state in states for k, v in state.items()}
            run = start(text)
            load(run, ranks[0][i], None if size == 3 else merged)
            found.append(factors(run[2]))
            go(run, range(3, 5))
            run[2].remove()
        return found

    def union(size: int) -> list[dict[tuple[str, str], float]]:
        # Each rank's own state, where there are as many: only rank 0's is loaded here.
        together = run_ranks(size, after, size)
        return [
            {k: v for rank in together for k, v in rank[i].items()}
            for i in range(len(texts))
        ]

    two, one = union(2), union(1)
    for a, b in zip(two, one, strict=True):
        assert len(a) == len(b) == 6
        assert a == b


def test_a_state_of_another_model_is_refused() -> None:
    def run() -> str:
        text = scheme("Dense()", KFACS["mpd"], "WFBP")
        saved = start(text)
        go(saved, range(2))
        state = saved[2].state_dict()
        model = nn.Sequential(nn.Linear(12, 4))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        other = gradtide.replicate(model, opt, text)
        try:
            other.load_state_dict(state)
        except ValueError as error:
            return str(error)
        return "loaded"

    for message in run_ranks(2, run):
        assert "build the model that was saved" in message
