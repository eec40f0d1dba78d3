"""Ranks with different numbers of batches train together inside `join()`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradtide

DEAR = "Scheme(Dense(), fusion=BySize(0.0004, 0.0001, 1), schedule=DEAR)"
DENSE = ["wfbp", "sequential", DEAR, "wfbp(wire='bf16')"]
SPARSE = [
    "topk(0.1)",
    "oktopk(schedule='dear')",
    "gtopk",
    "topk(schedule='local')",
    "exdyna(schedule='local')",
    "cltk",
]


def net(normed: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if normed else []
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.ReLU(), nn.Linear(8, 2))


def batch(*where: int) -> Tensor:
    torch.manual_seed(hash(where) % 2**31)
    return torch.randn(5, 4)


def train(
    scheme: str, batches: list[list[int]], normed: bool, micro: int = 1
) -> tuple[nn.Module, gradtide.Replica, torch.optim.Optimizer]:
    """Train two epochs of uneven batches, and three steps with equally many."""
    rank = dist.get_rank()
    model = net(normed)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme, check_every=1)
    for epoch, numbers in enumerate([*batches, [3] * dist.get_world_size()]):
        with sync.join() if epoch < len(batches) else nullcontext():
            for i in range(numbers[rank]):
                for part in range(micro):
                    quiet = part < micro - 1
                    with sync.no_sync() if quiet else nullcontext():
                        loss = model(batch(epoch, i, part, rank)).square().mean()
                        loss.backward()
                if "local" not in scheme:
                    sync.clip_grad_norm_(1e6)
                opt.step()
                opt.zero_grad()
    return model, sync, opt


def everything(model: nn.Module) -> list[list[float]]:
    return [t.double().flatten().tolist() for t in model.state_dict().values()]


@pytest.mark.product
@pytest.mark.parametrize("scheme", DENSE[:3])
@pytest.mark.parametrize("counts", [[0, 4], [5, 1], [1, 2]])
def test_exact_schemes_train_as_ddp(scheme: str, counts: list[int]) -> None:
    """DDP leaves the short rank's optimizer behind: here it is brought along by hand.

    Its buffers follow the last rank, ours the first: so there is one common step only.
    """

    def run() -> list[Any]:
        found = []
        for own in (True, False):
            rank, model = dist.get_rank(), net(True)
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync: Any = gradtide.replicate(model, opt, scheme) if own else None
            around: Any = model if own else DistributedDataParallel(model)
            for epoch, steps in enumerate((counts[rank], 3)):
                with (sync or around).join() if epoch == 0 else nullcontext():
                    for i in range(steps):
                        around(batch(epoch, i, rank)).square().mean().backward()
                        opt.step()
                        opt.zero_grad()
                if epoch == 0:
                    found.append(everything(model))
                    if not own:
                        states: list[Any] = [None, None]
                        dist.all_gather_object(states, opt.state_dict())
                        opt.load_state_dict(states[counts.index(max(counts))])
            if own:
                sync.remove()
            found.append([p.tolist() for p in model.parameters()])
        return found

    for ours, later, ddp, ddp_later in run_ranks(2, run):
        assert ours == ddp
        assert later == ddp_later


@pytest.mark.product(each=6)
@pytest.mark.parametrize("scheme", [*DENSE, *SPARSE])
@pytest.mark.parametrize(
    ("size", "batches"),
    [(2, [[0, 3], [4, 1]]), (3, [[2, 4, 3], [1, 0, 3]])],
)
def test_ranks_end_alike_and_go_on_alike(
    scheme: str, size: int, batches: list[list[int]]
) -> None:
    def run() -> tuple[Any, Any, Any]:
        model, sync, opt = train(scheme, batches, normed=size == 2, micro=2)
        found = [p.tolist() for p in model.parameters()]
        state = opt.state_dict()["state"][0]["exp_avg"].tolist()
        steps = sync.metrics()["step"]
        sync.remove()
        return found, None if "local" in scheme else state, steps

    first, *others = run_ranks(size, run)
    assert others == [first] * (size - 1)
    assert first[2] == sum(map(max, batches)) + 3


def one_more_step() -> int:
    model = net(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheme = "Scheme(Dense(), schedule=Schedule('step', every=3))"
    sync = gradtide.replicate(model, opt, scheme)
    with sync.join():
        for step in range(4 + dist.get_rank()):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    sync.load_state_dict(sync.state_dict())
    return int(sync.metrics()["step"])


def test_a_silent_step_more_is_counted_by_all() -> None:
    assert run_ranks(2, one_more_step) == [5, 5]


@pytest.mark.product
@pytest.mark.parametrize("scheme", [*DENSE, *SPARSE])
def test_equal_inputs_are_the_same_bits_with_join_and_without(scheme: str) -> None:
    def run() -> list[Any]:
        found = []
        for inside in (True, False):
            model = net(True)
            opt = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync = gradtide.replicate(model, opt, scheme)
            for epoch in range(2):
                with sync.join(enable=inside):
                    for i in range(4):
                        model(
                            batch(epoch, i, dist.get_rank())
                        ).square().sum().backward()
                        opt.step()
                        opt.zero_grad()
            sync.remove()
            found.append(everything(model))
        return found

    for inside, outside in run_ranks(2, run):
        assert inside == outside


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["topk(0.1)", "oktopk(schedule='dear')", "exdyna", "gtopk"]
)
def test_no_mass_is_lost(scheme: str) -> None:
    """Plain SGD: what all ranks' gradients came to is in the parameters, or left."""

    def run() -> float:
        model = nn.Linear(64, 8, bias=False)
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = gradtide.replicate(model, opt, scheme)
        given = torch.zeros_like(model.weight)
        with sync.join():
            for i in range(2 + 5 * dist.get_rank()):
                x = batch(i, dist.get_rank()).repeat(1, 16)
                model(x).sum().backward()
                given += x.sum(0)
                opt.step()
                opt.zero_grad()
        residual = torch.zeros_like(given)
        for bucket in sync._training.placement.buckets:
            if not bucket.residual_empty:
                for slot in bucket.slots:
                    residual += slot.of(bucket.payload.flat)
        sums = torch.stack([given, residual])
        dist.all_reduce(sums)
        moved = -2 * model.weight.detach()
        sync.remove()
        return float((sums[0] - moved - sums[1]).abs().max())

    assert max(run_ranks(2, run)) < 1e-3


@pytest.mark.product
@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("scheme", DENSE)
def test_the_mean_can_be_over_those_that_still_train(scheme: str) -> None:
    """With equal batches the gradient is the same however many ranks have joined."""

    def run() -> Any:
        model = net(False)
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = gradtide.replicate(model, opt, scheme)
        found = []
        with sync.join(divide_by_initial_world_size=False):
            for _ in range([2, 5, 3][dist.get_rank()]):
                model(batch(0)).square().mean().backward()
                norm = float(sync.clip_grad_norm_(1e6))
                found.append([norm, *(float(p.grad.sum()) for p in model.parameters())])  # type: ignore[union-attr]
                opt.step()
                opt.zero_grad()
        sync.remove()
        return found

    steps = [step for rank in run_ranks(3, run) for step in rank]
    rel = 1e-2 if "bf16" in scheme else 1e-5
    assert len(steps) == 10
    for step in steps:
        assert step == pytest.approx(steps[0], rel=rel, abs=1e-2 * (rel > 1e-4))


@pytest.mark.parametrize("name", ["wfbp", "dear", "topka2a(0.1)", "diloco(every=2)"])
def test_early_termination_raises_everywhere_before_a_backward(name: str) -> None:
    def run() -> int:
        rank, steps = dist.get_rank(), []
        model = net(False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, name)

        def loop() -> None:
            with sync.join(throw_on_early_termination=True):
                for i in range(5 - 2 * (rank == 1)):
                    model(batch(i, rank)).square().sum().backward()
                    opt.step()
                    opt.zero_grad()
                    steps.append(i)

        with pytest.raises(RuntimeError, match="rank 1 ran out of batches"):
            loop()
        sync.flush()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        return len(steps)

    assert run_ranks(3, run) == [3, 3, 3]


def test_an_error_inside_is_the_users() -> None:
    def run() -> None:
        sync = train("wfbp", [], False)[1]
        with pytest.raises(KeyError), sync.join():
            raise KeyError
        sync.remove()

    run_ranks(2, run)


def test_what_cannot_be_joined_is_refused() -> None:
    def refused(sync: gradtide.Replica, words: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=words), sync.join(**options):
            pass
        sync.remove()

    def run() -> None:
        def replica(scheme: str) -> gradtide.Replica:
            model = net(False)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            return gradtide.replicate(model, opt, scheme)

        refused(replica("topk"), "residual", divide_by_initial_world_size=False)
        refused(replica("dp_kfac"), "K-FAC")
        refused(replica("auto"), "searched for")
        other = bool(dist.get_rank())
        refused(replica("wfbp"), "differs", throw_on_early_termination=other)
        sync = replica("wfbp")
        with sync.join(), pytest.raises(RuntimeError, match="inside join"):
            sync.adopt("dear")
        sync.remove()

    run_ranks(2, run)


@pytest.mark.slow
def test_other_things_on_other_ranks_are_named() -> None:
    def run() -> None:
        model = net(True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, "wfbp")

        def loop() -> None:
            with sync.join():
                loss = model(batch(0)).square().sum()
                if dist.get_rank():
                    loss += model(batch(1)).sum()
                loss.backward()
                opt.step()
                model(batch(2))

        # The ranks' programs differ: who does not see it waits for who did.
        words = "different things" if dist.get_rank() else "waits in vain|failed in"
        with pytest.raises(RuntimeError, match=words):
            loop()

    run_ranks(2, run)


# - Several replicas -------------------------------------------------------------------


def test_one_call_inside_another_is_refused_with_what_to_pass() -> None:
    def run() -> None:
        models = net(False), net(False)
        first, second = (
            gradtide.replicate(m, torch.optim.SGD(m.parameters(), 0.1), "wfbp")
            for m in models
        )

        def nested() -> None:
            with first.join(), second.join():
                pass

        with pytest.raises(ValueError, match=r"also=\[") as caught:
            nested()
        assert "inside join() already" in str(caught.value)
        with second.join(also=[first]):
            pass
        with first.join():
            pass

    run_ranks(2, run)


def gan(scheme: str, counts: list[int], join: bool) -> list[Any]:
    """A GAN's parameters; without `join`, gradients of ranks that ran out are zero."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    nets = made, judge
    opts = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    syncs = [gradtide.replicate(*pair, scheme) for pair in zip(nets, opts, strict=True)]
    with syncs[0].join(also=syncs[1:]) if join else nullcontext():
        for i in range(counts[rank] if join else max(counts)):
            share = float(i < counts[rank])
            judge.zero_grad()
            fake = made(batch(i, 7))
            loss = judge(batch(i, rank)).mean() - judge(fake.detach()).mean()
            (share * loss).backward()
            opts[1].step()
            made.zero_grad()
            if i % 2:
                (share * judge(fake).mean()).backward()  # of both
                opts[0].step()
    for sync in syncs:
        sync.remove()
    return [everything(net) for net in nets]


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["wfbp", DEAR, "topk(0.1)", "exdyna(0.1, schedule='local')"]
)
def test_two_replicas_in_one_join(scheme: str) -> None:
    exact = scheme in ("wfbp", DEAR)

    def run() -> Any:
        return [
            (gan(scheme, counts, True), exact and gan(scheme, counts, False))
            for counts in ([4, 4], [0, 4], [5, 2])
        ]

    one, two = run_ranks(2, run)
    assert one == two
    for joined, expected in one:
        assert not exact or joined == expected


def test_replicas_that_do_not_belong_together_are_refused() -> None:
    def run() -> list[str]:
        model, other = net(False), net(False)
        own = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        sync = gradtide.replicate(model, torch.optim.SGD(model.parameters()), "wfbp")
        second = gradtide.replicate(
            other, torch.optim.SGD(other.parameters()), "wfbp", process_group=own
        )
        refused = []
        for also in ([second], [sync], [second] if dist.get_rank() else []):
            with pytest.raises(ValueError, match=" ") as raised, sync.join(also=also):
                pass
            refused.append(str(raised.value))
        return refused

    for apart, twice, uneven in run_ranks(2, run):
        assert "of the same ranks" in apart
        assert "named twice" in twice
        assert "also" in uneven or "rank 1" in uneven
