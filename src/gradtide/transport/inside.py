"""Requests inside a host, by NCCL, while others go through host memory.

[Note: A group for each lane] NCCL matches what it is asked in a group by the order
alone. That of one lane of the queue is a function of the program, and that of several
lanes is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from gradtide.core import ops
from gradtide.core.ops import Op
from gradtide.core.transport import CommunicationError
from gradtide.transport import nccl
from gradtide.transport.gloo import GlooTransport
from gradtide.transport.staged import NAP, Pending


class InsideHost:
    """Asks the ranks of this host; `groups` are theirs, one for each lane."""

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        host: GlooTransport,
        device: torch.device,
    ) -> None:
        self._groups, self._host = groups, host
        for pg in groups:
            nccl.meet(pg, device)
        rank = host.group.rank
        (own,) = (row for row in host.hosts if rank in row)
        self._ranks = sorted(own)  # as they are in torch's groups

    def knows(self, op: Op) -> TypeGuard[ops.Among]:
        """Whether a request is one of all ranks of the host, and of no other."""
        if not isinstance(op, ops.Among):
            return False
        return op.inside and [*op.ranks] == self._ranks

    def issue(self, op: ops.Among) -> Pending:
        """Start a request on the current stream; call what is returned for its answer.

        That waits on the host, as the stream is not to wait for other ranks.
        """
        group = ops.subgroup(op, self._host.group)
        answer, work = nccl.begin(op.op, group, self._groups[self._host.lane])

        def finish() -> Any:
            while work is not None and not work.is_completed():
                if self._host.error is not None:
                    self._abort()
                    raise CommunicationError(str(self._host.error))
                time.sleep(NAP)
            return nccl.arrived(answer, work)

        return finish

    def _abort(self) -> None:
        for pg in self._groups:
            pg.abort()
