"""Ranks that wait in vain are told so within seconds; ranks that are late are not."""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradtide
from gradtide.core.transport import Progress
from gradtide.runtime.turns import Turns
from gradtide.transport import comm_queue, inquiry
from tests.ranks import run_ranks

pytestmark = pytest.mark.waits
LIMIT = 10.0  # seconds: from the last common step to the end of all ranks


def train(scheme: str, steps: int, normed: bool = False) -> gradtide.Replica:
    """Take so many steps, and tell how many that were."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if normed else []
    model = nn.Sequential(nn.Linear(4, 8), *norm, nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradtide.replicate(model, opt, scheme)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step()
    return sync


def run_to_the_end(
    folder: Path, size: int, work: Callable[[int], Any]
) -> tuple[float, list[str]]:
    """Processes that end as programs do; their seconds, and what they raised."""
    fork = mp.get_context("fork")

    def main(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), size)
        limit = timedelta(seconds=40)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=limit
        )
        # Who ends while others are within that has torch's own error raised in them.
        (folder / f"met{rank}").touch()
        while len(list(folder.glob("met*"))) < size:
            time.sleep(0.001)
        try:
            work(rank)
        except RuntimeError as error:
            (folder / f"rank{rank}").write_text(str(error))

    ranks = [fork.Process(target=main, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT + 20)
        process.kill()
    end = time.monotonic()
    files = [folder / f"rank{rank}" for rank in range(size)]
    told = [file.read_text() if file.exists() else "" for file in files]
    return end - float((folder / "stopped").read_text()), told


def barrier(_: object) -> None:
    dist.barrier()


def average(_: object) -> None:
    dist.all_reduce(torch.ones(3))


def destroy(_: object) -> None:
    dist.destroy_process_group()
    time.sleep(LIMIT - 4)


def remove(sync: gradtide.Replica) -> None:
    sync.remove()
    time.sleep(LIMIT - 4)


@pytest.mark.product
@pytest.mark.parametrize(
    ("size", "short", "scheme", "then", "words"),
    [
        (2, 0, "wfbp", None, "its program has ended"),
        (2, 1, "dear", None, "its program has ended"),
        (
            2,
            0,
            "topk(schedule='local')",
            barrier,
            r"is waiting inside torch.distributed.barrier\(\)",
        ),
        (3, 1, "dear", barrier, r"is waiting inside torch.distributed.barrier\(\)"),
        (2, 1, "wfbp", average, r"is waiting inside torch.distributed.all_reduce\(\)"),
        (2, 0, "wfbp", destroy, r"has called destroy_process_group\(\)"),
        (2, 1, "topk", remove, r"has called sync.remove\(\)"),
    ],
)
def test_unequal_numbers_of_batches_are_told(
    tmp_path: Path, size: int, short: int, scheme: str, then: Any, words: str
) -> None:
    def work(rank: int) -> None:
        sync = train(scheme, 10 if rank == short else 13, normed=short == 0)
        if rank == short:
            (tmp_path / "stopped").write_text(str(time.monotonic()))
            if then is not None:
                then(sync)

    seconds, told = run_to_the_end(tmp_path, size, work)
    assert seconds < LIMIT
    pattern = rf"step 1[123].*rank {short} took 10 steps and {words}.*sync\.join\(\)"
    for rank in range(size):
        if rank != short:
            assert re.search(pattern, told[rank]), told


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("\nno luck\nat all"), "ValueError: no luck"),
    ],
)
def test_an_error_is_told_in_one_line(error: BaseException, words: str) -> None:
    assert inquiry.in_short(error) == words


def test_after_one_step(tmp_path: Path) -> None:
    """The second backward begins with an exchange of its own: of the order."""

    def work(rank: int) -> None:
        train("wfbp", 1 + 2 * rank)
        if rank == 0:
            (tmp_path / "stopped").write_text(str(time.monotonic()))

    seconds, told = run_to_the_end(tmp_path, 2, work)
    assert seconds < LIMIT
    assert "rank 0 took 1 steps and its program has ended" in told[1]


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize(
    ("scheme", "steps"), [("wfbp", 0), ("diloco(every=4)", 2), ("dear", 1)]
)
def test_a_rank_that_dies_before_ranks_are_connected_is_named(
    tmp_path: Path, scheme: str, steps: int, dead: int
) -> None:
    """In its first forward, in a round that has sent nothing yet; without a word."""

    def work(rank: int) -> None:
        sync = train(scheme, steps)
        if rank == dead:
            (tmp_path / "stopped").write_text(str(time.monotonic()))
            os._exit(9)
        for _ in range(4):
            sync.model(torch.randn(4, 4)).square().mean().backward()
            sync.optimizer.step()

    seconds, told = run_to_the_end(tmp_path, 3, work)
    assert seconds < LIMIT
    for rank in {0, 1, 2} - {dead}:
        assert f"rank {dead} is gone: its process has ended" in told[rank], told


def save_and_load(sync: gradtide.Replica) -> None:
    sync.load_state_dict(sync.state_dict())


@pytest.mark.product
@pytest.mark.parametrize(
    ("scheme", "call", "words"),
    [
        ("wfbp", save_and_load, "load_state_dict"),
        ("wfbp", lambda sync: sync.adopt("dear"), "adopt"),
        ("dear", lambda sync: sync.join().__enter__(), "join|__enter__"),
        ("diloco(every=3)", lambda sync: sync.end_round(), "end_round"),
    ],
)
def test_a_call_that_one_rank_makes_alone_is_named(
    tmp_path: Path, scheme: str, call: Callable[[Any], Any], words: str
) -> None:
    """On all ranks; and not the link is to blame."""

    def work(rank: int) -> None:
        sync = train(scheme, 2)
        if rank == 1:
            (tmp_path / "stopped").write_text(str(time.monotonic()))
            call(sync)
        for _ in range(3):
            sync.model(torch.randn(4, 4)).square().mean().backward()
            sync.optimizer.step()

    seconds, told = run_to_the_end(tmp_path, 2, work)
    assert seconds < LIMIT
    for each in told:
        where = rf"rank 0 .*in (back|for)ward\(\); rank 1 .*in ({words})\(\)"
        assert re.search(where, each), told
        assert "link" not in each


@pytest.mark.product
@pytest.mark.parametrize("patient", [None, 0, 1])
def test_a_step_of_muon_without_a_backward_is_named(
    tmp_path: Path, patient: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank waits in another queue; one asks when the other one may have ended."""
    muon = pytest.importorskip("gradtide.optim")

    def work(rank: int) -> None:
        if rank == patient:
            monkeypatch.setattr(comm_queue, "PATIENCE", LIMIT - 3)
        model = nn.Linear(6, 5, bias=False)
        optimizer = muon.DistributedMuon(model.parameters(), lr=0.01)
        gradtide.replicate(model, optimizer)
        for step in range(4):
            if step == 2 and rank == 1:
                (tmp_path / "stopped").write_text(str(time.monotonic()))
            else:
                model(torch.randn(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds, told = run_to_the_end(tmp_path, 2, work)
    assert seconds < LIMIT
    for each in told:
        assert re.search(
            r"rank 0 .*in backward\(\); rank 1 .*in \w*Muon.step\(\)", each
        )


def test_a_rank_that_is_late_is_waited_for() -> None:
    """It computes, or is in a collective of ranks that do not wait for it."""

    def run() -> float:
        rank = dist.get_rank()
        pair = dist.new_group([0, 2])
        sync = train("wfbp", 2)
        begin = time.monotonic()
        if rank == 0:
            dist.barrier(group=pair)  # with rank 2, which computes
        if rank == 2:
            time.sleep(9)
            dist.barrier(group=pair)
        sync.model(torch.randn(4, 4)).sum().backward()
        return time.monotonic() - begin

    assert min(run_ranks(3, run)) > 8


def test_for_whom_a_rank_waits_is_told_once() -> None:
    (told, late), (others, _) = run_ranks(2, _wait_for_long)
    who = r"rank 0 has waited [34] s in step 2, for .*: rank 1 is late: took 1 steps"
    assert re.match(who, told)
    assert late == 1
    assert not others


def _wait_for_long() -> tuple[str, int]:
    inquiry.LONG = 3.0
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradtide.transport").addHandler(handler)
    sync = train("wfbp", 1)
    time.sleep(8 * dist.get_rank())
    model, opt = sync._session.model, sync._session.optimizer
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    sync.remove()
    return "".join(found), len(found)


def test_who_has_begun_a_call_and_does_not_wait_yet_says_which() -> None:
    turns = Turns(Progress())

    def take_turn() -> None:
        with turns:
            pass

    with turns:
        thread = threading.Thread(target=take_turn)
        thread.start()
        while True:
            frame = inquiry.frame_of(thread.ident or 0)
            if frame is not None and frame.f_code.co_name == "__enter__":
                break
        seen = inquiry._seen(frame)
    thread.join()
    assert seen == {"doing": "is at work in __enter__()"}
    assert inquiry._seen(sys._getframe()) == {"doing": "is at work"}


def test_what_does_not_arrive_is_told_of_the_network() -> None:
    own = inquiry.Position(4, 9, "is at work", item=9, name="grad1")
    as_far = {1: own, 2: inquiry.Position(4, 11, "is at work", item=9)}
    said = inquiry.long_wait(0, 31.4, own, as_far, {2})
    assert "rank 0 has waited 31 s in step 5, for grad1, and every rank" in said
    assert "what rank 2 sent does not arrive" in said
    assert inquiry.long_wait(0, 31.4, own, as_far, ()).endswith("for grad1")


def test_replicas_leave_no_threads_behind() -> None:
    def run() -> list[int]:
        counts = []
        for _ in range(3):
            train("wfbp", 1).remove()
            counts.append(threading.active_count())
        return counts

    for first, *others in run_ranks(2, run):
        assert others == [first] * 2


def test_the_timeout_of_the_users_store_stays() -> None:
    def run() -> bool:
        store = dist.distributed_c10d._get_default_store()
        before = store.timeout
        train("wfbp", 1)
        return bool(store.timeout == before)

    assert run_ranks(2, run) == [True, True]


def test_no_garbage_is_collected_where_python_looks_at_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []

    def frames() -> dict[int, Any]:
        found.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            assert inquiry.frame_of(7) is None
            assert gc.isenabled() == collects
        finally:
            gc.enable()
    assert found == [False, False]
