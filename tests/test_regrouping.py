"""A rank that is counted by somebody who knows of it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtide
from gradtide.core.membership import Member, Roster, Standing
from gradtide.core.transport import CommunicationError
from gradtide.regrouping import Regrouping
from gradtide.runtime import regroup
from gradtide.transport import generations
from tests.ranks import run_ranks


class Alone:
    """Counts one rank; `fresh` has it meet anew at the next step."""

    name = "a"

    def __init__(self) -> None:
        self._store, self._where = generations.open_store()
        self.asked: list[Standing] = []
        self.formed = 0
        self.fresh = False

    def ask(self, standing: Standing) -> None:
        self.asked.append(standing)

    def answer(self) -> Roster | None:
        if not self.asked:
            return None
        standing = Standing(self.asked[-1].progress, self.fresh)
        self.fresh = False
        return Roster(str(len(self.asked)), [Member("a", self._where, standing)])

    def form(self, roster: Roster) -> None:
        self.formed += 1
        generations.form(roster.number, [self._where], 0, 20.0)

    def close(self) -> None: ...


def trained(scheme: str) -> tuple[nn.Module, Any, Any, Alone, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = Alone()
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members)

    def step() -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, sync, members, step


def _lost(scheme: str) -> list[Any]:
    """A step that is lost changes nothing, and the next one is made."""
    model, _, sync, members, step = trained(scheme)
    step()
    step()
    sync.flush()
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    sync._session.training.lose()
    assert all(p.grad is not None for p in model.parameters())
    sync.optimizer.step()
    sync.optimizer.zero_grad()
    same = all(map(torch.equal, before, model.parameters()))
    step()
    sync.flush()
    moved = not any(map(torch.equal, before, model.parameters()))
    return [same, moved, sync.metrics()["step"], members.formed, members.asked[-1].lost]


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_a_lost_step_is_none(scheme: str) -> None:
    ((same, moved, steps, formed, lost),) = run_ranks(1, _lost, scheme)
    assert (same, moved, steps, formed, lost) == (True, True, 3, 2, False)


def _inside_no_sync() -> list[Any]:
    model, _, sync, members, step = trained("wfbp")
    step()
    with sync.no_sync():
        model(torch.ones(2, 6)).sum().backward()
        sync._session.training.lose()
        model(torch.ones(2, 6)).sum().backward()
        quiet = sync._session.training.no_sync_active
    return [members.formed, quiet, sync._session.training.no_sync_active]


def test_ranks_that_meet_inside_no_sync_stay_in_it() -> None:
    ((formed, inside, outside),) = run_ranks(1, _inside_no_sync)
    assert (formed, inside, outside) == (2, True, False)


def _kept(scheme: str) -> list[Any]:
    """What ranks that meet anew go on from: counts, residuals, the outer momentum."""
    _, _, sync, members, step = trained(scheme)
    for _ in range(5):
        step()
    members.fresh = True
    own = sync._session.trained
    before = regroup.take(own, 0)
    found: list[dict[str, Tensor]] = [before.residuals]
    step()
    after = sync._session.trained
    assert after is not own
    found.append(regroup.take(after, 0).residuals)
    counts = {k: int(v) for k, v in before.counts.items()}
    now = after.placement.buckets[0].payload.state
    return [counts, {k: int(now[k]) for k in counts}, members.formed, before.begun]


def test_a_warm_up_goes_on_where_it_was() -> None:
    scheme = "topk(0.2, warmup=20)"
    ((before, after, formed, begun),) = run_ranks(1, _kept, scheme)
    assert formed == 2
    assert not begun
    assert before
    assert all(after[key] == count + 1 for key, count in before.items())


def test_only_exchanges_that_fail_are_survived() -> None:
    class Training:
        lost, num_steps, told = False, 3, 0

        def lose(self) -> None:
            self.lost = True

    def fails(error: Exception) -> None:
        raise error

    training: Any = Training()
    session: Any = None
    regrouping = Regrouping(session, Alone())
    guarded = regrouping.surviving(training, fails)
    with pytest.raises(ValueError, match="other"):
        guarded(ValueError("other"))
    assert guarded(CommunicationError("gone")) is None
    assert training.lost
    assert regrouping.lost_steps == 1
    assert guarded(ValueError("nothing is called any more")) is None
