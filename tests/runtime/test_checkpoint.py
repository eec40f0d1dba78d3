"""Nothing is loaded that all ranks did not agree on, and nothing that is damaged."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.runtime.checkpoint import SEAL, UNSEALED, packed, unpacked


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


PIECES = {
    "topk(0.05)": {"algorithm", "remainders"},
    "mpd_kfac": {"algorithm", "preconditioner"},
    "topk(0.05, schedule='local')": {"algorithm", "remainders", "optimizer"},
    "diloco(every=2)": {"algorithm", "optimizer", "round"},
}


@pytest.mark.product
@pytest.mark.parametrize("scheme", PIECES)
def test_one_bit_in_any_piece_is_found_on_all_ranks(scheme: str) -> None:
    for told in run_ranks(2, _flip_each, scheme):
        for place, message in told.items():
            assert "is not what was saved" in message, place
            assert place[1:2] != ("remainders",) or place[2] in message
        assert {place[1] for place in told if place[0] == "rank1"} == PIECES[scheme]
        assert ("step",) in told


def _flip_each(scheme: str) -> dict[tuple[str, ...], str]:
    model, optimizer, sync = start(scheme)
    train(model, optimizer, range(4))
    state, own, told = sync.state_dict(), f"rank{dist.get_rank()}", {}
    for place in _places(state):
        if place[0] == own and own != "rank1":
            place = ("rank1", *place[1:])
        damaged = copy.deepcopy(state)
        if own == "rank1":
            _flip(damaged, place)
        told[place] = refusal(sync, damaged)
        assert _equal(state, sync.state_dict()), place
    train(model, optimizer, range(4, 6))  # as if nothing had been
    sync.remove()
    return told


def refusal(sync: gradtide.Replica, state: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # told beside
        sync.load_state_dict(state)
    return str(caught.value)


def _places(held: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where there is something to damage."""
    if isinstance(held, dict):
        for key, inner in held.items():
            yield from _places(inner, (*place, key))
    elif isinstance(held, Tensor | bytes) or place == ("step",):
        yield place


def _flip(state: dict[str, Any], place: tuple[str, ...]) -> None:
    for key in place[:-1]:
        state = state[key]
    held = state[place[-1]]
    if isinstance(held, Tensor):
        held.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    elif isinstance(held, bytes):
        bit = random.Random(str(place)).randrange(8 * len(held))
        number = int.from_bytes(held, "little") ^ (1 << bit)
        state[place[-1]] = number.to_bytes(len(held), "little")
    else:
        state[place[-1]] = held ^ 1


@pytest.mark.product
@pytest.mark.parametrize("scheme", PIECES)
def test_a_piece_that_is_missing_or_empty_is_named_on_all_ranks(scheme: str) -> None:
    for told in run_ranks(2, _take_away, scheme):
        assert told
        for piece, message in told.items():
            assert piece in message


def _take_away(scheme: str) -> dict[str, str]:
    model, optimizer, sync = start(scheme)
    train(model, optimizer, range(4))
    state, own, told = sync.state_dict(), f"rank{dist.get_rank()}", {}
    for piece in PIECES[scheme] - {"remainders"}:
        for value in (None, b""):
            damaged = {**state, own: {**state[own], piece: value}}
            if value is None:
                del damaged[own][piece]
            told[piece] = refusal(sync, damaged if own == "rank1" else state)
    sync.remove()
    return told


@pytest.mark.product
@pytest.mark.parametrize("scheme", PIECES)
def test_a_piece_in_the_place_of_another_is_refused_on_all_ranks(scheme: str) -> None:
    for told in run_ranks(2, _swap_each, scheme):
        assert all("optimizer" in refused for refused in told)


def _swap_each(scheme: str) -> list[str]:
    model, optimizer, sync = start(scheme)
    train(model, optimizer, range(4))
    state, own, told = sync.state_dict(), f"rank{dist.get_rank()}", []
    if "optimizer" in state[own]:
        for other in PIECES[scheme] - {"remainders", "optimizer"}:
            swapped = {**state[own], "optimizer": state[own][other]}
            damaged = {**state, own: swapped} if own == "rank1" else state
            told.append(refusal(sync, damaged))
    sync.remove()
    return told


@pytest.mark.product
@pytest.mark.parametrize("scheme", PIECES)
def test_states_of_versions_without_digests_are_loaded(scheme: str) -> None:
    run_ranks(2, _without_digests, scheme)


def _without_digests(scheme: str) -> None:
    model, optimizer, sync = start(scheme)
    train(model, optimizer, range(4))
    old, own = copy.deepcopy(sync.state_dict()), f"rank{dist.get_rank()}"
    host, device, _ = unpacked(old[own]["algorithm"], "it")
    old[own]["algorithm"] = packed((host, device))
    for part in (old, old[own]):
        for key, piece in part.items():
            if isinstance(piece, bytes):
                part[key] = piece[SEAL.size :]
                assert part[key].startswith(UNSEALED)
    sync.load_state_dict(old)
    train(model, optimizer, range(4, 6))
    sync.remove()


def test_digests_are_of_values_wherever_they_are() -> None:
    """Of a file or a message, of another layout, of a part of a larger tensor."""
    run_ranks(2, _elsewhere)


def _elsewhere() -> None:
    model, optimizer, sync = start("topk(0.05)")
    train(model, optimizer, range(3))
    state, own = sync.state_dict(), f"rank{dist.get_rank()}"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    sync.load_state_dict(torch.load(file, weights_only=True))
    left = state[own]["remainders"]
    for name, value in left.items():
        wide = value.new_empty(value.numel() + 1)[1:].view(value.shape)
        left[name] = wide.copy_(value)
        if value.dim() == 2:
            left[name] = value.t().contiguous().t()
    sync.load_state_dict(state)
    train(model, optimizer, range(3, 5))
    sync.remove()


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["dear", "exdyna(0.2, schedule='dear')", "dear(wire='sign')"]
)
@pytest.mark.parametrize("clip", ["ours", "torch's"])
def test_a_clipped_run_goes_on_bit_for_bit(scheme: str, clip: str) -> None:
    assert all(run_ranks(2, _go_on, scheme, clip))


def _go_on(scheme: str, clip: str) -> bool:
    def steps(run: Any, which: range) -> None:
        model, optimizer, sync = run
        for step in which:
            for half in range(2):
                draw = torch.Generator().manual_seed(
                    100 * step + 9 * half + dist.get_rank()
                )
                with sync.no_sync() if half == 0 else contextlib.nullcontext():
                    model(torch.randn(8, 20, generator=draw)).square().mean().backward()
            if clip == "ours":
                sync.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()

    whole, found = start(scheme), []
    steps(whole, range(12))
    for stop in (1, 2, 3, 6):
        before = start(scheme)
        steps(before, range(stop))
        saved = copy.deepcopy([part.state_dict() for part in before])
        before[-1].remove()
        after = start(scheme)
        for part, state in zip(after, saved, strict=True):
            part.load_state_dict(state)
        steps(after, range(stop, 12))
        pairs = zip(whole[0].parameters(), after[0].parameters(), strict=True)
        found.append(all(torch.equal(p, q) for p, q in pairs))
        after[-1].remove()
    return all(found)


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
