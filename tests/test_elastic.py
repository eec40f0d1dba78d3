"""Ranks are lost and come, and the others train on."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtide
from gradtide import elastic
from gradtide.admission import refuse_elastic
from gradtide.elastic import Batches, Lighthouse
from gradtide.scheme import parse
from tests.lighthouse import HEARTBEAT, Job, Words, alike, lighthouse, run

# Where many others run, ranks that load and compile keep others waiting.
pytestmark = pytest.mark.timeout(300)

SCHEMES = [
    "wfbp",
    "dear",
    "wfbp(wire='e3m0')",
    "exdyna(0.2, warmup=4)",
    "exdyna(0.2, schedule='local', warmup=6, wire='e3m0')",
    "diloco(every=4)",
    "sparseloco(every=4)",
]
STEPS = 30
Tell = Callable[[Any], None]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4)
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def members(address: str, name: str, grace: float | None = None) -> Lighthouse:
    return Lighthouse(address, name=name, timeout=30, patience=90, grace=grace)


def digest(model: nn.Module) -> str:
    held = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(held).hexdigest()


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> float:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weighted_step(
    sync: gradtide.Replica,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    name: str,
    skips: bool,
) -> None:
    """A step that counts by its batch, or nothing from this rank."""
    size = {"a": 2, "b": 50, "c": 5, "d": 8}[name]
    sync.weight(size)
    if skips:
        sync.skip()
        optimizer.step()
        optimizer.zero_grad()
    else:
        x = torch.randn(size, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))


def train(
    name: str,
    tell: Tell,
    address: str,
    scheme: str,
    dies: str = "",
    total: int = STEPS,
    buffers: Any = "broadcast",
    until: Callable[[dict[str, Any]], bool] = lambda told: told["ranks"] >= 3,
) -> dict[str, Any]:
    """Train; a rank `dies` in the forward, backward or step that comes next to 9.

    `until` is what else ends it: another may need longer to start than these to train.
    """
    torch.set_num_threads(1)
    if len(name) > 1:  # a host's letter, and a number
        os.environ["GROUP_RANK"] = name[0]
        warnings.filterwarnings("ignore", "hosts of ")
    model, optimizer = build(sum(map(ord, name)))
    how: Any = {"buffers": buffers, "elastic": members(address, name)}
    sync = gradtide.replicate(model, optimizer, scheme, **how)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def die(*_: Any) -> None:
        if sync.metrics()["step"] >= 9:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies == "forward":
        model[2].register_forward_hook(die)
    elif dies == "backward":
        model[2].register_full_backward_hook(die)
    elif dies == "step":
        optimizer.register_step_post_hook(die)
    while (now := sync.meet()) < total or not until(sync.metrics()):
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        tell(now)
    sync.end_round()
    sync.flush()
    told = sync.metrics()
    kept = ("ranks", "generation", "lost_ranks", "lost_steps")
    held = [x for b in model.buffers() for x in b.double().flatten().tolist()]
    levels = sync._session.scheme.levels
    found = {"digest": digest(model), "buffers": str(held), "levels": levels}
    return {**found, **{key: told[key] for key in kept}}


def replaced(job: Job, *others: Any) -> None:
    """Wait for a job, in which d comes when a rank has come to step 8."""
    waiting = ["d"]

    def heard(name: str, now: int) -> None:
        if now >= 8 and waiting:
            job.start(waiting.pop(), *others)

    job.wait(heard)
    assert job.ended.pop("b") == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["forward", "backward", "step"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_train_on_and_another_takes_the_place(scheme: str, dies: str) -> None:
    with lighthouse(3) as address:
        job = Job(train, address, scheme)
        job.start("a")
        job.start("b", dies)
        job.start("c")
        # Counted are three again, before which the two that live wait.
        replaced(job)
    assert {*job.ended} == {"a", "c", "d"}
    assert alike({name: told["digest"] for name, told in job.ended.items()})
    for name in "ac":
        assert job.ended[name]["lost_steps"] <= 1
        assert job.ended[name]["lost_ranks"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("least", [3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_hosts_of_two_ranks_have_one_for_a_while(scheme: str, least: int) -> None:
    """Averages are by levels again once each host has two; three may train on."""
    waiting = ["b3"]

    def heard(_: str, now: int) -> None:
        if now >= 8 and waiting:
            job.start(waiting.pop(), "", STEPS, "broadcast", four)

    with lighthouse(least) as address:
        job = Job(train, address, scheme)
        for name in ("a1", "a2", "b1", "b2"):
            dies = "backward" if name == "b2" else ""
            job.start(name, dies, STEPS, "broadcast", four)
        job.wait(heard)
    assert job.ended.pop("b2") == -signal.SIGKILL
    assert {*job.ended} == {"a1", "a2", "b1", "b3"}
    assert alike({name: told["digest"] for name, told in job.ended.items()})
    assert {told["levels"] for told in job.ended.values()} == {2}


def four(told: dict[str, Any]) -> bool:
    return bool(told["ranks"] == 4)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["forward", "backward", "step"])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "diloco(every=4)"])
def test_means_of_buffers_go_on_among_others(scheme: str, dies: str) -> None:
    with lighthouse(2) as address:
        job = Job(train, address, scheme)
        for name, end in (("a", ""), ("b", dies), ("c", "")):
            job.start(name, end, STEPS, "mean")
        replaced(job, "", STEPS, "mean")
    for key in ("digest", "buffers"):
        assert alike({name: told[key] for name, told in job.ended.items()})


def deal(name: str, tell: Tell, address: str, begin: Any, dies: bool = False) -> None:
    """Tell which samples were read in each step that counted."""
    torch.set_num_threads(1)
    model, optimizer = build(0)
    begin.wait()
    sync = gradtide.replicate(model, optimizer, elastic=members(address, name))
    for samples in Batches(sync, length=51, size=12):
        now = sync.metrics()["step"]
        if now >= 15:
            break
        if dies and now == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(max(len(samples), 2), 8)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        if sync.metrics()["step"] > now:
            tell((now, samples))


def test_nothing_is_read_twice_in_an_epoch_and_nothing_is_missed() -> None:
    read: dict[int, list[int]] = {}

    def heard(name: str, told: tuple[int, list[int]]) -> None:
        read.setdefault(told[0], []).extend(told[1])

    # None trains to the end before others have come, nor by itself in between.
    begin = multiprocessing.get_context("fork").Barrier(3)
    with lighthouse(2) as address:
        job = Job(deal, address, begin)
        for name in "abc":
            job.start(name, name == "b")
        job.wait(heard)
    for epoch in range(3):
        found = [read[step] for step in range(5 * epoch, 5 * epoch + 5)]
        assert sorted(i for each in found for i in each) == [*range(51)]
        assert [len(each) for each in found] == [12, 12, 12, 12, 3]


def last(name: str, tell: Tell, address: str) -> tuple[int, str]:
    """One rank hears of nothing in the last step, in which a second one is killed."""
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    sync = gradtide.replicate(model, optimizer, elastic=members(address, name))
    generator = torch.Generator().manual_seed(ord(name))
    while (now := sync.meet()) < 10:
        if now >= 9 and name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
    sync.remove()
    return now, digest(model)


def test_all_that_live_end_together_where_the_last_step_is_lost() -> None:
    # One that is silent for a second on a busy machine does not train on by itself.
    with lighthouse(2) as address:
        found = run(last, "abc", address)
    assert found.pop("b") == -signal.SIGKILL
    assert found["a"][0] == 10
    assert alike(found)


def weighted(
    name: str, tell: Tell, address: str, scheme: str, skips: bool
) -> dict[str, Any]:
    """Ranks have unequally many samples, and skip in turn; b is lost in step 9."""
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members(address, name))
    generator = torch.Generator().manual_seed(ord(name))
    while (now := sync.meet()) < STEPS or sync.metrics()["ranks"] < 3:
        if now >= 9 and name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        weighted_step(
            sync,
            model,
            optimizer,
            generator,
            name,
            skips and (now + ord(name)) % 3 == 0,
        )
        tell(now)
    sync.end_round()
    sync.flush()
    told = sync.metrics()
    return {"digest": digest(model), "ranks": told["ranks"], "step": told["step"]}


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_and_skips_go_on_among_others(scheme: str, skips: bool) -> None:
    with lighthouse(2) as address:
        job = Job(weighted, address, scheme, skips)
        for name in "abc":
            job.start(name)
        replaced(job)
    assert {*job.ended} == {"a", "c", "d"}
    assert alike(job.ended)


def ends(name: str, tell: Tell, address: str) -> Any:
    """A rank of two that is left alone trains on by itself."""
    torch.set_num_threads(1)
    dies = "backward" if name == "b" else ""
    return train(name, tell, address, "wfbp", dies, until=lambda _: True)


@pytest.mark.slow
def test_one_that_is_left_alone_trains_on() -> None:
    with lighthouse(1) as address:
        found = run(ends, "ab", address)
    assert found["b"] == -signal.SIGKILL
    assert found["a"]["ranks"] == 1


def apart(
    name: str, tell: Tell, address: str, scheme: str, folder: Path
) -> dict[str, Any]:
    """Two lose sight of each other, and meet again when both have done 4 steps."""
    torch.set_num_threads(1)
    heard, (model, optimizer) = Words(), build(ord(name))
    sync = gradtide.replicate(
        model, optimizer, scheme, elastic=members(address, name), buffers="local"
    )
    generator, alone = torch.Generator().manual_seed(ord(name)), 4
    while (now := sync.meet()) < 24 or sync.metrics()["ranks"] < 2:
        if now == alone:
            tell(os.getpid())
            if name == "a":  # and b, which comes meanwhile, does not see it
                os.kill(os.getpid(), signal.SIGSTOP)
            while not (folder / "both").exists():
                time.sleep(0.02)
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        if now >= alone:
            time.sleep(0.05)
    sync.end_round()
    sync.flush()
    exact = scheme in ("wfbp", "dear")  # others' optimizers are their own
    state = str(optimizer.state_dict()["state"]) if exact else ""
    return {"digest": digest(model), "state": state, "words": heard.words}


@pytest.mark.parametrize("scheme", ["wfbp", SCHEMES[4], "diloco(every=4)"])
def test_runs_that_were_apart_are_not_mixed_where_they_meet(
    scheme: str, tmp_path: Path
) -> None:
    with lighthouse(1) as address:
        job, stopped = Job(apart, address, scheme, tmp_path), []

        def heard(name: str, process: int) -> None:
            if name == "a":
                stopped.append(process)
                time.sleep(2.0)  # longer than ranks are silent that live
                job.start("b")
            else:
                os.kill(stopped[0], signal.SIGCONT)
                (tmp_path / "both").touch()

        job.start("a")
        job.wait(heard)
    found = {name: told.pop("words") for name, told in job.ended.items()}
    assert alike(job.ended)
    words = " ".join(found["a"]) + " ".join(found["b"])
    assert "trained apart from this run" in words
    assert "this rank has trained apart from the others" in words


def other_buffers(name: str, tell: Tell, address: str) -> list[float]:
    """Buffers that each rank keeps begin as rank 0's."""
    model, optimizer = build(0)
    model[1].running_mean.fill_(ord(name))
    how: Any = {"buffers": "local", "elastic": members(address, name)}
    gradtide.replicate(model, optimizer, **how)
    found: list[float] = model[1].running_mean.tolist()
    return found


def stopped(
    name: str, tell: Tell, address: str, scheme: str, hears: bool
) -> tuple[str, float]:
    """Train; b is stopped among three, for longer than the lighthouse bears.

    Unless it `hears` that the others were counted without it, it trains on alone.
    """
    torch.set_num_threads(1)
    if not hears:
        plain = elastic._roster
        elastic._roster = lambda counted: replace(plain(counted), since="")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    there = Lighthouse(address, name=name, timeout=6)
    sync = gradtide.replicate(model, optimizer, scheme, elastic=there)
    generator = torch.Generator().manual_seed(ord(name))
    wakes = name != "b"
    while (now := sync.meet()) < 4 * STEPS or sync.metrics()["ranks"] < 3:
        if not wakes and now >= 10 and sync.metrics()["ranks"] == 3:
            wakes = True
            wake = f"sleep {2.5 * HEARTBEAT / 1000}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
    sync.flush()
    assert wakes
    return digest(model), sync.metrics()["lost_steps"]


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_one_that_was_stopped_goes_on_with_the_others(scheme: str, hears: bool) -> None:
    # The others are counted without it, once. It hears of that a step later, from a
    # count in which it is again: it must not train on in the group that they have left.
    # If it does, others are further than it is, with an update that was due, too.
    with lighthouse(2) as address:
        found = run(stopped, ["a", "b", "c"], address, scheme, hears)
    assert alike({name: held for name, (held, _) in found.items()})
    if hears:
        assert not any(lost for _, lost in found.values())


def test_all_begin_with_the_buffers_of_one() -> None:
    with lighthouse(2) as address:
        found = run(other_buffers, "ab", address)
    assert found == dict.fromkeys("ab", [float(ord("a"))] * 24)


def wrong(name: str, tell: Tell, address: str) -> Any:
    """One comes later, with another scheme."""
    torch.set_num_threads(1)
    if name != "z":
        return train(
            name, tell, address, "wfbp", until=lambda told: told["generation"] > 1
        )
    model, optimizer = build(0)
    with pytest.raises(ValueError, match="scheme differs between ranks"):
        gradtide.replicate(model, optimizer, "dear", elastic=members(address, name))
    return None


@pytest.mark.slow
def test_one_that_comes_with_another_scheme_ends_alone() -> None:
    waiting = ["z"]
    with lighthouse(2) as address:
        job = Job(wrong, address)

        def heard(name: str, now: int) -> None:
            if waiting:
                job.start(waiting.pop())

        for name in "ab":
            job.start(name)
        job.wait(heard)
    assert job.ended.pop("z") is None
    assert alike({name: told["digest"] for name, told in job.ended.items()})


def scaled(name: str, tell: Tell, address: str, passed: bool) -> Any:
    """Train with a GradScaler; z comes later, and the others are far from its scale."""
    torch.set_num_threads(1)
    model, optimizer = build(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    how: Any = {"grad_scaler": scaler} if passed else {}
    sync = gradtide.replicate(model, optimizer, elastic=members(address, name), **how)

    def over() -> bool:
        told = sync.metrics()
        return bool(told["ranks"] == 3 if passed else told["lost_ranks"])

    try:
        while (now := sync.meet()) < STEPS or not over():
            loss = (model(torch.randn(8, 8)) - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            tell(now)
    except ValueError as error:
        return str(error)
    sync.flush()
    return digest(model), scaler.state_dict()


@pytest.mark.parametrize("passed", [True, False])
def test_one_that_comes_has_the_scale_of_the_others_or_ends_alone(passed: bool) -> None:
    waiting = ["z"]
    with lighthouse(2) as address:
        job = Job(scaled, address, passed)

        def heard(name: str, now: int) -> None:
            if waiting and now >= 12:
                job.start(waiting.pop())

        for name in "ab":
            job.start(name)
        job.wait(heard)
    if not passed:
        assert "pass its own to replicate(..., grad_scaler=" in job.ended.pop("z")
    assert alike(job.ended)


def cut(name: str, tell: Tell, address: str, scheme: str) -> Any:
    """What was done, delivered and left, where connections break in between."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(40, 8, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before, done = [torch.empty(0)], torch.zeros_like(model.weight)

    def begins(*_: Any) -> None:
        before[0] = model.weight.detach().clone()

    @torch.no_grad()
    def ends(*_: Any) -> None:  # before anything is exchanged
        done.add_(model.weight - before[0])

    optimizer.register_step_pre_hook(begins)
    optimizer.register_step_post_hook(ends)
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members(address, name))
    begin = model.weight.detach().clone()
    generator = torch.Generator().manual_seed(ord(name))
    for number in range(12):
        if number == 7 and name == "b":
            sync.engine.transport._meeting.hang_up()
        x = torch.randn(8, 40, dtype=torch.float64, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    residual = sync.state_dict()[f"rank{torch.distributed.get_rank()}"]["remainders"]
    left = residual.get("weight", torch.zeros_like(begin))
    moved = model.weight.detach() - begin
    return [done.tolist(), moved.tolist(), left.tolist(), sync.metrics()["lost_steps"]]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["topk(0.2, schedule='local')"])
def test_steps_that_were_under_way_are_not_lost(scheme: str) -> None:
    """Where links break and all live: what all did is delivered, or left."""
    with lighthouse(3) as address:
        ended = run(cut, "abc", address, scheme)
    found = [ended[name] for name in "abc"]
    done, moved, left = (torch.tensor([one[i] for one in found]) for i in range(3))
    assert max(one[3] for one in found) == 1
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[0], moved[2])
    torch.testing.assert_close(done.sum(0), 3 * moved[0] + left.sum(0))


@pytest.mark.slow
def test_a_lighthouse_that_is_not_there_is_named() -> None:
    pytest.importorskip("torchft", reason="gradtide[elastic] is not installed")
    model, optimizer = build(0)
    there = Lighthouse("http://127.0.0.1:9", timeout=5, patience=1)
    with pytest.raises(gradtide.CommunicationError, match="torchft_lighthouse"):
        gradtide.replicate(model, optimizer, elastic=there)


def test_wrong_arguments_are_refused() -> None:
    pytest.importorskip("torchft", reason="gradtide[elastic] is not installed")
    model, optimizer = build(0)
    with pytest.raises(ValueError, match="address"):
        gradtide.replicate(model, optimizer, elastic="host0:29510")
    with pytest.raises(ValueError, match="above 0"):
        Lighthouse("http://host0:29510", patience=0)
    there = Lighthouse("http://127.0.0.1:9")
    refuse_elastic(model, optimizer, parse("wfbp"), None)
    with pytest.raises(ValueError, match="an optimizer that is not known"):
        gradtide.replicate(model, None, elastic=there)
    with pytest.raises(ValueError, match="K-FAC"):
        gradtide.replicate(model, optimizer, "mpd_kfac", elastic=there)
    optimizer.exchanges = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="exchanges something in its step"):
        gradtide.replicate(model, optimizer, elastic=there)
    del optimizer.exchanges  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="still to be chosen"):
        gradtide.replicate(model, optimizer, "auto", elastic=there)
