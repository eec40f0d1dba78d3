"""A process that is forked from a rank reads what is there, and cannot exchange."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

import gradtide

X = torch.ones(4, 8)


def _status(child: Callable[[], bool], seconds: float = 20.0) -> int | None:
    """The exit status of a child: 0 if it came to True; None if it hangs."""
    process = os.fork()
    if not process:
        status = 2
        try:
            status = 0 if child() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return None


@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topka2a(0.5, schedule='dear')"])
def test_it_reads_parameters_with_all_updates(scheme: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, optimizer, scheme)
        for _ in range(4):  # the first ones are not deferred
            optimizer.zero_grad()
            sync.flush()
            before = model.weight.detach().clone()
            model(X).sum().backward()
            optimizer.step()
        read, write = os.pipe()

        def child() -> bool:
            weight = model.state_dict()["weight"].contiguous()
            os.write(write, weight.numpy().tobytes())
            return True

        assert _status(child) == 0
        sync.flush()
        held = os.read(read, 1 << 16)
        assert held == model.weight.detach().numpy().tobytes()
        assert not torch.equal(before, model.weight)
        os.close(read)
        os.close(write)

    run_ranks(2, run)


def test_what_it_would_exchange_is_an_error() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, optimizer)
        model(X).sum().backward()
        optimizer.step()

        def child() -> bool:
            with pytest.raises(RuntimeError, match="was forked from one of the ranks"):
                model(X).sum().backward()
            return True

        assert _status(child) == 0
        model(X).sum().backward()  # and the rank trains on
        optimizer.step()
        sync.flush()

    run_ranks(2, run)
