"""Nothing is loaded that all ranks did not agree on, and nothing that is damaged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.runtime.checkpoint import packed


def start(scheme: str) -> tuple[nn.Module, torch.optim.Optimizer, gradtide.Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, gradtide.replicate(model, optimizer, scheme)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 20, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_another_step(state: dict[str, Any], earlier: dict[str, Any]) -> Any:
    return earlier


def reversed_order(state: dict[str, Any], _: Any) -> Any:
    return {**state, "order": state["order"][::-1]}


def unknown_order(state: dict[str, Any], _: Any) -> Any:
    return {**state, "order": ["x", *state["order"][1:]]}


def no_ranks(state: dict[str, Any], _: Any) -> Any:
    return {**state, "world_size": 0}


def very_many_ranks(state: dict[str, Any], _: Any) -> Any:
    return {**state, "world_size": 10**9}


def without(key: str) -> Any:
    return lambda state, _: {k: v for k, v in state.items() if k != key}


def truncated(state: dict[str, Any], _: Any) -> Any:
    own = state["rank1"]
    return {**state, "rank1": {**own, "algorithm": own["algorithm"][:-90]}}


def not_finite(state: dict[str, Any], _: Any) -> Any:
    state["rank1"]["remainders"]["0.weight"][0, 0] = math.nan
    return state


def of_another_type(state: dict[str, Any], _: Any) -> Any:
    return {**state, "rank1": 3}


def memory(piece: Any) -> Callable[[dict[str, Any], Any], Any]:
    """Algorithms that remember something else than they should."""

    def damage(state: dict[str, Any], _: Any) -> Any:
        state["rank1"]["algorithm"] = packed(piece)
        return state

    return damage


DAMAGES = {
    "another step": (of_another_step, "the state's step differs between ranks"),
    "reversed order": (reversed_order, "the state's order differs between ranks"),
    "unknown order": (unknown_order, "order is not one of this model's"),
    "no ranks": (no_ranks, "1 or more ranks"),
    "very many ranks": (very_many_ranks, "needs those of rank1, rank3"),
    "no order": (without("order"), "no whole state of gradtide's"),
    "no scheme": (without("scheme"), "no whole state of gradtide's"),
    "no state of its own": (without("rank1"), "the state has no 'rank1'"),
    "truncated": (truncated, "no whole state of gradtide's"),
    "not finite": (not_finite, "residual of 0.weight is not finite"),
    "memory of another type": (memory([1, 2]), "no whole state of gradtide's"),
    "memory of one kind": (memory({"a": {}}), "no whole state of gradtide's"),
    "memory of numbers": (memory(({"a": {"t": 1}}, {})), "t is no tensor"),
    "another type": (of_another_type, "no whole state of gradtide's"),
}


def test_damage_on_one_rank_is_refused_on_all_and_changes_nothing() -> None:
    for told in run_ranks(2, _damaged):
        for damage, (_, message) in DAMAGES.items():
            assert message in told[damage], f"{damage}: {told[damage]}"


def _damaged() -> dict[str, str]:
    model, optimizer, sync = start("Scheme(TopK(0.05), PerTensor())")
    train(model, optimizer, range(3))
    earlier = copy.deepcopy(sync.state_dict())
    train(model, optimizer, range(3, 5))
    told = {}
    for name, (damage, _) in DAMAGES.items():
        state, before = copy.deepcopy(sync.state_dict()), sync.state_dict()
        if dist.get_rank() == 1:
            state = damage(state, copy.deepcopy(earlier))
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # told beside
            sync.load_state_dict(state)
        told[name] = str(caught.value)
        assert _equal(before, sync.state_dict()), name
    train(model, optimizer, range(5, 6))
    return told


def test_whatever_fails_while_a_state_is_loaded_is_told_on_all_ranks() -> None:
    """Also what nobody foresaw, and in the midst of a change."""
    told = run_ranks(2, _fails_while_loading)
    assert told[1] == "AttributeError: no such thing"
    assert told[0] == (
        "RuntimeError: rank 1 cannot take part: AttributeError: no such thing"
    )


def _fails_while_loading() -> str:
    _, optimizer, sync = start("topk(0.05, schedule='local')")
    state = sync.state_dict()

    def fails(_: Any) -> None:
        raise AttributeError("no such thing")

    if dist.get_rank() == 1:
        optimizer.load_state_dict = fails  # type: ignore[method-assign]
    with pytest.raises((AttributeError, RuntimeError)) as caught:
        sync.load_state_dict(state)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_damaged_factors_are_refused_on_all_ranks() -> None:
    for told in run_ranks(2, _damaged_factors):
        assert "no whole state of gradtide's" in told


def _damaged_factors() -> str:
    model, optimizer, sync = start("mpd_kfac")
    train(model, optimizer, range(3))
    state = copy.deepcopy(sync.state_dict())
    if dist.get_rank() == 1:
        own = state["rank1"]
        own["preconditioner"] = own["preconditioner"][:-90]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # told beside
        sync.load_state_dict(state)
    train(model, optimizer, range(3, 5))
    sync.remove()
    return str(caught.value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return isinstance(a, bytes) or bool(a == b)


def test_a_state_that_does_not_count_steps_is_loaded() -> None:
    run_ranks(2, _uncounted)


def _uncounted() -> None:
    model, optimizer, sync = start("Scheme(TopK(0.05), PerTensor())")
    train(model, optimizer, range(3))
    state = copy.deepcopy(sync.state_dict())
    assert state.pop("step") == 3
    sync.load_state_dict(state)


def test_ranks_whose_optimizers_differ_go_on_from_their_own() -> None:
    """As of torch.distributed.checkpoint, which saves one rank's optimizer for all."""
    assert all(run_ranks(2, _own_optimizers))


def _own_optimizers() -> bool:
    scheme = "Scheme(TopK(0.05), PerTensor(), LOCAL)"
    model, optimizer, sync = start(scheme)
    train(model, optimizer, range(3))
    saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, sync)])
    everybodys = [saved[1]]
    dist.broadcast_object_list(everybodys, 0)
    train(model, optimizer, range(3, 6))
    other, its_optimizer, its_sync = start(scheme)
    states = [saved[0], everybodys[0], saved[2]]
    for part, state in zip((other, its_optimizer, its_sync), states, strict=True):
        part.load_state_dict(state)
    train(other, its_optimizer, range(3, 6))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)
