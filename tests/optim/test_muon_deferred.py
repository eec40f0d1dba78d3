"""Muon by owners under `dear`: the bits of `wfbp`, whatever is done around a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.test_muon import alike, batch, flat, loss_of, network
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gradtide
from gradtide.core.schedule import DEAR, WFBP
from gradtide.fusion import BySize
from gradtide.optim import DistributedMuon, Several
from gradtide.runtime.layout.owned_bucket import OwnedBucket
from gradtide.runtime.optimizer.deferred_step import dividing, owned_by
from gradtide.scheme import Scheme

Kind = Callable[..., Optimizer]
STEPS = 8
SMALL = BySize(0.002, ends=0.001)  # several buckets, some of them of one matrix


def several(model: nn.Module, kind: Kind = DistributedMuon) -> Several:
    two = [p for p in model.parameters() if p.dim() == 2]
    rest = AdamW([p for p in model.parameters() if p.dim() != 2], 3e-3)
    return Several(kind(two, 0.02, weight_decay=0.1), rest)


def scheme(deferred: bool, wire: Any = None, levels: int | None = None) -> Scheme:
    schedule = DEAR if deferred else WFBP
    return Scheme(gradtide.Dense(wire), SMALL, schedule, levels=levels)


def train(
    how: Scheme | str,
    kind: Kind = DistributedMuon,
    between: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    set_to_none: bool = True,
) -> Tensor:
    model, rank = network(), dist.get_rank()
    optimizer = several(model, kind)
    sync = gradtide.replicate(model, optimizer, how)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        if between is not None:
            between(step, model, sync, optimizer)
        optimizer.step()
        if after is not None:
            after(step, model, sync)
        optimizer.zero_grad(set_to_none=set_to_none)
    sync.remove()
    assert alike(flat(model))
    return flat(model)


def products() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = [None, *(h for h in (2,) if size > 2 and size % h == 0)]
    for wire in (None, "bf16"):
        for levels in hosts:
            plain = train(scheme(False, wire, levels), Muon)
            for to_none in (True, False):
                found = train(scheme(True, wire, levels), set_to_none=to_none)
                assert torch.equal(found, plain), (wire, levels, to_none)

    def clip(step: int, model: nn.Module, sync: Any, optimizer: Any) -> None:
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        else:
            sync.clip_grad_norm_(0.3)

    def unused(step: int, model: nn.Module, sync: Any, optimizer: Any) -> None:
        """A matrix that this step is to leave alone, on every rank."""
        if step % 3 == 1:
            model[2].weight.grad = None  # type: ignore[index, union-attr]

    def gathered(step: int, model: nn.Module, sync: Any, optimizer: Any) -> None:
        if step % 3 == 2:
            sync.gather_gradients()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.clamp_(-0.05, 0.05)

    for between in (clip, unused, gathered):
        plain = train(scheme(False), Muon, between)
        assert torch.equal(train(scheme(True), between=between), plain), between

    def accumulated(how: Scheme, kind: Any) -> Tensor:
        model = network()
        optimizer = several(model, kind)
        sync = gradtide.replicate(model, optimizer, how)
        for step in range(STEPS):
            sync.weight(1 + rank)
            if step % 2:
                with sync.no_sync():
                    loss_of(model, batch(step, rank + 50)).backward()
            if step == 4 and rank == 0:
                optimizer.zero_grad()
                sync.skip()
            else:
                loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.remove()
        assert alike(flat(model))
        return flat(model)

    assert torch.equal(
        accumulated(scheme(True), DistributedMuon), accumulated(scheme(False), Muon)
    )


@pytest.mark.product(each=12)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_bits_are_those_of_wfbp_whatever_is_done_around_a_step(size: int) -> None:
    run_ranks(size, products)


def scaled() -> None:
    """A GradScaler skips on all ranks, and what follows is as if it had not been."""
    found = []
    for deferred, kind in ((True, DistributedMuon), (False, Muon)):
        model, rank = network(), dist.get_rank()
        optimizer = several(model, kind)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        sync = gradtide.replicate(
            model, optimizer, scheme(deferred), grad_scaler=scaler
        )
        for step in range(STEPS):
            x = batch(step, rank)
            if step == 3 and rank == 1:
                x[0, 0] = math.inf
            scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = flat(model)
            scaler.step(optimizer)
            if step == 3:
                assert torch.equal(flat(model), before)
            scaler.update()
            optimizer.zero_grad()
        sync.remove()
        assert alike(flat(model))
        found.append(flat(model))
    assert torch.equal(*found)


def reads() -> None:
    """One rank alone cannot have means: all are told so, and nothing hangs."""

    def before(step: int, model: nn.Module, sync: Any, optimizer: Any) -> None:
        if step == 3 and dist.get_rank() == 0:
            for p in model.parameters():
                with pytest.raises(RuntimeError, match=r"the owners of matrices have"):
                    p.grad.abs()  # type: ignore[union-attr]

    def after(step: int, model: nn.Module, sync: Any) -> None:
        if step > 1:
            weight, bias = model[0].weight, model[0].bias  # type: ignore[index]
            with pytest.raises(RuntimeError, match=r"0\.weight went to the rank that"):
                weight.grad.abs()  # type: ignore[union-attr]
            assert bias.grad.isfinite().all()  # type: ignore[union-attr]

    plain = train(scheme(False), Muon)
    assert torch.equal(train(scheme(True), between=before, after=after), plain)


def raised() -> None:
    """A step that has raised does not leave the optimizer at rest."""
    model = network()
    optimizer = several(model)
    sync = gradtide.replicate(model, optimizer, scheme(True))
    muon = optimizer.optimizers[0]
    assert isinstance(muon, DistributedMuon)
    rest = optimizer.optimizers[1]
    step_of = rest.step
    for step in range(4):
        if step == 2:
            rest.step = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
        loss_of(model, batch(step, dist.get_rank())).backward()
        if step == 2:
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            rest.step = step_of  # type: ignore[method-assign]
        else:
            optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    sync.remove()
    assert not muon.deferred
    before = flat(model)
    loss_of(model, batch(9, 0)).backward()
    optimizer.step()
    assert not torch.equal(flat(model), before)
    assert alike(flat(model))


def layout() -> None:
    model = network()
    sync = gradtide.replicate(model, several(model), scheme(True))
    (muon, _) = sync._session.optimizer.optimizers  # type: ignore[attr-defined]
    sent = []
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        sync._session.optimizer.step()
        sync._session.optimizer.zero_grad()
        sent.append(muon._engine.sent_bytes)
    assert sent[0] == sent[2]  # behind the first the replica has sent what there was
    sync.flush()
    buckets = sync._session.training.placement.buckets
    for bucket in buckets:
        assert any(slot.param.dim() == 2 for slot in bucket.slots) is bucket.owned
    owned = [bucket for bucket in buckets if isinstance(bucket, OwnedBucket)]
    assert len(owned) > 1
    assert "means to owners" in sync.describe()
    sync.adopt("wfbp")
    assert not any(b.owned for b in sync._session.training.placement.buckets)
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        sync._session.optimizer.step()
        sync._session.optimizer.zero_grad()
    assert alike(flat(model))
    sync.adopt("dear")
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        sync._session.optimizer.step()
        sync._session.optimizer.zero_grad()
    sync.remove()
    assert alike(flat(model))


def narrow() -> None:
    """Updates in 8 bits: alike on all ranks, by every schedule, near the others."""

    def coded(params: Any, *args: Any, **kwargs: Any) -> DistributedMuon:
        return DistributedMuon(params, *args, wire="int8", **kwargs)

    found = [train(scheme(deferred), coded) for deferred in (True, False)]
    assert torch.equal(*found)
    exact = train(scheme(True))
    assert not torch.equal(found[0], exact)
    torch.testing.assert_close(found[0], exact, rtol=0, atol=0.1)
    with pytest.raises(ValueError, match=r"wire='bf15'\): 'int8', 'e3m0'"):
        DistributedMuon([nn.Parameter(torch.ones(2, 2))], wire="bf15")  # type: ignore[arg-type]
    wire: Any = "int8" if dist.get_rank() else None
    with pytest.raises(ValueError, match="wire differs between ranks"):
        DistributedMuon([nn.Parameter(torch.ones(2, 2))], wire=wire)


def refused() -> None:
    model = network()
    for how, words in {
        "dear(wire='int8')": "in 16 bits",
        "topka2a(0.1, schedule='dear')": "in 16 bits",
        "topka2a(0.1, schedule='local')": "be a rank's own",
        "diloco(every=4)": "be a rank's own",
    }.items():
        with pytest.raises(ValueError, match=words):
            gradtide.replicate(model, several(model), how)
    with pytest.raises(ValueError, match="same parameter"):
        Several(AdamW(model.parameters()), AdamW(model.parameters()))
    with pytest.raises(ValueError, match="two optimizers"):
        Several(AdamW(model.parameters()))
    both = several(model)
    both.twice = both.optimizers[0]  # type: ignore[attr-defined]
    assert dividing(both) == [both.twice]  # type: ignore[attr-defined]
    assert owned_by(both, 1) is None
    assert len(owned_by(both, 2).owners) == 4  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="build Several anew"):
        both.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="1 groups, and these optimizers have 2"):
        both.load_state_dict({"state": {}, "param_groups": [{"params": []}]})


def again() -> None:
    """A second step by the same means is none, and said to be on every rank."""
    model = network()
    optimizer = several(model)
    sync = gradtide.replicate(model, optimizer, scheme(True))
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        if step == 2:
            with pytest.raises(RuntimeError, match="went to the rank that owns it"):
                optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    assert alike(flat(model))
    loss_of(model, batch(5, dist.get_rank())).backward()
    optimizer.step()
    sync.remove()
    assert alike(flat(model))


def changing() -> None:
    """A matrix that is unfrozen, one that is added; and steps that all ranks skip."""
    found = []
    for deferred, kind in ((True, DistributedMuon), (False, Muon)):
        model, rank = network(), dist.get_rank()
        frozen: Any = model[2].weight
        frozen.requires_grad_(False)
        optimizer = several(model, kind)
        sync = gradtide.replicate(model, optimizer, scheme(deferred))
        for step in range(STEPS):
            if step == 3:
                frozen.requires_grad_(True)
                sync.refresh()
            if step == 5:
                optimizer.zero_grad()
                sync.skip()
            else:
                loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        model.append(nn.Linear(1, 3))
        new: Any = model[-1].weight
        optimizer.optimizers[0].add_param_group({"params": [new]})
        sync.remove()
        rest = AdamW(p for p in model.parameters() if p.dim() != 2)
        optimizer = Several(optimizer.optimizers[0], rest)
        sync = gradtide.replicate(model, optimizer, scheme(deferred))
        for step in range(3):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.remove()
        assert alike(flat(model))
        found.append(flat(model))
    assert torch.equal(*found)


def saved() -> None:
    """A state in the middle goes on with the same bits, on all ranks."""
    whole = train(scheme(True))
    model, rank = network(), dist.get_rank()
    optimizer = several(model)
    sync = gradtide.replicate(model, optimizer, scheme(True))
    for step in range(STEPS):
        if step == 4:
            optimizer.consolidate_state_dict()
            state = optimizer.state_dict(), sync.state_dict()
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            sync.remove()
            model = network()
            model.load_state_dict(weights)
            optimizer = several(model)
            optimizer.load_state_dict(state[0])
            sync = gradtide.replicate(model, optimizer, scheme(True))
            sync.load_state_dict(state[1])
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.remove()
    assert torch.equal(flat(model), whole)


def apart() -> None:
    """Muon and AdamW as one, on each rank by itself: in rounds and by steps."""
    for how in ("diloco(every=3)", "exdyna(0.2, schedule='local', warmup=6)"):
        model, rank = network(), dist.get_rank()
        optimizer = several(model, Muon)
        scheduler = LambdaLR(optimizer, lambda i: 1 / (1 + i / 20))
        sync = gradtide.replicate(model, optimizer, how)
        begin = flat(model)
        for step in range(9):
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        state = optimizer.state_dict()
        assert len(state["state"]) == len([*model.parameters()])
        assert sync.state_dict()
        sync.end_round()
        sync.remove()
        assert alike(flat(model))
        assert not torch.equal(flat(model), begin)
        # A state goes where it came from, by each optimizer's own way.
        other = several(network(), Muon)
        other.load_state_dict(state)
        for name, ours in optimizer.optimizers[0].state_dict().items():
            assert str(ours) == str(other.optimizers[0].state_dict()[name])
        assert other.param_groups[1] is other.optimizers[1].param_groups[0]


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    "case",
    [scaled, reads, raised, layout, narrow, refused, again, changing, saved, apart],
)
def test_around_a_step(case: Callable[[], None]) -> None:
    run_ranks(2, case)
