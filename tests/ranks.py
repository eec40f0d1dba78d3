"""Real ranks for tests: forked processes joined by Gloo on loopback."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import multiprocessing as mp
import os
import pkgutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # (or every forked rank does, at length)
import torch.distributed as dist

from gradtide import runtime, transport
from gradtide.selectors import kernels
from gradtide.wire import codec_of
from tests import tried

TIMEOUT = 20.0  # seconds that a collective may take
# What training loads when it begins, besides all of these packages of ours.
LATER = "encodings.idna", "torch._subclasses.schema_check_mode", "torch.profiler"


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    limit: float = 90.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `work(*args)` on every rank; returns the results in rank order.

    Raises AssertionError with the traceback of the first rank that failed, also for a
    rank that ended without a word or outlived `limit` seconds.
    """
    _load_modules()
    _load_kernels()
    _load_codec()
    # Where this process uses a CUDA device, forked ones could not.
    context = mp.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(
                target=_rank, args=(r, size, folder, backend, pipes[r][1], work, args)
            )
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _collect(ranks, [receiving for receiving, _ in pipes], limit)
        finally:
            for process in ranks:
                process.kill()
                process.join()


@cache
def _load_modules() -> None:
    """Load what training loads when it begins, or every forked rank does."""
    ours = [
        module.name
        for package in (runtime, transport)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    for name in (*LATER, *ours):
        importlib.import_module(name)


@cache
def _load_kernels() -> None:
    """Load what numba compiled, or every forked rank does: for more than a second."""
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(300, dtype=dtype)
        kernels.above(x, 0.5, 300)
        kernels.entries(x, 0.5, 300)


def _load_codec() -> None:
    """The same for the codec that most tests of wires use.

    Compiling it takes ten seconds in a fresh clone: one of pytest's workers does that,
    and the others go on and load it at a later call.
    """
    with Path(__file__).open() as own:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        _run_codec()


@cache
def _run_codec() -> None:
    for dtype in (torch.float32, torch.float64):
        x, codec = torch.ones(300, dtype=dtype), codec_of("int8", dtype)
        message = torch.empty(codec.nbytes(300), dtype=torch.uint8)
        codec.encode(x, message)
        codec.add(message[None], x)


def _collect(ranks: list[Any], pipes: list[Any], limit: float) -> list[Any]:
    deadline = time.monotonic() + limit
    outcomes: dict[int, tuple[str, Any]] = {}
    while len(outcomes) < len(ranks):
        waiting = [p for r, p in enumerate(pipes) if r not in outcomes]
        ready = mp.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(set(range(len(ranks))) - set(outcomes))} hang"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = "died", f"rank {rank} died without a word"
            kind, value = outcomes[rank]
            assert kind == "result", f"rank {rank}: {value}"
            outcomes[rank] = kind, value[0]
            tried.FOUND.update(value[1])
    return [outcomes[rank][1] for rank in range(len(ranks))]


def _rank(
    rank: int, size: int, folder: str, backend: str, pipe: Any, work: Any, args: Any
) -> None:
    gc.freeze()  # what the parent has made is not looked through again and again
    # Where ranks are many and processors few, a third of the samples of a profile were
    # Gloo's thread, polling. It does not if a message that wakes it interrupts nobody.
    with contextlib.suppress(AttributeError, OSError):  # other systems; containers
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group(
            backend,
            init_method=f"file://{Path(folder, 'store')}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        known = set(tried.FOUND)
        tried.remember()
        result = work(*args)
        dist.barrier()
        found = {key: tried.FOUND[key] for key in tried.FOUND.keys() - known}
        pipe.send(("result", (result, found)))
        pipe.close()
        os._exit(0)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        pipe.close()
        os._exit(1)
