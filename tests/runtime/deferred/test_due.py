"""Parameters that are read while their update is due are up to date, always."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.optim.swa_utils import AveragedModel

import gradtide
from gradtide.core.step import Stage
from gradtide.runtime.deferred.due import Aliases, due_kind

SCHEMES = [
    f"Scheme(Dense(), BySize(0.004, 0.001, 1), {name})" for name in ("WFBP", "DEAR")
]


class Own(nn.Parameter):
    """A parameter's subclass, as users have them."""


def model() -> nn.Sequential:
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    net[2].weight = Own(net[2].weight.detach().clone())
    return net


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(6, 12, generator=rng), torch.randint(0, 4, (6,), generator=rng)


Read = Callable[[nn.Sequential, int], Any]


def trained(scheme: str, read: Read, steps: int = 6) -> tuple[Any, int]:
    """What is read after each step, and how many updates were due after the last."""
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(net, opt, scheme)
    found = []
    for step in range(steps):
        x, y = data(step)
        cross_entropy(net(x), y).backward()
        opt.step()
        due = sum(b.stage is Stage.DUE for b in sync._training.placement.buckets)
        found.append(read(net, step))
        opt.zero_grad()
    sync.remove()
    assert all(type(p) in (nn.Parameter, Own) for p in net.parameters())
    return [found, [p.tolist() for p in net.parameters()]], due


def average_by_data() -> Read:
    """An average of weights by hand, with `.data`."""
    kept = [p.data.clone() for p in model().parameters()]

    def read(net: nn.Sequential, _: int) -> Any:
        for mean, p in zip(kept, net.parameters(), strict=True):
            mean.mul_(0.9).add_(p.data, alpha=0.1)
        return [mean.tolist() for mean in kept]

    return read


def average_by_lists() -> Read:
    kept = [p.detach().clone() for p in model().parameters()]

    @torch.no_grad()
    def read(net: nn.Sequential, _: int) -> Any:
        torch._foreach_lerp_(kept, list(net.parameters()), 0.1)
        return [mean.tolist() for mean in kept]

    return read


def averaged_model() -> Read:
    made: list[AveragedModel] = []

    def read(net: nn.Sequential, step: int) -> Any:
        if not step:
            made.append(AveragedModel(net))
        made[0].update_parameters(net)
        return [p.tolist() for p in made[0].parameters()]

    return read


def on_rank_0() -> Read:
    """A norm that one rank alone logs."""

    def read(net: nn.Sequential, step: int) -> Any:
        if dist.get_rank() or step % 2:
            return None
        return [p.norm().item() for p in net.parameters()]

    return read


def by_function() -> Read:
    """The parameters of one module in the hands of another."""

    def read(net: nn.Sequential, step: int) -> Any:
        x = data(step)[0]
        return linear(x, net[0].weight, net[0].bias).tolist()

    return read


def by_functional_call() -> Read:
    def read(net: nn.Sequential, step: int) -> Any:
        named = dict(net.named_parameters())
        return torch.func.functional_call(net, named, data(step)[0]).tolist()

    return read


def as_vector() -> Read:
    return lambda net, _: nn.utils.parameters_to_vector(net.parameters()).tolist()


def changed_in_place() -> Read:
    """Weights that are kept small, as of a critic."""

    @torch.no_grad()
    def read(net: nn.Sequential, _: int) -> None:
        for p in net.parameters():
            p.clamp_(-0.1, 0.1)

    return read


def copied() -> Read:
    def read(net: nn.Sequential, _: int) -> Any:
        twin = copy.deepcopy(net)
        assert [type(p) for p in twin.parameters()] == [
            type(p) for p in model().parameters()
        ]
        return [p.tolist() for p in twin.parameters()]

    return read


def pickled() -> Read:
    def read(net: nn.Sequential, step: int) -> Any:
        file = io.BytesIO()
        what = (net, list(net.parameters()), dict(net.named_parameters()))[step % 3]
        if step % 2:
            file.write(pickle.dumps(what))
        else:
            torch.save(what, file)
        file.seek(0)
        assert b"gradtide" not in file.getvalue()
        back = pickle.load(file) if step % 2 else torch.load(file, weights_only=False)
        if isinstance(back, dict):
            back = back.values()
        return [p.tolist() for p in (net.parameters() if back is what else _of(back))]

    return read


def _of(what: Any) -> Iterable[Tensor]:
    return what.parameters() if isinstance(what, nn.Module) else what


def swapped() -> Read:
    """Other weights while evaluating, as Lightning's weight averaging has them."""
    mean = model()

    def read(net: nn.Sequential, step: int) -> Any:
        pairs = list(zip(net.parameters(), mean.parameters(), strict=True))
        for p, q in pairs:
            p.data, q.data = q.data, p.data
        with torch.no_grad():
            found = net(data(step)[0]).tolist()
        for p, q in pairs:
            p.data, q.data = q.data, p.data
        return found

    return read


def vector_and_back() -> Read:
    def read(net: nn.Sequential, _: int) -> None:
        vector = nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.99, net.parameters())

    return read


READERS = {
    make.__name__: make
    for make in (
        average_by_data,
        average_by_lists,
        averaged_model,
        on_rank_0,
        by_function,
        by_functional_call,
        as_vector,
        changed_in_place,
        copied,
        pickled,
        swapped,
        vector_and_back,
    )
}


@pytest.mark.filterwarnings("ignore:.*torch.load")
def test_whoever_reads_after_a_step_reads_its_result() -> None:
    run_ranks(2, _readers)


def _readers() -> None:
    for name, make in READERS.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "another tensor shares")
            eager, _ = trained(SCHEMES[0], make())
            lazy, due = trained(SCHEMES[1], make())
        assert due > 1, name
        assert eager == lazy, name


def kept_data(net: nn.Sequential) -> list[Tensor]:
    return [p.data for p in net.parameters()]


def kept_detached(net: nn.Sequential) -> list[Tensor]:
    return [p.detach() for p in net.parameters()]


def kept_views(net: nn.Sequential) -> list[Tensor]:
    return [p.detach().view(-1)[1:] for p in net.parameters()]


def kept_arrays(net: nn.Sequential) -> list[Any]:
    return [p.detach().numpy() for p in net.parameters()]


def one_of_them(net: nn.Sequential) -> list[Tensor]:
    return [net[0].weight.data]


def flat_memory(net: nn.Sequential) -> list[Tensor]:
    """All parameters moved into one tensor."""
    flat = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    begin = 0
    for p in net.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return [flat]


ALIASES: tuple[Callable[[nn.Sequential], list[Any]], ...] = (
    kept_data,
    kept_detached,
    kept_views,
    kept_arrays,
    one_of_them,
    flat_memory,
)


def test_what_shares_a_parameters_memory_is_up_to_date_and_said_to_cost() -> None:
    run_ranks(2, _aliases)


def _aliases() -> None:
    for alias in ALIASES:
        for first in (0, 2):  # made at first, or in the midst of training
            results = []
            for scheme in SCHEMES:
                kept: list[Any] = []

                def read(
                    net: nn.Sequential,
                    step: int,
                    alias: Any = alias,
                    kept: list[Any] = kept,
                    first: int = first,
                ) -> Any:
                    if step == first and dist.get_rank():  # one rank alone
                        kept += alias(net)
                    return [tensor.tolist() for tensor in kept]

                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    results.append(trained(scheme, read))
                said = [w for w in caught if "shares the memory of" in str(w.message)]
                expected = scheme is SCHEMES[1] and dist.get_rank() == 1
                assert len(said) == expected, alias.__name__
                for told in said:
                    text, every = str(told.message), alias is not one_of_them
                    assert ("100% of what is exchanged" in text) == every, text
                    assert "parameters in all" in text
                    assert ("'wfbp' would do as well" in text) or not every
            (eager, _), (lazy, due) = results
            assert eager == lazy, alias.__name__
            whole = alias is not one_of_them and dist.get_rank()
            assert (due == 0) == bool(whole), alias.__name__


class Reaches(nn.Module):
    """Reads a parameter of a module whose forward it calls only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 4)
        self.direct = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out: Tensor = linear(x, self.head.weight) if self.direct else self.head(x)
        return out


def test_a_module_may_read_what_another_one_holds() -> None:
    run_ranks(2, _reaches)


def _reaches() -> None:
    found = []
    for scheme in SCHEMES:
        torch.manual_seed(1)
        net = Reaches()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        sync = gradtide.replicate(net, opt, scheme)
        for step in range(6):
            net.direct = step > 2 and bool(step % 2)
            x, y = data(step)
            cross_entropy(net(x), y).backward()
            opt.step()
            opt.zero_grad()
        sync.remove()
        found.append([p.tolist() for p in net.parameters()])
    assert found[0] == found[1]


def test_parameters_that_share_memory_are_never_deferred() -> None:
    run_ranks(2, _tied_by_data)


def _tied_by_data() -> None:
    found = []
    for scheme in SCHEMES:
        net = model()
        net[4].weight = nn.Parameter(net[2].weight.data[:4])
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        sync = gradtide.replicate(net, opt, scheme)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(5):
                x, y = data(step)
                cross_entropy(net(x), y).backward()
                opt.step()
                opt.zero_grad()
            sync.remove()
        found.append([p.tolist() for p in net.parameters()])
    assert found[0] == found[1]


# - By themselves ----------------------------------------------------------------------


def test_shape_and_the_like_are_told_without() -> None:
    settled: list[nn.Parameter] = []
    p = nn.Parameter(torch.ones(2, 3))
    due = due_kind(p, settled.append)
    assert due is not None
    p.__class__ = due
    p.grad = torch.ones(2, 3)
    p.grad = None
    p.requires_grad_(False).requires_grad_(True)
    p.register_post_accumulate_grad_hook(lambda _: None).remove()
    assert isinstance(p, nn.Parameter)
    assert (p.shape, p.dtype, p.device.type) == ((2, 3), torch.float32, "cpu")
    assert (p.numel(), p.dim(), p.is_leaf, p.grad) == (6, 2, True, None)
    assert not settled
    assert p.sum().item() == 6
    assert len(settled) == 1
    assert settled[0] is p
    assert type(p) is nn.Parameter


def test_a_replaced_memory_is_looked_at_again() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    aliases = Aliases([p, q])
    assert aliases.find() == []
    kept = p.data
    assert len(aliases.find()) == 1
    p.data = torch.zeros(3)
    assert aliases.find() == []
    kept = torch.zeros(6)
    p.data, q.data = kept[:3], kept[3:]
    assert len(aliases.find()) == 2
    del kept
    assert aliases.find() == []  # two of one storage, and nobody else
    p.data = q.data[:2]
    assert len(aliases.find()) == 2


class Added(nn.Module):
    """Something whose backward does not read its parameter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((300,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.shift


def test_backwards_of_a_forward_before_step_add_to_what_the_program_sees() -> None:
    run_ranks(2, _late_backwards)


def _late_backwards() -> None:
    for zeroed in (True, False):
        eager, lazy = (_with_late_backwards(scheme, zeroed) for scheme in SCHEMES)
        assert eager == lazy, zeroed


def _with_late_backwards(scheme: str, zeroed: bool) -> Any:
    net = nn.Sequential(*map(Added, range(4)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(net, opt, scheme)
    rng = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        own, late = torch.randn(2, 300, generator=rng)
        (net(own) * own).sum().backward()
        with sync.no_sync():
            loss = (net(late) * late).sum()
            opt.step()
            due = any(b.stage is Stage.DUE for b in sync._training.placement.buckets)
            if zeroed:
                opt.zero_grad()
            loss.backward()
        net(own)
        grads = [p.grad for p in net.parameters()]
        seen.append([None if grad is None else grad.tolist() for grad in grads])
    assert due == ("DEAR" in scheme)
    sync.remove()
    return seen, [p.tolist() for p in net.parameters()]


def test_gradients_of_due_parameters_are_pythons_and_given_back() -> None:
    run_ranks(2, _given_back)


def _given_back() -> None:
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = gradtide.replicate(net, opt, SCHEMES[1])
    for step in range(4):
        x, y = data(step)
        opt.zero_grad()
        cross_entropy(net(x), y).backward()
        opt.step()
    first, second, *others = net.parameters()
    own = torch.ones_like(second)
    first.grad, second.grad = None, own
    sync.flush()
    assert first.grad is None
    assert second.grad is own
    assert all(p.grad is not None for p in others)
    assert not any("grad" in vars(p) for p in net.parameters())
    sync.remove()
