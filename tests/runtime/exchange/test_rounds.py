"""Rounds of several steps: each recipe against its twin, and what users do meanwhile.

A twin is the definition of the method: P models in one process, dense arithmetic.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.collectives._entries import kept
from gradtide.core.outer import OuterSGD
from gradtide.core.schedule import Schedule
from gradtide.runtime.layout.placement import fragments
from gradtide.scheme import parse

NESTEROV = OuterSGD(0.7, momentum=0.9, nesterov=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def train_one(
    model: nn.Module, opt: torch.optim.Optimizer, rank: int, step: int
) -> None:
    (model(batch(rank, step)).square() - 0.1).square().mean().backward()
    opt.step()
    opt.zero_grad()


def weights(model: nn.Module) -> Tensor:
    """All parameters, in the order in which buckets have them at first."""
    return torch.cat([p.detach().flatten() for p in reversed([*model.parameters()])])


# - Twins ------------------------------------------------------------------------------


def write(model: nn.Module, values: Tensor, where: Tensor) -> None:
    flat = weights(model)
    flat[where] = values
    begin = 0
    for p in reversed([*model.parameters()]):
        p.data.copy_(flat[begin : begin + p.numel()].view(p.shape))
        begin += p.numel()


def dense(offered: list[Tensor]) -> Tensor:
    return torch.stack(offered).mean(0)


def largest(k: int) -> Callable[[list[Tensor]], Tensor]:
    def exchange(offered: list[Tensor]) -> Tensor:
        total = torch.zeros_like(offered[0])
        for own in offered:
            where = own.abs().topk(k).indices
            total[where] += own[where]
            own[where] = 0
        return total / len(offered)

    return exchange


def tiled(density: float) -> Callable[[list[Tensor]], Tensor]:
    """Every tensor is one tile: its largest entries, among themselves."""
    lengths = [p.numel() for p in reversed([*network().parameters()])]

    def exchange(offered: list[Tensor]) -> Tensor:
        pieces = [own.split(lengths) for own in offered]  # views: what is sent is gone
        means = [
            largest(max(1, round(density * n)))([*row])
            for n, row in zip(lengths, zip(*pieces, strict=True), strict=True)
        ]
        return torch.cat(means)

    return exchange


def twin(
    size: int,
    steps: int,
    schedule: Schedule,
    outer: OuterSGD,
    exchange: Callable[[list[Tensor]], Tensor] = dense,
) -> list[list[Tensor]]:
    """The parameters of every rank after every step."""
    models = [network() for _ in range(size)]
    opts = [adamw(model) for model in models]
    shared = weights(models[0])
    velocity, left = torch.zeros_like(shared), torch.zeros(size, len(shared)).double()
    of = fragments([*models[0].named_parameters()][::-1], schedule.fragments)
    pieces = [
        torch.full((p.numel(),), of[name])
        for name, p in reversed([*models[0].named_parameters()])
    ]
    fragment_of = torch.cat(pieces)
    coming: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}
    seen: list[list[Tensor]] = []
    for step in range(steps):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            train_one(model, opt, rank, step)
        turn, rest = divmod(step + 1, schedule.every // schedule.fragments)
        if not rest:
            where = fragment_of == (turn - 1) % schedule.fragments
            own = [weights(model)[where] for model in models]
            offered = [
                schedule.decay * left[r, where] + (own[r] - shared[where])
                for r in range(size)
            ]
            mean = exchange(offered)
            if exchange is not dense:
                left[:, where] = torch.stack(offered)
            coming[step + schedule.delay] = where, own, mean
        if step in coming:
            where, own, mean = coming.pop(step)
            v = velocity[where] = outer.momentum * velocity[where] + mean
            moved = mean + outer.momentum * v if outer.nesterov else v
            shared[where] += outer.lr * moved
            for rank, model in enumerate(models):
                now, agreed = weights(model)[where], shared[where]
                if schedule.mix is None:
                    value = agreed + (now - own[rank])
                else:
                    value = schedule.mix * now + (1 - schedule.mix) * agreed
                write(model, value, where)
        seen.append([weights(model) for model in models])
    return seen


def trained(scheme: str, steps: int) -> list[list[float]]:
    model, rank = network(), dist.get_rank()
    opt = adamw(model)
    sync = gradtide.replicate(model, opt, scheme)
    seen = []
    for step in range(steps):
        train_one(model, opt, rank, step)
        seen.append(weights(model).tolist())
    sync.remove(end_round=False)
    return seen


PLAIN = OuterSGD()
CASES: dict[str, tuple[Schedule, OuterSGD, bool]] = {
    "local_sgd(every=4)": (Schedule("step", every=4), PLAIN, False),
    "diloco(every=4)": (Schedule("step", every=4), NESTEROV, False),
    "streaming_diloco(wire=None, every=6, delay=1, fragments=3)": (
        Schedule("step", every=6, delay=1, fragments=3, mix=0.5),
        NESTEROV,
        False,
    ),
    "sparseloco(0.1, wire=None, every=4)": (
        Schedule("step", every=4, decay=0.95),
        PLAIN,
        True,
    ),
    # A share other than a half: what is kept is not what is taken.
    "Scheme(Dense(), schedule=Schedule('step', every=2, delay=1, mix=0.8))": (
        Schedule("step", every=2, delay=1, mix=0.8),
        PLAIN,
        False,
    ),
    "Scheme(Dense(), schedule=Schedule('step', every=4, delay=3, fragments=2))": (
        Schedule("step", every=4, delay=3, fragments=2),
        PLAIN,
        False,
    ),
    "topk(0.1, schedule='local', every=4, delay=2, outer=OuterSGD(0.8, 0.5))": (
        Schedule("step", every=4, delay=2),
        OuterSGD(0.8, 0.5),
        True,
    ),
}


@pytest.mark.product
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_recipe_equals_its_twin_in_every_step(size: int) -> None:
    lengths = {name: 5 * case[0].every for name, case in CASES.items()}
    padded = sum(-(-p.numel() // size) * size for p in network().parameters())
    sent = largest(kept(0.1, padded))

    def run() -> list[list[list[float]]]:
        return [trained(name, steps) for name, steps in lengths.items()]

    ranks = run_ranks(size, run)
    for i, (name, (schedule, outer, sparse)) in enumerate(CASES.items()):
        exchange = tiled(0.1) if "sparseloco" in name else sent if sparse else dense
        for step, wanted in enumerate(
            twin(size, lengths[name], schedule, outer, exchange)
        ):
            for rank in range(size):
                found = torch.tensor(ranks[rank][i][step], dtype=torch.float64)
                off = (found - wanted[rank]).abs().max().item()
                assert off < 1e-6, f"{name}, step {step}, rank {rank}: {off}"


def test_the_recipes_have_the_published_constants() -> None:
    diloco, streaming = parse("diloco"), parse("streaming_diloco")
    assert diloco.outer == streaming.outer == OuterSGD(0.7, 0.9, True)
    assert streaming.schedule == Schedule(
        "step", every=30, delay=5, fragments=3, mix=0.5
    )
    sparse = parse("sparseloco")
    assert (sparse.schedule.every, sparse.schedule.decay) == (30, 0.95)
    assert sparse.collective == gradtide.TiledTopK(64 / 4096, wire="2bit")
    assert sparse.outer is None


# - What is sent, and when -------------------------------------------------------------


def test_a_silent_step_sends_nothing() -> None:
    def run() -> list[list[bool]]:
        found = []
        for scheme in ("diloco(every=5)", "sparseloco(every=5)"):
            model, rank = Normed(), dist.get_rank()
            opt = adamw(model)
            sync = gradtide.replicate(model, opt, scheme)
            quiet = []
            for step in range(15):
                records, sent = sync.engine.telemetry.records, sync.engine.transport
                records.clear()
                before = sent.payload_bytes
                with sync.no_sync():
                    model(batch(rank, step)).square().mean().backward()
                train_one(model, opt, rank, step)
                quiet.append(not records and sent.payload_bytes == before)
            found.append(quiet)
            sync.remove()
        return found

    # Buffers in the first step of a round, what was done in the last.
    for ranks in run_ranks(2, run):
        for quiet in ranks:
            assert quiet == [False, True, True, True, False] * 3


class Normed(nn.Module):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


# - What users do ----------------------------------------------------------------------


def alike(values: Tensor) -> bool:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values.contiguous())
    return all(torch.equal(values, other) for other in everyone)


def started(scheme: str, steps: int, model: nn.Module | None = None) -> Any:
    model = network() if model is None else model
    opt = adamw(model)
    sync = gradtide.replicate(model, opt, scheme)
    for step in range(steps):
        train_one(model, opt, dist.get_rank(), step)
    return model, opt, sync


def go_on(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for step in range(8):
        train_one(model, opt, dist.get_rank(), step)


def shared_ones_are_swapped_in(scheme: str) -> None:
    model, opt, sync = started(scheme, 6)
    own = weights(model)
    assert not alike(own)
    with sync.shared_parameters():
        assert alike(weights(model))
        assert not torch.equal(weights(model), own)
        sync.flush()  # ends no round
    assert torch.equal(weights(model), own)
    sync.end_round()
    assert alike(weights(model))
    before = weights(model)
    with sync.shared_parameters():
        assert torch.equal(weights(model), before)
    for step in range(4):
        assert (step == 0) == alike(weights(model))
        train_one(model, opt, dist.get_rank(), step)
    sync.remove()
    assert alike(weights(model))


def other_schemes_are_adopted(scheme: str) -> None:
    model, opt, sync = started(scheme, 6)
    for other in ("local_sgd(every=3, fragments=3)", "topk(0.2, schedule='local')"):
        sync.adopt(other)
        assert alike(weights(model))
        for step in range(4):
            train_one(model, opt, dist.get_rank(), step)
    assert alike(weights(model))
    sync.remove()


def uneven_inputs_end_alike(scheme: str) -> None:
    model, opt, sync = started(scheme, 0)
    with sync.join():
        for step in range(9 + 4 * dist.get_rank()):
            train_one(model, opt, dist.get_rank(), step)
    assert alike(weights(model))
    assert sync.metrics()["step"] == 13
    for step in range(7):
        train_one(model, opt, dist.get_rank(), step)
    sync.remove()


def buffers_follow_rank_0_once_a_round(scheme: str) -> None:
    model, _, sync = started(scheme, 6, Normed())
    mean = model.layers[1].running_mean
    assert not alike(mean)
    sync.end_round()
    with torch.no_grad():
        model(batch(0, 0))
    assert not alike(mean)  # no training step
    model(batch(0, 0))
    assert alike(mean)
    sync.remove()


def one_rank_may_skip_a_silent_step(scheme: str) -> None:
    """As a GradScaler has it: backward, and then no step()."""
    model, opt, sync = started(scheme, 0)
    for step in range(24):
        odd = dist.get_rank() == 1 and step in (1, 5, 6, 11)
        loss = model(batch(dist.get_rank(), step)).square().mean()
        (loss * torch.nan if odd else loss).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if all(grad.isfinite().all() for grad in grads):
            opt.step()
        opt.zero_grad()
    assert weights(model).isfinite().all()
    sync.end_round()
    assert alike(weights(model))
    sync.remove()


def nothing_of_a_ruined_round_is_sent(scheme: str) -> None:
    model, opt, sync = started(scheme, 1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[2].weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"has become .* on rank 1"):
        go_on(model, opt)
    with sync.shared_parameters():
        assert weights(model).isfinite().all()
        assert alike(weights(model))
    sync.remove(end_round=False)


def a_gradient_that_is_not_finite_is_refused(scheme: str) -> None:
    model, opt, sync = started(scheme, 3)
    model(batch(0, 0)).square().mean().backward()
    if dist.get_rank() == 0:
        for p in model.parameters():
            p.grad.fill_(torch.inf)  # silent, or found as step() begins
    opt.step()
    with pytest.raises(RuntimeError, match="rank 0"):
        go_on(model, opt)
    sync.remove(end_round=False)


def gradients_are_accumulated_and_clipped(scheme: str) -> None:
    model, opt, sync = started(scheme, 0)
    twin_model = network()
    alone = adamw(twin_model)
    for step in range(3):  # of the first round: nothing is exchanged yet
        for one, optimizer in ((model, opt), (twin_model, alone)):
            for part in range(2):
                one(batch(dist.get_rank(), 2 * step + part)).square().mean().backward()
            if one is model:
                norm = sync.clip_grad_norm_(0.1)
            else:
                wanted = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(weights(model), weights(twin_model))
    sync.remove()


def another_number_of_ranks_goes_on(scheme: str) -> None:
    """As if one rank went on: with what was agreed on, and a new round."""
    model, opt, sync = started(scheme, 9)
    with sync.shared_parameters():
        agreed = weights(model)
    state = sync.state_dict()
    everyone = [None] * 2
    dist.all_gather_object(everyone, state)
    merged: dict[str, Any] = {}
    for each in everyone:
        merged |= each or {}
    sync.remove()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    again = network()
    opt = adamw(again)
    single = gradtide.replicate(again, opt, scheme, process_group=alone)
    single.load_state_dict(merged)
    if "delay" not in scheme:
        torch.testing.assert_close(weights(again), agreed)
    assert alike(weights(again))
    for step in range(7):
        train_one(again, opt, dist.get_rank(), step)
    single.remove()


USES = (
    shared_ones_are_swapped_in,
    other_schemes_are_adopted,
    uneven_inputs_end_alike,
    buffers_follow_rank_0_once_a_round,
    one_rank_may_skip_a_silent_step,
    nothing_of_a_ruined_round_is_sent,
    a_gradient_that_is_not_finite_is_refused,
    gradients_are_accumulated_and_clipped,
    another_number_of_ranks_goes_on,
)
USED = (
    "diloco(every=4)",
    "streaming_diloco(every=4, delay=1, fragments=1)",
    "sparseloco(0.1, every=4)",
    "topk(0.1, schedule='local', every=4, delay=3)",
)


def test_the_product_of_uses() -> None:
    def run() -> None:
        for i, use in enumerate(USES):
            for scheme in (USED[i % 4], USED[(i + 1 + i // 4) % 4]):
                try:
                    use(scheme)
                except BaseException as error:
                    raise AssertionError(f"{use.__name__}({scheme})") from error

    run_ranks(2, run, limit=240.0)


# - Checkpoints ------------------------------------------------------------------------


def by_torch_save(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


RESUMED = (
    "diloco(every=4)",
    "diloco(every=4, warmup=3)",
    "local_sgd(every=4, warmup=7)",
    "streaming_diloco(every=6, delay=4, fragments=3)",
    "sparseloco(0.1, every=4)",
    "topk(0.1, schedule='local', every=4, delay=3, fragments=2)",
)


@pytest.mark.slow
def test_a_run_is_resumed_in_the_middle_of_a_round_bit_for_bit() -> None:
    def run() -> list[str]:
        rank, wrong = dist.get_rank(), []
        for scheme in RESUMED:
            for stop in (2, 5):
                model = network()
                opt = adamw(model)
                sync = gradtide.replicate(model, opt, scheme)
                for step in range(stop):
                    train_one(model, opt, rank, step)
                own = sync.state_dict()
                # As rank 0 alone saves them, and all ranks read them.
                common: list[Any] = [[model.state_dict(), opt.state_dict()]]
                dist.broadcast_object_list(common)
                saved = by_torch_save((common[0], own))
                for step in range(stop, stop + 7):
                    train_one(model, opt, rank, step)
                sync.remove()
                again = network()
                (states, own) = saved
                again.load_state_dict(states[0])
                opt = adamw(again)
                opt.load_state_dict(states[1])
                sync = gradtide.replicate(again, opt, scheme)
                sync.load_state_dict(own)
                for step in range(stop, stop + 7):
                    train_one(again, opt, rank, step)
                sync.remove()
                if not torch.equal(weights(model), weights(again)):
                    wrong.append(f"{scheme} at {stop}")
        return wrong

    for wrong in run_ranks(2, run):
        assert not wrong


class Half(nn.Module):
    """Trains one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.first = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.first(x) if self.both else out


def test_what_was_trained_before_a_state_was_saved_leaves_with_the_round() -> None:
    """Where ranks never have parameters quite alike, and so cannot tell by these."""
    scheme = "streaming_diloco(every=6, delay=2, fragments=1)"

    def begun() -> tuple[Half, torch.optim.Optimizer, gradtide.Replica]:
        model = Half()
        opt = adamw(model)
        return model, opt, gradtide.replicate(model, opt, scheme)

    def run() -> bool:
        rank = dist.get_rank()
        model, opt, sync = begun()
        for step in range(15):
            model.both = step != 14
            train_one(model, opt, rank, step)
        saved = [by_torch_save(o.state_dict()) for o in (model, opt, sync)]
        again, another, resumed = begun()
        for one, state in zip((again, another, resumed), saved, strict=True):
            one.load_state_dict(state)
        for own, by in ((model, opt), (again, another)):
            own.both = False
            for step in range(15, 24):
                train_one(own, by, rank, step)
        sync.remove()
        resumed.remove()
        return torch.equal(weights(model), weights(again))

    assert all(run_ranks(2, run))


# - What all ranks agreed on last ------------------------------------------------------

RUNS = (
    "diloco(every=4)",
    "streaming_diloco(every=6, delay=2, fragments=3)",
    "sparseloco(every=4)",
)


def test_states_of_two_runs_are_refused_on_all_ranks() -> None:
    for told in run_ranks(2, _mixed):
        for message in told:
            assert "these are states of different runs or moments" in message


def _mixed() -> list[str]:
    told = []
    for scheme in RUNS:
        states = []
        for run in range(2):
            model = network()
            with torch.no_grad():
                next(model.parameters()).add_(run)
            opt = adamw(model)
            sync = gradtide.replicate(model, opt, scheme)
            for step in range(9):
                train_one(model, opt, dist.get_rank(), step)
            states.append(sync.state_dict())
            sync.remove(end_round=False)
        model = network()
        opt = adamw(model)
        sync = gradtide.replicate(model, opt, scheme)
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # told beside
            sync.load_state_dict(states[dist.get_rank()])
        told.append(str(caught.value))
        sync.load_state_dict(states[0])
        for step in range(9, 12):
            train_one(model, opt, dist.get_rank(), step)
        sync.end_round()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, weights(model))
        assert torch.equal(*found)
        sync.remove()
    return told


@pytest.mark.product
@pytest.mark.parametrize("scheme", RUNS)
def test_what_one_rank_alone_has_agreed_on_is_named_at_the_next_exchange(
    scheme: str,
) -> None:
    first, second = run_ranks(2, _apart, scheme)
    assert first == second
    step, message = first
    assert "2.weight differs between ranks 0 and 1 as a fragment leaves" in message
    assert step <= 8 + parse(scheme).schedule.every


def _apart(scheme: str) -> tuple[int, str]:
    model = network()
    opt = adamw(model)
    sync = gradtide.replicate(model, opt, scheme, check_every=0)
    for step in range(8):
        train_one(model, opt, dist.get_rank(), step)
    shared = sync._training.actions.chosen.consensus.shared  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        shared[model[2].weight].view(torch.int64)[0, 0] ^= 1
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012  # told beside
        for step in range(8, 20):
            train_one(model, opt, dist.get_rank(), step)
    if not parse(scheme).schedule.delay:  # what is on its way is applied first
        opt.zero_grad()
        with pytest.raises(RuntimeError, match=r"2\.weight differs"):
            sync.end_round()
    return step, str(caught.value)
