"""Collectives that nobody knows: what they say of themselves is all that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.test_sparse import batch, by_torch_save, network, poisoned, resumed, train

import gradtide
from gradtide.collectives import Dense, MomentumCorrection, TopK, Warmup
from gradtide.collectives.levels import TwoLevel
from gradtide.collectives.momentum_correction import (
    moves,
    uses_optimizer_momentum,
    with_momentum,
)
from gradtide.core.ops import AllReduce, Flow, Group
from gradtide.core.payload import (
    Collective,
    Payload,
    Traits,
    dense_last,
    dense_next,
    hands_over,
    next_step,
    pays_below,
    settled,
    traits,
)
from gradtide.planner.network import Network
from gradtide.planner.rehearsal import rehearsal
from gradtide.planner.search import rank, refusal
from gradtide.planner.trace import StepTrace, Unit
from gradtide.scheme import Scheme, parse

NETWORK = Network.ideal(8, 1, 1e9)


@dataclass(frozen=True)
class Whole:
    """The mean of everything."""

    traits = Traits(dense=True, depends_on="length")

    def reduce(self, payload: Payload, group: Group) -> Flow:
        total: torch.Tensor = yield AllReduce(payload.flat)
        return total.div_(group.size)


@dataclass(frozen=True)
class Turns:
    """Every other entry, in turn; says nothing of itself."""

    def reduce(self, payload: Payload, group: Group) -> Flow:
        where = torch.arange(next_step(payload.state) % 2, len(payload.flat), 2)
        payload.check_finite(payload.flat)
        total = yield AllReduce(payload.pop_entries(where))
        return payload.sparse_mean(where, total.div_(group.size))


@dataclass(frozen=True)
class Saying:
    """A wrapper."""

    collective: Collective
    bound: float | None = None

    traits = Traits(transparent=True, uses_optimizer_momentum=True)

    def reduce(self, payload: Payload, group: Group) -> Flow:
        assert not payload.flat.is_meta
        return (yield from self.collective.reduce(payload, group))


def trace() -> StepTrace:
    units = tuple(Unit(f"w{i}", 250_000, 4, 0.01, 0.02, 0.001) for i in range(4))
    return StepTrace("made", units, 0.004)


def test_they_are_planned() -> None:
    asked = {"whole": Scheme(Whole()), "turns": Scheme(Turns())}
    found = {c.name: c for c in rank(trace(), NETWORK, asked, tune=False)}
    assert found["whole"].kind == "lossless"
    assert found["turns"].kind == "lossy"
    dense = found["wfbp"].prediction
    assert found["whole"].prediction.sent_bytes == pytest.approx(dense.sent_bytes)
    # Every rank is asked for flags of alarms, unless everything travels.
    assert found["turns"].prediction.sent_bytes > 0.5 * dense.sent_bytes
    assert not any(found[name].refused for name in asked)


def test_what_pays_is_theirs_to_say() -> None:
    @dataclass(frozen=True)
    class Bounded(Turns):
        def pays_below(self, size: int) -> float:
            return 1 / size

    for scheme in (Scheme(Bounded()), Scheme(Saying(Bounded()))):
        words = refusal(scheme, trace(), 5, 1e6, 1e6)
        assert "among 5 ranks it pays below a density of 0.2" in words
    assert "pays" not in refusal(Scheme(Turns()), trace(), 5, 1e6, 1e6)


def test_they_are_rehearsed_by_what_they_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = 12345 * 4
    for collective in (Turns(), Whole(), Saying(Whole())):
        script = rehearsal.scripts(settled(collective), n, torch.float32, (), 4)[1]
        (reduced,) = (op for act in script.acts for op in act.asked)
        assert isinstance(reduced, AllReduce)
        share = 2 if isinstance(collective, Turns) else 1
        assert reduced.tensor.numel() == n // share
        monkeypatch.setattr(rehearsal, "by_numbers", None)  # of no use for the others


def test_they_train_and_are_resumed() -> None:
    whole, turns = (f"{__name__}.{name}()" for name in ("Whole", "Turns"))

    def run() -> list[Any]:
        torch.testing.assert_close(train(whole), train("wfbp"))
        return [resumed(whole, by_torch_save), resumed(turns, by_torch_save)]

    assert run_ranks(2, run) == [[True, True]] * 2


def _remainders(scheme: str) -> int:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = gradtide.replicate(model, opt, scheme)
    model(batch(0)).sum().backward()
    opt.step()
    (own,) = (v for key, v in sync.state_dict().items() if key.startswith("rank"))
    sync.remove()
    return len(own["remainders"])


def test_what_may_be_left_behind_is_saved_and_alarmed() -> None:
    whole, turns = (f"{__name__}.{name}()" for name in ("Whole", "Turns"))

    def run() -> list[Any]:
        return [
            _remainders(whole),
            _remainders(turns),
            poisoned(whole, scaled=False),
            poisoned(turns, scaled=False),
        ]

    for nothing, something, weights, message in run_ranks(2, run):
        assert (nothing, something) == (0, 4)
        assert any(map(math.isnan, weights))
        assert "2.weight is infinite or NaN on rank 1" in message


@dataclass(frozen=True)
class Silent:
    """A wrapper that says nothing of itself."""

    collective: Collective

    def reduce(self, payload: Payload, group: Group) -> Flow:
        return self.collective.reduce(payload, group)


def test_momentum_reaches_what_is_in_a_wrapper_that_says_nothing() -> None:
    inner = MomentumCorrection(TopK(0.1))
    silent = with_momentum(Silent(Warmup(inner, 2)), 0.9, 0.1)
    assert silent.collective.collective.momentum == (0.9, 0.1)
    assert silent == Silent(Warmup(inner, 2))
    done = [{"warmup.step": torch.tensor(step)} for step in (0, 1, 2)]
    assert [moves(silent, state) for state in done] == [False, False, True]
    assert not moves(Silent(TopK()), {})


def test_momentum_is_asked_for_through_wrappers() -> None:
    assert uses_optimizer_momentum(Saying(Turns()))
    assert uses_optimizer_momentum(
        parse(f"Warmup({__name__}.Saying({__name__}.Turns()))").collective
    )
    assert not uses_optimizer_momentum(Turns())


def test_what_says_nothing_has_the_defaults() -> None:
    @dataclass(frozen=True)
    class Named(Turns):
        traits: tuple[str, ...] = ("a", "field", "of", "this", "name")

    for collective in (Turns(), Named(), object()):
        assert traits(collective) == Traits()
        assert traits(collective).residual
        assert not hands_over(collective, 4)
        assert pays_below(collective, 4) is None
        assert not dense_next(collective, {})
        assert not dense_last(collective, {})


def test_what_is_dense_leaves_nothing_but_what_a_wire_takes_off() -> None:
    assert [traits(Dense(wire)).residual for wire in (None, "bf16", "int8")] == [
        False,
        False,
        True,
    ]
    assert not traits(Whole()).residual
    for wire in (None, "int8"):
        inner = traits(Dense(wire))
        outer = traits(TwoLevel(Dense(wire), 2))
        assert (outer.dense, outer.residual) == (inner.dense, inner.residual)


def test_a_warm_up_is_heard_through_a_wrapper_that_says_nothing() -> None:
    inside = Silent(Warmup(TopK(0.1), 2))
    done = [{"warmup.step": torch.tensor(step)} for step in (0, 1, 2, 3)]
    assert [dense_next(inside, state) for state in done] == [True, True, False, False]
    assert [dense_last(inside, state) for state in done] == [False, True, True, False]
