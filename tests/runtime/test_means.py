"""buffers="mean": statistics are those of all ranks, and nothing can hang."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide import parallel
from gradtide.lab.workloads.digits import images, network, shard

STEPS = 40


class Seen:
    """What SyncBatchNorm would have: statistics of the samples of all ranks."""

    def __init__(self, norms: list[nn.Module]) -> None:
        self.mean: dict[nn.Module, Tensor] = {}
        self.var: dict[nn.Module, Tensor] = {}
        for norm in norms:
            norm.register_forward_pre_hook(self.see)

    def see(self, norm: Any, args: tuple[Tensor, ...]) -> None:
        if not norm.training:
            return
        told = [torch.empty_like(args[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(told, args[0].detach().contiguous())
        x = torch.cat(told).double().transpose(0, 1).flatten(1)
        mean = self.mean.setdefault(norm, torch.zeros_like(x[:, 0]))
        var = self.var.setdefault(norm, torch.ones_like(x[:, 0]))
        rate = norm.momentum or 1 / (int(norm.num_batches_tracked) + 1)
        mean.lerp_(x.mean(1), rate)
        var.lerp_(x.var(1), rate)


def norms_of(model: nn.Module) -> list[Any]:
    return [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]


def off(model: nn.Module, seen: Seen) -> float:
    """How far statistics are from those of all samples, for a standard deviation."""
    worst = 0.0
    for norm in norms_of(model):
        mean, var = seen.mean[norm], seen.var[norm]
        apart = (norm.running_mean - mean).abs() / var.sqrt()
        more = (norm.running_var / var - 1).abs()
        worst = max(worst, float(apart.max()), float(more.max()))
    return worst


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(x)
    model.train()
    return found


def digits(scheme: str, by_class: bool) -> tuple[list[float], list[float], list[float]]:
    """How far off evaluations are: in statistics, and in losses; and all statistics."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train, (x, y) = images()
    if by_class:  # every rank has other digits
        order = train[1].argsort(stable=True)
        own = order.chunk(size)[rank]
        train = train[0][own], train[1][own]
    torch.manual_seed(0)
    model = network()
    seen = Seen(norms_of(model))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = gradtide.replicate(model, opt, scheme, buffers="mean")
    apart, losses = [], []
    for step in range(STEPS):
        how = (0, 1) if by_class else (rank, size)
        images_of, labels = shard(train, 1, *how, 32, step)
        cross_entropy(model(images_of), labels).backward()
        opt.step()
        opt.zero_grad()
        if step % 7 == 3:
            found = cross_entropy(logits_of(model, x), y)
            apart.append(off(model, seen))
            exact = copy.deepcopy(model)
            for norm, other in zip(norms_of(model), norms_of(exact), strict=True):
                other.running_mean.copy_(seen.mean[norm])
                other.running_var.copy_(seen.var[norm])
            losses.append(abs(float(found - cross_entropy(logits_of(exact, x), y))))
    sync.flush()
    held = [float(b.double().sum()) for b in model.buffers()]
    return apart, losses, held


@pytest.mark.product(each=12)
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "oktopk(0.05, schedule='local')"])
def test_statistics_are_those_of_sync_batch_norm(scheme: str, by_class: bool) -> None:
    all_of = run_ranks(2, digits, scheme, by_class)
    assert all_of[0][2] == all_of[1][2]
    for apart, losses, _ in all_of:
        assert max(apart) < 1e-3
        assert max(losses) < 1e-3


def test_the_bar_can_be_missed() -> None:
    """By rank 0's buffers: with other digits on each rank they are far off."""

    def rank_0s() -> float:
        train, _ = images()
        own = train[1].argsort(stable=True).chunk(2)[dist.get_rank()]
        model = network()
        seen = Seen(norms_of(model))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        gradtide.replicate(model, opt, "wfbp")
        for step in range(8):
            x, y = shard((train[0][own], train[1][own]), 1, 0, 1, 32, step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return off(model, seen)

    assert min(run_ranks(2, rank_0s)) > 0.003


# - Small models -----------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 8)
        self.bn, self.b = nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("flag", torch.tensor([False, True]))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += dist.get_rank() + 1  # a mean of 1.5 for two ranks
            self.flag[0] = dist.get_rank() == 0
            self.wide += 2.0**-30 * (2 * dist.get_rank())
        found: Tensor = self.b(self.bn(self.a(x)).relu())
        return found


def batch(step: int, n: int = 8) -> Tensor:
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, 6, generator=draw) * (1 + rank) + rank


def trained(steps: int, work: Callable[..., Any], **named: Any) -> Any:
    model = Net(named.pop("momentum", 0.1))
    seen = Seen([model.bn])
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scheme = named.pop("scheme", "wfbp")
    sync = gradtide.replicate(model, opt, scheme, buffers="mean", **named)
    for step in range(steps):
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return work(model, sync, seen)


def held(model: nn.Module) -> dict[str, list[float]]:
    return {n: b.double().flatten().tolist() for n, b in model.named_buffers()}


def test_every_kind_of_buffer() -> None:
    def work(model: Net, sync: gradtide.Replica, seen: Seen) -> Any:
        state = model.state_dict()  # without a forward, or flush
        return held(model), off(model, seen), state["seen"].tolist()

    for size in (2, 4):
        found = run_ranks(size, trained, 5, work, limit=60)
        assert all(one == found[0] for one in found)
        buffers, apart, state = found[0]
        mean = (size + 1) / 2 * 5
        assert state == buffers["seen"] == pytest.approx([mean] * 3, abs=0.02)
        assert buffers["bn.num_batches_tracked"] == [5]
        assert buffers["flag"] == [1, 1]  # rank 0's
        assert buffers["wide"] == pytest.approx(
            [5 * (size - 1) * 2.0**-30] * 2, rel=0.01
        )
        assert apart < 2e-3  # 8 samples a rank: n - 1 matters


def test_on_hosts_of_several_ranks() -> None:
    def work(model: Net, sync: gradtide.Replica, seen: Seen) -> Any:
        sync.flush()
        return held(model), off(model, seen)

    schemes = [f"Scheme(levels={levels})" for levels in (1, 2)]
    for scheme in schemes:

        def on(scheme: str = scheme) -> Any:
            return trained(5, work, scheme=scheme)

        found = run_ranks(4, on)
        assert all(one == found[0] for one in found)
        assert found[0][1] < 2e-3


def test_a_cumulative_average_counts_all_batches_alike() -> None:
    def work(model: Net, sync: gradtide.Replica, seen: Seen) -> Any:
        sync.flush()
        return held(model), off(model, seen)

    def cumulative() -> Any:
        return trained(6, work, momentum=None)

    (a, apart), (b, _) = run_ranks(2, cumulative)
    assert a == b
    assert apart < 3e-3


def test_one_rank_alone_may_evaluate() -> None:
    def work() -> Any:
        model = Net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, "dear", buffers="mean")
        found = []
        for step in range(6):
            model(batch(step)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            if step % 2 == dist.get_rank():
                model.eval()
                model(batch(0))
                model.train()
                found.append(held(model))
        sync.flush()
        return found, held(model)

    (first, last), (second, also) = run_ranks(2, work)
    assert last == also == second[-1]
    assert first[0] != second[0]  # each evaluated after steps of its own


def test_batches_that_are_accumulated_count() -> None:
    def work() -> Any:
        model = Net()
        seen = Seen([model.bn])
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
        for step in range(0, 9, 3):
            with sync.no_sync():
                for i in range(2):
                    model(batch(step + i, 64)).square().sum().backward()
            model(batch(step + 2, 64)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        sync.flush()
        return held(model), off(model, seen)

    (a, apart), (b, _) = run_ranks(2, work)
    assert a == b
    assert apart < 0.05  # ranks that differ for good: their chance is not told apart


@pytest.mark.product
@pytest.mark.parametrize("steps", [3, 6, 8])
def test_they_are_alike_at_the_end_of_a_round(steps: int) -> None:
    def work(model: Net, sync: gradtide.Replica, seen: Seen) -> Any:
        sync.end_round()
        sync.flush()
        return held(model)

    def rounds() -> Any:
        return trained(steps, work, scheme="Scheme(schedule=Schedule('step', every=4))")

    one, other = run_ranks(2, rounds)
    assert one == other
    assert one["seen"] == pytest.approx([1.5 * steps] * 3, abs=0.02)


def joined(divide: bool) -> Any:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
    with sync.join(divide_by_initial_world_size=divide):
        for step in range(4 + 3 * dist.get_rank()):
            model(batch(step)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    return held(model)


@pytest.mark.parametrize("divide", [True, False])
def test_ranks_that_ran_out_of_batches_do_not_count(divide: bool) -> None:
    one, other = run_ranks(2, joined, divide)
    assert one == other
    # Four steps of both, and three of rank 1 alone.
    assert one["seen"] == pytest.approx([4 * 1.5 + 3 * 2] * 3, abs=0.05)
    assert one["bn.num_batches_tracked"] == [7]


def resized() -> Any:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
    for step in range(6):
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 2:
            model.register_buffer("later", torch.full((4,), float(dist.get_rank())))
    sync.flush()
    return held(model)


def test_a_buffer_that_comes_later_begins_as_rank_0s() -> None:
    one, other = run_ranks(2, resized)
    assert one == other
    assert one["later"] == [0] * 4


def widened() -> Any:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
    for step in range(6):
        if step == 1:
            sync.flush()
            model.wide += 1 / 3
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    return model.wide.tolist()


def test_what_the_cast_took_off_comes_later() -> None:
    for wide in run_ranks(2, widened):
        assert wide == pytest.approx([1 / 3 + 5 * 2.0**-30] * 2, abs=1e-7)


def loaded(who: Sequence[int], scheme: str) -> Any:
    """Go back to an earlier state, on some ranks; what other ranks have is rank 0's."""
    model = Net()
    seen = Seen([model.bn])
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme, buffers="mean")
    state: dict[str, Tensor] = {}
    for step in range(36):
        if step == 30 and dist.get_rank() in who:
            model.load_state_dict(state)
            first = held(model)
            logits_of(model, batch(0))
            assert held(model) == first
        if step == 30:
            seen.mean[model.bn] = state["bn.running_mean"].double()
            seen.var[model.bn] = state["bn.running_var"].double()
        model(batch(step) + 9).square().sum().backward()
        opt.step()
        opt.zero_grad()
        if step == 20:
            state = copy.deepcopy(model.state_dict())
    sync.flush()
    return held(model), off(model, seen)


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_training_goes_on_from_buffers_that_are_loaded(scheme: str) -> None:
    (one, apart), (other, _) = run_ranks(2, loaded, (0, 1), scheme)
    assert one == other
    assert apart < 0.01


@pytest.mark.parametrize("who", [0, 1])
def test_if_some_ranks_load_others_all_have_rank_0s(who: int) -> None:
    one, other = (found[0] for found in run_ranks(2, loaded, (who,), "wfbp"))
    assert one == other
    assert one["bn.num_batches_tracked"] == [36 if who else 27]


class Masked(Net):
    """With buffers that have no mean: a mask, and a minimum of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("least", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        self.least = torch.minimum(self.least, x.min().detach())
        return super().forward(x)


def masked() -> Any:
    model = Masked()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
    for step in range(4):
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    least = min(float(batch(step).min()) for step in range(4))
    return model.mask.isfinite().tolist(), model.least.item(), least


def test_what_has_no_mean_is_rank_0s() -> None:
    (mask, least, own), (also, as_well, _) = run_ranks(2, masked)
    assert mask == also == torch.ones(3, 3).tril().bool().tolist()
    assert least == as_well == own


def spoilt(scheme: str, bad: int) -> Any:
    """One rank's batch is not numbers: it has a forward, and skips the step."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, scheme, buffers="mean")
    for step in range(8):
        odd = step == 3 and dist.get_rank() == bad
        loss = model(batch(step) * (torch.nan if odd else 1)).square().sum()
        if loss.isfinite():
            loss.backward()
        else:
            del loss
            sync.skip()
        opt.step()
        opt.zero_grad()
    sync.end_round()
    sync.flush()
    return held(model)


@pytest.mark.product
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    "scheme", ["wfbp", "dear", "Scheme(schedule=Schedule('step', every=4))"]
)
def test_a_bad_batch_spoils_no_statistics(scheme: str, bad: int) -> None:
    one, other = run_ranks(2, spoilt, scheme, bad)
    assert one == other
    assert all(torch.tensor(values).isfinite().all() for values in one.values())
    assert one["bn.num_batches_tracked"] == [8]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 4000), nn.BatchNorm1d(4000))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def sent(buffers: Any) -> int:
    model = Wide()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "wfbp", buffers=buffers)
    for step in range(4):
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    sync.flush()
    return int(sync.metrics()["sent_bytes"])


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_at_most_those_of_broadcast(size: int) -> None:
    local, one, mean = (
        run_ranks(size, sent, buffers) for buffers in ("local", "broadcast", "mean")
    )
    of_one = [a - b for a, b in zip(one, local, strict=True)]
    of_mean = [a - b for a, b in zip(mean, local, strict=True)]
    assert 0 < max(of_mean) <= max(of_one)
    # In all as many as if rank 0's went to every other rank, but for what pads them.
    nbytes = 4 * (2 * 4 * 4000 + 8)
    assert sum(of_mean) <= (size - 1) * (nbytes + 100)


def wrapped() -> Any:
    model = Net()
    ddp = parallel.DistributedDataParallel(model, buffers="mean")
    opt = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seen = Seen([model.bn])
    for step in range(5):
        ddp(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    ddp.eval()
    ddp(batch(0))
    return held(model), off(model, seen)


def test_the_class_has_it_too() -> None:
    (a, apart), (b, _) = run_ranks(2, wrapped)
    assert a == b
    assert apart < 2e-3


class Synchronised(nn.SyncBatchNorm):
    """What torch has on GPUs only: here with the statistics of a fixed batch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean.lerp_(torch.full_like(self.running_mean, 1 / 3), 0.1)
        return x


def beside() -> Any:
    model = nn.Sequential(nn.Linear(6, 8), Synchronised(8), nn.BatchNorm1d(8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradtide.replicate(model, opt, "wfbp", buffers="mean")
    exact = torch.zeros(8)
    for step in range(5):
        model(batch(step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        exact.lerp_(torch.full((8,), 1 / 3), 0.1)
    sync.flush()
    return torch.equal(exact, model[1].running_mean), held(model)


def test_sync_batch_norm_is_left_alone() -> None:
    (exact, a), (_, b) = run_ranks(2, beside)
    assert exact
    assert a == b


def test_another_word_is_refused() -> None:
    def work() -> str:
        model = Net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            gradtide.replicate(model, opt, buffers="average")  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return ""

    assert "use 'broadcast', 'mean' or 'local'" in run_ranks(1, work)[0]
