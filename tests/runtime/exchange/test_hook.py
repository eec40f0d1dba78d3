"""Communication hooks for torch's DDP exchange gradients in the place of a scheme.

Without the future import: DDP compares a hook's annotations with classes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as Torchs

import gradtide
from gradtide import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore:.*takes the place of")


class Net(nn.Module):
    """A head is used in every other step only, by one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.other = nn.Linear(12, 3)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        found: Tensor = self.head(self.body(x).tanh())
        return found + self.other(self.body(x).tanh()) if other else found


def own(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook: it halves the bucket, and adds up."""
    state.append(bucket.index())
    assert len(bucket.parameters()) == len(bucket.gradients())
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return future


def hooks() -> dict[str, tuple[Any, Callable[..., Any]]]:
    low_rank = powerSGD_hook.PowerSGDState(
        None, 1, start_powerSGD_iter=3, orthogonalization_epsilon=1e-8
    )
    local = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 4)
    return {
        "own": ([], own),
        "group": (dist.new_group(), default_hooks.allreduce_hook),
        "powersgd": (low_rank, powerSGD_hook.powerSGD_hook),
        "local": (local, post_localSGD_hook.post_localSGD_hook),
    }


def train(model: Any, micro: int) -> list[list[float]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(8):
        for part in range(micro):
            rng = torch.Generator().manual_seed(
                100 * step + 10 * part + dist.get_rank()
            )
            with model.no_sync() if part < micro - 1 else nullcontext():
                x = torch.randn(5, 6, generator=rng)
                other = step % 2 == 0 and dist.get_rank() == 0
                model(x, other).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [t.double().flatten().tolist() for t in model.state_dict().values()]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk"])
def test_hooks_do_what_they_do_under_ddp(scheme: str) -> None:
    """To the bit with two ranks; PowerSGD draws at random, bucket by bucket."""

    def work() -> Any:
        found = {}
        for micro in (1, 2):
            for name in hooks():
                trained = []
                # On Gloo torch's class mixes up the messages of PowerSGD's buckets.
                alone = name == "powersgd"
                for wrap in (Torchs, DistributedDataParallel)[alone:]:
                    torch.manual_seed(1)
                    options: dict[str, Any] = {"find_unused_parameters": True}
                    if wrap is DistributedDataParallel:
                        options["scheme"] = scheme
                    model = wrap(Net(), **options)
                    state, hook = hooks()[name]
                    model.register_comm_hook(state, hook)
                    trained.append(train(model, micro))
                    if name == "own":
                        assert state[0] == 0
                found[name, micro] = trained
        return found

    ranks = run_ranks(2, work)
    for rank in ranks:
        for (name, micro), trained in rank.items():
            assert trained[0] == trained[-1] == ranks[0][name, micro][0], name


def test_a_scheme_comes_back_and_a_shadow_calls_the_hook() -> None:
    def work() -> Any:
        model = DistributedDataParallel(Net(), scheme="dear")
        called: list[int] = []
        with pytest.warns(UserWarning, match="own takes the place of"):
            model.register_comm_hook(called, own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.attach(optimizer)  # the hook stays
        with model.join():
            for _ in range(2 + 2 * dist.get_rank()):
                model(torch.ones(2, 6), True).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        count = len(called)
        numbers = model.replica.metrics()
        model.replica.adopt("dear")
        for _ in range(3):
            model(torch.ones(2, 6), True).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        return count, len(called), numbers["density"], flat.tolist()

    ranks = run_ranks(2, work)
    assert ranks[0][3] == ranks[1][3]
    for count, later, density, _ in ranks:
        assert count == later >= 4
        assert density == 1


def test_what_is_no_hook_is_refused() -> None:
    def work() -> Any:
        def said(hook: Any, scheme: Any = "wfbp") -> str:
            model = DistributedDataParallel(Net(), scheme=scheme)
            model.attach(torch.optim.SGD(model.parameters(), lr=0.1))

            def begin() -> None:
                model.register_comm_hook(None, hook)
                model(torch.ones(2, 6), True).sum().backward()

            with pytest.raises((TypeError, ValueError)) as raised:
                begin()
            return str(raised.value)

        def done(value: Any) -> Any:
            future = torch.futures.Future[Any]()
            future.set_result(value)
            return future

        return [
            ("must be callable", said({})),
            ("returned a NoneType", said(lambda *_: None)),
            ("has to be one tensor", said(lambda *_: done(3))),
            ("has to be one tensor", said(lambda *_: done(torch.ones(1)))),
            ("state of its own", said(own, gradtide.Scheme(schedule=gradtide.LOCAL))),
            ("preconditioner stays", said(own, "mpd_kfac")),
        ]

    for expected, said in run_ranks(1, work)[0]:
        assert expected in said
