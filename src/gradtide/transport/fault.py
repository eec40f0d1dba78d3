"""Who is missing: ranks that fail say so in the store, the others are named."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradtide.core.ops import Group

REPORT_SECONDS = 2.0  # what a surviving rank needs to notice a closed connection


class FailureReporter:
    """Gathers, after a failure, which ranks are still there to report it."""

    def __init__(self, store: Store, group: Group) -> None:
        self._store, self._group = store, group

    def explain(self, request: str, error: RuntimeError, peer: int | None) -> str:
        """The message of a CommunicationError; `peer` is who the lost message was for.

        A peer that reports a failure of its own within the window only passed it on.
        """
        try:
            silent = self._silent()
        except RuntimeError:  # the store lived in the process that died
            missing = "the process that hosts the store (rank 0) is gone"
        else:
            # If the peer is silent, the others may only be waiting for one another.
            ranks = ", ".join(map(str, [peer] if peer in silent else silent))
            missing = f"rank {ranks} does not respond (dead, stalled, or ended early)"
            if not silent:
                missing = "all ranks noticed; see the first rank's error"
        text = str(error).strip().splitlines()[0]
        return f"rank {self._group.rank}: {request} failed: {missing} ({text})"

    def _silent(self) -> list[int]:
        self._store.set(str(self._group.rank), "failed")
        deadline = time.monotonic() + REPORT_SECONDS
        silent = list(range(self._group.size))
        while silent and time.monotonic() < deadline:
            silent = [r for r in silent if not self._store.check([str(r)])]
            time.sleep(0.05)
        return silent


def failure_reporter(pg: dist.ProcessGroup) -> FailureReporter:
    """A reporter over the job's own store; torch names `pg` alike on all its ranks."""
    store = dist.distributed_c10d._get_default_store()
    prefixed = PrefixStore(f"gradtide/{pg.group_name}", store)
    prefixed.set_timeout(timedelta(seconds=REPORT_SECONDS))
    return FailureReporter(prefixed, Group(pg.rank(), pg.size()))
