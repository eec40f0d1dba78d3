"""NCCL inside hosts, links between them: each lane has a group of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.transport.as_nccl import as_nccl
from tests.transport.test_nccl import CPU, train

from gradtide.core.levels import Levels, rows
from gradtide.core.ops import AllReduce, Broadcast
from gradtide.core.transport import CommunicationError, Job
from gradtide.transport import connect, nccl
from gradtide.transport.gloo import LANES
from gradtide.transport.inside import InsideHost
from gradtide.transport.staged import StagedTransport

pytestmark = pytest.mark.filterwarnings("ignore:.* has run for minutes")


def by_both(device: torch.device) -> StagedTransport:
    """Hosts of two ranks, as `connect` has them by a pair of groups."""
    links: Any = connect(None, CPU)
    links.hosts = rows(links.group.size, 2)
    groups: list[Any] = []
    for host in links.hosts:
        made = [dist.new_group(list(host), backend="gloo") for _ in LANES]
        if links.group.rank in host:
            groups = made
    return StagedTransport(links, device, InsideHost(groups, links, device))


def test_recipes_train() -> None:
    run_ranks(4, _train)


def _train() -> None:
    asked: list[tuple[str, Any]] = []
    begin = nccl.begin
    with pytest.MonkeyPatch.context() as patch:

        def noted(op: Any, group: Any, pg: Any) -> Any:
            asked.append((type(op).__name__, pg))
            return begin(op, group, pg)

        patch.setattr(nccl, "begin", noted)
        train(2, by_both)
    assert {"ReduceScatter", "AllGather"} <= {name for name, _ in asked}
    # What is before the links are taken, and after, has another group each time.
    before = {pg for name, pg in asked if name == "ReduceScatter"}
    after = {pg for name, pg in asked if name == "AllGather"}
    assert len(before | after) > len(before & after)


@pytest.mark.slow
def test_others_go_through_host_memory_and_failures_end_nccl() -> None:
    run_ranks(4, _failed)


def _failed() -> None:
    class Stuck:
        def is_completed(self) -> bool:
            return False

    aborted: list[Any] = []
    with as_nccl(), pytest.MonkeyPatch.context() as patch:
        transport: Any = by_both(CPU)
        inside, levels = transport._inside, Levels(transport.group, 2)
        x = torch.zeros(3)
        assert inside.knows(levels.inside(AllReduce(x)))
        assert not inside.knows(levels.across(AllReduce(x)))
        assert not inside.knows(Broadcast(x, 0))
        if transport.group.rank == 3:
            transport.close()
            return
        patch.setattr(InsideHost, "_abort", lambda self: aborted.append(self))
        patch.setattr(nccl, "begin", lambda op, group, pg: (x, Stuck()))

        def work() -> None:
            transport.wait(transport.issue(levels.inside(AllReduce(x))))

        stuck = transport.submit(Job(lambda: None, work))
        with pytest.raises(CommunicationError, match="rank 3"):
            stuck.join()
        transport.close()
        assert aborted
