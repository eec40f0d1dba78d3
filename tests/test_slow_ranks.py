"""A rank that is slow ends its rounds where others have waited for it long enough."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import gradtide
from gradtide.elastic import Batches, Lighthouse
from tests.lighthouse import Job, Words, alike, lighthouse, run
from tests.test_elastic import Tell, build, digest, members, step, weighted_step

pytestmark = pytest.mark.timeout(300)

FAST, SLOW, GRACE = 0.01, 0.15, 0.2  # seconds
DILOCO = "diloco(every=8)"
STREAMING = "streaming_diloco(every=8, fragments=2, delay=3)"  # with a mix
OTHERS = [
    "diloco(every=8, warmup=3)",
    "sparseloco(every=8)",
    "oktopk(0.2, schedule='local', every=8, delay=2, fragments=2)",
    "local_sgd(every=8, delay=7)",
]
SLOWLY = pytest.mark.slow  # as tests; elsewhere it is ranks that are slow


def train(
    name: str,
    tell: Tell,
    address: str,
    scheme: str,
    slow: str,
    grace: float | None = GRACE,
    total: int = 43,
    buffers: Any = "broadcast",
) -> dict[str, Any]:
    """Train, where some ranks are slow; the total is no number of whole rounds."""
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    how: Any = {"buffers": buffers, "elastic": members(address, name, grace)}
    sync = gradtide.replicate(model, optimizer, scheme, **how)
    generator = torch.Generator().manual_seed(ord(name))
    numbers, longest, made, log = [], 0.0, 0, Words()
    while (now := sync.meet()) < total:
        numbers.append(now)
        begin, made = time.monotonic(), made + 1
        time.sleep(SLOW if name in slow else FAST)
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        longest = max(longest, time.monotonic() - begin)
        tell(now)
    sync.end_round()
    sync.flush()
    told = sync.metrics()
    return {
        "digest": digest(model),
        "made": made,
        "longest": longest,
        "log": [word for word in log.words if "slower than others" in word],
        "numbers": numbers,
        "end": now,
        **{
            key: told[key]
            for key in ("step", "shortened_rounds", "left_out_steps", "ranks")
        },
    }


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(
    "scheme", [DILOCO, STREAMING, *(pytest.param(s, marks=SLOWLY) for s in OTHERS)]
)
def test_a_slow_rank_leaves_steps_out_and_all_end_alike(scheme: str) -> None:
    with lighthouse(3) as address:
        found = run(train, "abc", address, scheme, "b")
    assert alike({name: told["digest"] for name, told in found.items()})
    for told in found.values():
        assert told["step"] == told["end"] == 43
        assert told["numbers"] == sorted(set(told["numbers"]))
        assert told["made"] + told["left_out_steps"] == 43
        # On a machine that is busy others may be late, too.
        assert len(told["log"]) == min(told["shortened_rounds"], 1)
        assert told["left_out_steps"] <= found["b"]["left_out_steps"]
    assert found["b"]["left_out_steps"] > 0
    assert "of the 8 steps of its round" in found["b"]["log"][0]


@pytest.mark.slow
def test_two_slow_ranks_at_once() -> None:
    with lighthouse(3) as address:
        found = run(train, "abc", address, DILOCO, "ab")
    assert alike({name: told["digest"] for name, told in found.items()})
    left_out = {name: told["left_out_steps"] for name, told in found.items()}
    assert min(left_out["a"], left_out["b"]) > max(left_out["c"], 5)


@pytest.mark.slow
@pytest.mark.alone
def test_others_wait_for_the_grace_and_a_step() -> None:
    with lighthouse(2) as address:
        found = run(train, "ab", address, DILOCO, "b")
    # The rest is for a look, and for machines that are busy.
    assert found["a"]["longest"] < GRACE + SLOW + 0.35
    with lighthouse(2) as address:
        found = run(train, "ab", address, DILOCO, "b", None, 16)
    assert alike({name: told["digest"] for name, told in found.items()})
    assert found["a"]["longest"] > 7 * (SLOW - FAST) - 0.05
    assert found["b"]["made"] == 16
    assert found["b"]["shortened_rounds"] == 0


def loops(
    name: str, tell: Tell, address: str, how: str, buffers: Any
) -> dict[str, Any]:
    """Several backward passes make a step, in all of which b is slow."""
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    sync = gradtide.replicate(
        model,
        optimizer,
        "diloco(every=8, delay=2)",
        buffers=buffers,
        elastic=members(address, name, GRACE),
    )
    generator = torch.Generator().manual_seed(ord(name))

    def loss() -> torch.Tensor:
        time.sleep((SLOW if name == "b" else FAST) / 3)
        x = torch.randn(8, 8, generator=generator)
        return (model(x) - torch.tanh(x[:, :4])).square().mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        one = loss()
        one.backward()  # type: ignore[no-untyped-call]
        time.sleep(SLOW / 3 if name == "b" else FAST)
        return one

    while sync.meet() < 37:
        if how == "closure":
            optimizer.step(closure)
            continue
        for i in range(3):
            if how == "no_sync" and i < 2:
                with sync.no_sync():
                    loss().backward()  # type: ignore[no-untyped-call]
            elif how == "exchange":
                with sync.no_sync():
                    loss().backward()  # type: ignore[no-untyped-call]
                if i == 2:
                    sync.exchange()
            else:
                one = loss()
                one.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                if how == "graph":
                    one.backward()  # type: ignore[no-untyped-call]
        sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    sync.end_round()
    sync.flush()
    told = sync.metrics()
    held = [x for b in model.buffers() for x in b.double().flatten().tolist()]
    found = {
        "digest": digest(model),
        "left_out": told["left_out_steps"],
        "step": told["step"],
    }
    return {**found, "buffers": held}


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["broadcast", "mean", "local"])
@pytest.mark.parametrize("how", ["several", "graph", "no_sync", "exchange", "closure"])
def test_a_step_may_have_several_backward_passes(how: str, buffers: Any) -> None:
    with lighthouse(3) as address:
        found = run(loops, "abc", address, how, buffers)
    for key in ("digest", "step", *(["buffers"] if buffers == "mean" else [])):
        assert alike({name: told[key] for name, told in found.items()}), key
    # Its thread may have taken seconds to connect.
    assert found["b"]["left_out"] > 0


def count(
    name: str, tell: Tell, address: str, scheme: str, weighs: bool
) -> dict[str, Any]:
    """What this rank's steps did in all, and what came of all ranks'."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 20, bias=False), torch.nn.Linear(20, 8, bias=False)
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def held() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    before, done = [torch.empty(0)], torch.zeros_like(held())

    def begins(*_: Any) -> None:
        before[0] = held()

    def ends(*_: Any) -> None:  # before anything is exchanged
        done.add_(held() - before[0])

    optimizer.register_step_pre_hook(begins)
    optimizer.register_step_post_hook(ends)
    sync = gradtide.replicate(
        model, optimizer, scheme, elastic=members(address, name, GRACE)
    )
    begin = held()
    generator = torch.Generator().manual_seed(ord(name))
    while sync.meet() < 27:
        time.sleep(SLOW if name == "b" else FAST)
        if weighs:
            sync.weight(WEIGHTS[name])
        x = torch.randn(8, 40, dtype=torch.float64, generator=generator)
        step(model, optimizer, x, x[:, :8])
    sync.end_round()
    left_out = sync.metrics()["left_out_steps"]
    return {"done": done, "moved": held() - begin, "left_out": left_out}


WEIGHTS = {"a": 300, "b": 100, "c": 200}


@pytest.mark.slow
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(
    "scheme", ["local_sgd(every=8)", "local_sgd(every=8, delay=3, fragments=2)"]
)
def test_every_step_that_was_made_counts_once(scheme: str, weighs: bool) -> None:
    with lighthouse(3) as address:
        found = run(count, "abc", address, scheme, weighs)
    shares = WEIGHTS if weighs else dict.fromkeys("abc", 1)
    told = sum(told["done"] * shares[name] for name, told in found.items())
    for one in found.values():
        torch.testing.assert_close(one["moved"], told / sum(shares.values()))
    # Its thread may have taken seconds to connect.
    assert found["b"]["left_out"] > 0


def recovers(name: str, tell: Tell, address: str) -> dict[str, Any]:
    """One rank is slow in its first 20 steps."""
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    sync = gradtide.replicate(
        model, optimizer, DILOCO, elastic=members(address, name, GRACE)
    )
    cuts = []
    while (now := sync.meet()) < 64:
        time.sleep(SLOW if name == "b" and now < 20 else FAST)
        x = torch.randn(8, 8)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        if sync.metrics()["shortened_rounds"] > len(cuts):
            cuts.append(now)
    return {"digest": digest(model), "cuts": cuts}


@pytest.mark.slow
def test_one_that_is_fast_again_is_cut_no_more() -> None:
    with lighthouse(2) as address:
        found = run(recovers, "ab", address)
    assert alike({name: told["digest"] for name, told in found.items()})
    cuts = found["b"]["cuts"]
    assert sum(now < 24 for now in cuts) > 1 >= sum(now >= 24 for now in cuts)


def lost(
    name: str, tell: Tell, address: str, scheme: str, dies: str, skips: bool
) -> dict[str, Any]:
    """Ranks have weights and skip in turn; b is slow; one that `dies` does in step 20.

    Whose number has come to 40 leaves when three are there.
    """
    torch.set_num_threads(1)
    model, optimizer = build(ord(name))
    sync = gradtide.replicate(
        model, optimizer, scheme, elastic=members(address, name, GRACE)
    )
    generator = torch.Generator().manual_seed(ord(name))
    while (now := sync.meet()) < 40 or sync.metrics()["ranks"] < 3:
        if now >= 20 and name == dies:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(SLOW if name == "b" else FAST)
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
    return {
        "digest": digest(model),
        "step": told["step"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("dies", ["a", "b", "c"])
@pytest.mark.parametrize("scheme", [DILOCO, STREAMING])
def test_ranks_are_lost_meanwhile(scheme: str, dies: str, skips: bool) -> None:
    """The first, which has the store; the slow one; one that waits and asks."""
    waiting = ["d"]
    with lighthouse(2) as address:
        job = Job(lost, address, scheme, dies, skips)

        def heard(name: str, now: int) -> None:
            if now >= 16 and waiting:
                job.start(waiting.pop())

        for name in "abc":
            job.start(name)
        job.wait(heard)
    assert job.ended.pop(dies) == -signal.SIGKILL
    assert alike({name: told["digest"] for name, told in job.ended.items()})
    assert alike({name: told["step"] for name, told in job.ended.items()})


def deal(name: str, tell: Tell, address: str) -> dict[str, Any]:
    """Tell which samples were read."""
    torch.set_num_threads(1)
    model, optimizer = build(0)
    sync = gradtide.replicate(
        model, optimizer, DILOCO, elastic=members(address, name, GRACE)
    )
    read = []
    for samples in Batches(sync, length=240, size=10):  # 24 steps: three rounds
        if sync.metrics()["step"] >= 24:
            break
        time.sleep(SLOW if name == "b" else FAST)
        x = torch.ones(max(len(samples), 2), 8)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        read += samples
    return {"read": read, "left_out_steps": sync.metrics()["left_out_steps"]}


@pytest.mark.waits
def test_samples_of_steps_that_are_left_out_are_read_by_nobody() -> None:
    with lighthouse(2) as address:
        found = run(deal, "ab", address)
    read = found["a"]["read"] + found["b"]["read"]
    assert len(set(read)) == len(read)
    left_out = sum(told["left_out_steps"] for told in found.values())
    assert len(read) == 240 - 5 * left_out
    assert found["b"]["left_out_steps"] > 0


def stuck(name: str, tell: Tell, address: str) -> dict[str, Any]:
    """One rank is for longer in a step than others wait for any."""
    torch.set_num_threads(1)
    log = Words()
    model, optimizer = build(ord(name))
    there = Lighthouse(address, name=name, timeout=3, patience=90, grace=GRACE)
    sync = gradtide.replicate(model, optimizer, DILOCO, elastic=there)
    while (now := sync.meet()) < 24 or sync.metrics()["ranks"] < 3:
        tell(now)
        time.sleep(FAST)
        x = torch.randn(8, 8)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
    sync.end_round()
    lost = sync.metrics()["lost_steps"]
    return {"digest": digest(model), "lost": lost, "log": log.words}


@pytest.mark.slow
def test_one_that_is_stuck_is_lost_and_comes_back() -> None:
    """It is stopped in the middle of a round, and says what that has cost."""
    with lighthouse(2) as address:
        job = Job(stuck, address)

        def heard(name: str, now: int) -> None:
            if name == "b" and now == 11:
                pid = job._ranks["b"][0].pid
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()

        for name in "abc":
            job.start(name)
        job.wait(heard)
    found = job.ended
    assert alike({name: told["digest"] for name, told in found.items()})
    assert found["b"]["lost"] == 1
    for name, told in found.items():
        said = [word for word in told["log"] if "round began, is lost" in word]
        assert len(said) == (name == "b"), said


def test_wrong_arguments_are_refused() -> None:
    pytest.importorskip("torchft", reason="gradtide[elastic] is not installed")
    for wrong in (0, -1.0, 300.0, float("nan")):
        with pytest.raises(ValueError, match="below timeout"):
            Lighthouse("http://127.0.0.1:9", grace=wrong)
    there = Lighthouse("http://127.0.0.1:9", grace=5.0)
    for scheme in ("wfbp", "dear", "topk(0.2, schedule='local')"):
        with pytest.raises(ValueError, match=r"no rounds.*diloco"):
            gradtide.replicate(*build(0), scheme, elastic=there)


def unlike(name: str, tell: Tell, address: str) -> str:
    grace = {"a": 5.0, "b": None}[name]
    how = build(0)
    with pytest.raises(ValueError, match="grace differs between ranks") as error:
        gradtide.replicate(*how, "diloco", elastic=members(address, name, grace))
    return str(error.value)


def test_ranks_have_one_grace() -> None:
    with lighthouse(2) as address:
        assert alike(run(unlike, "ab", address))
