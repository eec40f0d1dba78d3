"""All ranks stop after the same step, whichever message has told them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import gradtide
from gradtide.runtime.notices import Heard, Notices

# A scheme, and after how many steps ranks stop where one asks for it in step 5.
SCHEMES = [
    ("wfbp", 5),
    ("topka2a(0.1)", 5),
    ("dear", 6),
    ("exdyna(0.1, schedule='dear')", 6),
    ("spd_kfac(schedule='dear')", 6),
    ("exdyna(0.1, schedule='local')", 5),
    ("exdyna(0.1, schedule='local', warmup=9)", 5),
    ("diloco(every=4)", 8),
    ("diloco(every=4, delay=1)", 8),
]


def build(scheme: str) -> tuple[nn.Module, Any, gradtide.Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, gradtide.replicate(model, optimizer, scheme)


def stop_in_step_5(scheme: str, who: int, read: bool) -> int:
    """After how many steps this rank stops; it may `read` a parameter after each."""
    model, optimizer, sync = build(scheme)
    before = {r.bucket for r in sync.engine.telemetry.records}
    for step in range(1, 20):
        loss = model(torch.ones(3, 6)).square().sum()
        if step == 5 and dist.get_rank() == who:
            sync.stop()
        loss.backward()
        optimizer.step()
        if read and dist.get_rank() != who:
            float(next(model.parameters()).detach().sum())
        if sync.stopping:
            break
        optimizer.zero_grad()
    asked = {r.bucket for r in sync.engine.telemetry.records} - before
    assert not any("stop" in name for name in asked)
    sync.remove()
    return step


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(("scheme", "last"), SCHEMES)
def test_all_ranks_stop_after_the_same_step(scheme: str, last: int, read: bool) -> None:
    who = last % 3
    assert run_ranks(3, stop_in_step_5, scheme, who, read) == [last] * 3


@pytest.mark.parametrize(("scheme", "last"), SCHEMES)
def test_a_single_rank_stops_as_many_do(scheme: str, last: int) -> None:
    assert run_ranks(1, stop_in_step_5, scheme, 0, False) == [last]


def test_a_signal_may_ask_at_any_moment() -> None:
    def work() -> tuple[int, int]:
        model, optimizer, sync = build("dear")
        signal.signal(signal.SIGUSR1, lambda *_: sync.stop())
        begin, sent = time.monotonic(), 0
        while not sync.stopping and time.monotonic() - begin < 20:
            if sync.num_exchanges == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
                sent = sync.num_exchanges
            model(torch.ones(3, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sync.num_exchanges, sent

    found = run_ranks(3, work)
    assert len({steps for steps, _ in found}) == 1
    assert found[0][0] - found[1][1] == 2


class Unchanged:
    def changed(self) -> bool:
        return False

    def note(self, doubtful: bool) -> None:
        assert not doubtful

    def settle(self) -> None: ...


class Saving:
    begun, torn, failures = 0, 0, 0


def test_a_save_is_whole_when_no_rank_has_it_unfinished() -> None:
    unchanged: Any = Unchanged()
    one, other = Notices(unchanged), Notices(unchanged)
    one.saves, other.saves = Saving(), Saving()

    def exchange() -> Heard:
        told = [sum(each) for each in zip(one.flags(), other.flags(), strict=True)]
        one.hear(told)
        other.hear(told)
        assert one.last == other.last
        return one.last

    assert exchange() == Heard()
    one.saves.begun = other.saves.begun = 1
    other.saves.torn = 1
    assert exchange().whole == 0
    other.saves.torn = 0
    assert exchange().whole == 1
    one.saves.begun = other.saves.begun = 3  # the second is over
    one.saves.torn = other.saves.torn = 1
    assert exchange().whole == 2
    one.saves.failures = 1
    assert exchange() == Heard(failures=1, whole=2)
    one.saves.begun = other.saves.begun = 4  # the third is not, and never will be
    one.saves.torn = 2
    assert exchange() == Heard(failures=1, whole=2)
    one.saves.torn = other.saves.torn = 0
    assert exchange() == Heard(failures=1, whole=4)
    one.stop = True
    assert exchange().stop
    assert exchange().stop  # for good
    assert not one.settled.stop
    one.settle()
    assert one.settled.stop
