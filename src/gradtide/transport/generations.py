"""Process groups one after the other, as ranks come and go.

Each generation is torch's default process group, on a store that one of its ranks
hosts: so whatever asks for the default group has those who are there now.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradtide.core.torch_internals.distributed import TCPStore, count_groups_anew
from gradtide.core.transport import CommunicationError
from gradtide.transport.addresses import chosen
from gradtide.transport.descriptors import limit_reads
from gradtide.transport.doors import refuses
from gradtide.transport.fault import AGENT, GONE

MEETING = 5.0, 20.0  # seconds for ranks to come, and for a store to answer: the bounds
PATIENCE = 0.5  # seconds before a rank looks whether those live that have not come
TURN = 0.001, 0.02  # seconds between two looks, at first and at most
DECLINED = "declined"  # by a rank of the generation
_formed = WeakSet[Any]()  # default groups of here
_hooks: list[Any] = []  # for errors of programs: before the last group, and torch's
# For good: where a forked process (a DataLoader's worker) collected one as garbage, it
# would wait for a thread that it does not have.
_stores: list[TCPStore] = []


def open_store() -> tuple[TCPStore, str]:
    """A store of this process's own, and the address at which others reach it.

    Raises ValueError if this host has no address for others, or a default group is
    there, which would be given up.
    """
    if dist.is_initialized() and dist.group.WORLD not in _formed:
        raise ValueError(
            "elastic=... forms the default process group: leave init_process_group() "
            "out, and start ranks without a wrapper that calls it"
        )
    here = chosen()
    if here.error:
        raise ValueError(here.error)
    store = TCPStore(here.address, 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    return store, f"{here.address} {store.port}"


def form(number: str, addresses: Sequence[str], rank: int, seconds: float) -> None:
    """Make some ranks the default process group, in the place of what was.

    Args:
        number: Of this generation; no other of these stores has it.
        addresses: Of the ranks' stores, as `open_store` told each. They meet in the
            first one's; a rank lives as long as its store answers.
        rank: This rank's number.
        seconds: The timeout of the group.

    Raises CommunicationError if a rank has ended, declines, or does not come.
    """
    end()
    count_groups_anew()
    patience = meeting_seconds(seconds)
    # The store is a rank's, whatever has started this process.
    os.environ.pop(AGENT, None)
    if rank and is_gone(addresses[0]):  # it would be called for as long as may be
        raise CommunicationError(f"rank {rank}: rank 0 {GONE}, before the others met")
    host, port = addresses[0].split()
    try:
        generation = PrefixStore(f"generation {number}", reach(addresses[0], patience))
        _gather(generation, addresses, rank, patience)
        _unwrap()
        dist.init_process_group(
            "gloo",
            store=generation,
            rank=rank,
            world_size=len(addresses),
            timeout=timedelta(seconds=seconds),
        )
        _formed.add(dist.group.WORLD)
        _hooks.append(sys.excepthook)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank}: no group of {len(addresses)} ranks by the store at {host}, "
            f"port {port} ({error})"
        ) from error


def _unwrap() -> None:
    """Have torch wrap `sys.excepthook` once, not once for each generation.

    It puts the rank before each line of an error that ends the program, by a hook that
    calls the one before. A thousand of them are too many calls.
    """
    if sys.excepthook in _hooks[1:]:
        sys.excepthook = _hooks[0]
    _hooks[:] = [sys.excepthook]


def meeting_seconds(seconds: float) -> float:
    """For how long ranks wait for each other whose group has such a timeout."""
    least, most = MEETING
    return max(least, min(seconds, most))


def reach(address: str, seconds: float) -> TCPStore:
    """A connection to a rank's store, for whose answers nobody waits any longer.

    A process that is stopped has its calls taken by the system, and answers none; torch
    would wait for ever, for a store that is made, and for each thing that it is asked.
    Raises CommunicationError where there is no answer.
    """
    host, port = address.split()
    made: Future[TCPStore] = Future()

    def call() -> None:
        own = {"is_master": False, "wait_for_workers": False}
        try:
            late = timedelta(seconds=seconds)
            made.set_result(TCPStore(host, int(port), **own, timeout=late))
        except BaseException as error:  # raised where it is waited for
            made.set_exception(error)

    threading.Thread(target=call, name="gradtide calls", daemon=True).start()
    if not wait([made], seconds).done:
        raise CommunicationError(
            f"the rank at {host}, port {port} does not answer: it may be stopped"
        )
    store = made.result()
    limit_reads(host, int(port), seconds)
    return store


def _gather(
    store: PrefixStore, addresses: Sequence[str], rank: int, patience: float
) -> None:
    """Wait until all have come; CommunicationError if one never will."""
    store.set(f"here/{rank}", "")
    awaited, begin = list(range(len(addresses))), time.monotonic()
    knock, (pause, longest) = begin + PATIENCE, TURN
    while awaited := [other for other in awaited if not store.check([f"here/{other}"])]:
        now = time.monotonic()
        if store.check([DECLINED]):
            raise CommunicationError(
                f"rank {rank}: a rank that was counted has lost another one since, and "
                "does not come to the new group"
            )
        if now > knock:
            knock = now + PATIENCE
            gone = [str(other) for other in awaited if is_gone(addresses[other])]
            if gone:
                raise CommunicationError(
                    f"rank {rank}: rank {', '.join(gone)} {GONE}, before it came to "
                    "the new group"
                )
        if now - begin > patience:
            raise CommunicationError(
                f"rank {rank}: rank {', '.join(map(str, awaited))} did not come to the "
                f"new group in {patience:g} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def decline(number: str, address: str) -> None:
    """Have nobody wait for this rank in a generation, whose first store is given."""
    if is_gone(address):
        return
    with suppress(RuntimeError, ValueError):
        store = reach(address, MEETING[0])
        PrefixStore(f"generation {number}", store).set(DECLINED, "")


def is_gone(address: str) -> bool:
    """Whether nobody listens any more where a rank's store was."""
    host, port = address.split()
    return refuses(host, int(port), PATIENCE)


def end() -> None:
    """Give up the default process group, if there is one."""
    with suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()
