"""A rank that is counted by somebody who knows of it alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtide
from gradtide import elastic
from gradtide.core.membership import Member, Roster, Standing
from gradtide.core.step import Stage
from gradtide.core.transport import CommunicationError
from gradtide.regrouping import Regrouping
from gradtide.runtime import regroup
from gradtide.transport import generations
from tests.lighthouse import run
from tests.ranks import run_ranks


class Alone:
    """Counts one rank; `fresh` has it meet anew at the next step."""

    name = "a"
    grace: Any = None
    patience = 20.0

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


def trained(
    scheme: str, grace: Any = None
) -> tuple[nn.Module, Any, Any, Alone, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = Alone()
    members.grace = grace
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members)

    def step() -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, sync, members, step


def _lost(name: str, tell: Any, scheme: str) -> list[Any]:
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
    ((same, moved, steps, formed, lost),) = run(_lost, "a", scheme).values()
    assert (same, moved, steps, formed, lost) == (True, True, 3, 2, False)


def _inside_no_sync(name: str, tell: Any) -> list[Any]:
    model, _, sync, members, step = trained("wfbp")
    step()
    with sync.no_sync():
        model(torch.ones(2, 6)).sum().backward()
        sync._session.training.lose()
        model(torch.ones(2, 6)).sum().backward()
        quiet = sync._session.training.no_sync_active
    return [members.formed, quiet, sync._session.training.no_sync_active]


def test_ranks_that_meet_inside_no_sync_stay_in_it() -> None:
    ((formed, inside, outside),) = run(_inside_no_sync, "a").values()
    assert (formed, inside, outside) == (2, True, False)


def _kept(name: str, tell: Any, scheme: str) -> list[Any]:
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
    ((before, after, formed, begun),) = run(_kept, "a", scheme).values()
    assert formed == 2
    assert not begun
    assert before
    assert all(after[key] == count + 1 for key, count in before.items())


def _accumulated(name: str, tell: Any, anew: bool) -> list[float]:
    """What two backward passes make, between which ranks come."""
    model, _, sync, members, step = trained("wfbp")
    step()
    members.fresh = anew
    with sync.no_sync():
        model(torch.ones(2, 6)).sum().backward()
    step()
    assert members.formed == 1 + anew
    found: list[float] = model.weight.flatten().tolist()
    return found


def test_gradients_that_were_accumulated_stay_when_ranks_come() -> None:
    (plainly,) = run(_accumulated, "a", False).values()
    (anew,) = run(_accumulated, "a", True).values()
    assert anew == plainly


def _compiled(name: str, tell: Any) -> list[Any]:
    """What was compiled before ranks met anew is still known to be."""
    _, _, sync, members, step = trained("dear")
    step()
    sync._session.training.placement.compile()
    members.fresh = True
    step()
    return [members.formed, sync._session.training.placement.compiled]


def test_it_stays_known_that_something_is_compiled() -> None:
    (found,) = run(_compiled, "a").values()
    assert found == [2, True]


def _deferred(name: str, tell: Any) -> list[Any]:
    """A step was counted, and its update is lost."""
    model, _, sync, _, step = trained("dear")
    for _ in range(3):
        step()
    sync.flush()
    before = [p.detach().clone() for p in model.parameters()]
    step()
    training = sync._session.training
    due = [bucket.stage for bucket in training.placement.buckets]
    training.lose()
    steps = sync.meet()
    same = all(map(torch.equal, before, model.parameters()))
    return [{*due} == {Stage.DUE}, steps, same]


def test_a_step_whose_update_is_lost_is_not_counted() -> None:
    (found,) = run(_deferred, "a").values()
    assert found == [True, 3, True]


def _refused(name: str, tell: Any) -> list[str]:
    _, _, sync, _, _ = trained("wfbp")
    found = []
    calls: list[Callable[[], Any]] = [
        lambda: sync.join().__enter__(),
        lambda: sync.use_comm_hook(None, lambda state, bucket: None),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a") as error:
            call()
        found.append(str(error.value))
    return found


def test_what_does_not_go_with_ranks_that_come_and_go_is_refused() -> None:
    (found,) = run(_refused, "a").values()
    assert "ranks that come and go" in found[0]
    assert "process group" in found[1]


class Asks:
    """Others wait for this rank, and nobody sends a word."""

    seconds = 5.0
    asked: int | None = None

    def waiting(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _asked(name: str, tell: Any) -> list[Any]:
    model, _, sync, members, step = trained("local_sgd(every=8)", grace := Asks())
    found = []
    for asked in (None, None, 6, None, 8, None, 8, 8):
        grace.asked = asked
        step()
        found.append(sync.meet())
    grace.asked = None
    model(torch.ones(2, 6)).sum().backward()
    grace.asked = 8  # it has begun to tell: others would tell once more than it
    step()
    found.append(sync.meet())
    told = sync.metrics()
    numbers = [told[key] for key in ("shortened_rounds", "left_out_steps", "step")]
    with pytest.raises(ValueError, match="no rounds"):
        sync.adopt("topk(0.2, schedule='local')")
    return [found, numbers, len(members.asked)]


def test_who_is_asked_goes_on_with_the_number_of_the_others() -> None:
    (found,) = run(_asked, "a").values()
    assert found[0] == [1, 2, 6, 7, 8, 9, 16, 24, 25]
    assert found[1] == [3, 3 + 6 + 7, 25]
    assert found[2] == 4  # as it begins, and after each round


def _initialised(name: str, tell: Any) -> str:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(ValueError, match="init_process_group") as error:
        trained("wfbp")
    return str(error.value)


def test_a_default_group_of_the_programs_own_is_not_given_up() -> None:
    (found,) = run(_initialised, "a").values()
    assert "leave init_process_group() out" in found


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


# - What a rank that has lost another one says -----------------------------------------


class Counting:
    """A lighthouse's client, which counts after a moment."""

    def __init__(self, *_: object) -> None:
        self.number = 0

    def heartbeat(self, *_: object) -> None: ...

    def quorum(self, name: str, *_: object, **told: Any) -> Any:
        time.sleep(0.1)
        self.number += 1
        one = SimpleNamespace(
            replica_id=name, store_address=told["store_address"], data=told["data"]
        )
        created = SimpleNamespace(seconds=0, nanos=0)
        return SimpleNamespace(
            quorum_id=self.number, created=created, participants=[one]
        )


@pytest.mark.parametrize("heard", [False, True])
def test_who_has_lost_a_rank_declines_what_it_was_counted_for(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Whether it has heard of it or not; others would wait for it in vain."""
    declined, counting = [], Counting()
    monkeypatch.setattr(elastic, "connect", lambda: lambda *_: counting)
    monkeypatch.setattr(generations, "form", lambda *_: None)
    monkeypatch.setattr(generations, "decline", lambda *told: declined.append(told))
    there = elastic.Lighthouse("http://nowhere:1", name="a")
    try:
        there.ask(Standing())
        first = there.answer()
        assert first is not None
        there.form(first)
        there.ask(Standing(1, lost=True))
        assert there.answer() is not None
        assert declined == []  # for what it has come to
        there.ask(Standing(1))
        if heard:
            there.answer()
        there.ask(Standing(1, lost=True))
        there.answer()
        assert [number for number, _ in declined] == ["3.0.0"]
    finally:
        there.close()


def test_algorithms_of_all_ranks_count_on_from_the_same_step() -> None:
    """One may have begun an exchange in the step that was undone, and another not."""

    def shared() -> tuple[dict[str, int], list[int]]:
        model = nn.Linear(2, 2)
        sync = gradtide.replicate(model, None)
        rank = torch.distributed.get_rank()
        own = regroup.Remains(True, counts={"step": rank + 7}, numbers=(rank, 0, 0, 0))
        late = [False, False, True]
        found = regroup.share(sync.engine, model, None, None, own, 1, late, False)
        return found.counts, list(found.numbers)

    assert run_ranks(3, shared) == [({"step": 8}, [1, 0, 0, 0])] * 3


def test_one_that_was_behind_has_the_scale_of_the_others() -> None:
    """It has updated its GradScaler in a step that was none, or has not yet."""

    def shared() -> dict[str, Any]:
        model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, optimizer)
        rank = torch.distributed.get_rank()
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": rank})
        own, late = regroup.Remains(True), [True, False]
        known = sync.engine, model, optimizer, scaler, own
        regroup.share(*known, 1, late, False)
        return scaler.state_dict()

    assert [state["_growth_tracker"] for state in run_ranks(2, shared)] == [1, 1]
