"""The class that is used in the place of torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.nn.parallel.distributed import _BufferCommHookLocation

import gradtide
from gradtide import DistributedDataParallel
from gradtide.runtime.optimizer.finder import Finder
from tests.ranks import run_ranks

LOCAL = gradtide.Scheme(gradtide.TopK(0.3), schedule=gradtide.LOCAL)


def network(seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(16) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 16), middle, nn.Linear(16, 3))


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(5, 6, generator=rng)


def bits(module: nn.Module) -> list[list[float]]:
    return [t.double().flatten().tolist() for t in module.state_dict().values()]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, few: range) -> None:
    for step in few:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


# - The optimizer that comes later -----------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["dear", "topk", LOCAL, "mpd_kfac", "auto"])
def test_a_scheme_begins_when_the_optimizer_has_stepped(scheme: Any) -> None:
    def work() -> Any:
        model = DistributedDataParallel(network(dist.get_rank()), scheme=scheme)
        replica = model.replica
        before = replica.waiting
        optimizer = sgd(model)
        known = [replica.optimizer is optimizer]
        steps(model, optimizer, range(4))
        known.append(replica.optimizer is optimizer)
        numbers = replica.metrics()
        return before, replica.waiting, known, numbers["step"], bits(model.module)

    ranks = run_ranks(2, work)
    for before, after, known, count, _ in ranks:
        assert before == (scheme != "topk")  # which can do without
        assert not after
        assert known == [False, before]
        assert count == 4
    assert same([rank[-1] for rank in ranks])


def test_the_first_step_is_exact_and_the_others_are_the_schemes() -> None:
    def work() -> Any:
        def train(wrap: Callable[[nn.Module], nn.Module], few: range) -> Any:
            model = wrap(network())
            steps(model, sgd(model), few)
            return bits(model)

        def sparse(model: nn.Module) -> nn.Module:
            return DistributedDataParallel(model, scheme=LOCAL)

        one, two = range(1), range(2)
        return (
            train(sparse, one) == train(Torchs, one),
            train(sparse, two) == train(Torchs, two),
        )

    assert run_ranks(2, work) == [(True, False)] * 2


def test_an_optimizer_that_is_known_saves_the_waiting() -> None:
    def work() -> Any:
        net = network()
        optimizer = sgd(net)
        model = DistributedDataParallel(net, optimizer=optimizer, scheme="dear")
        given = model.replica.waiting, model.replica.optimizer is optimizer
        other = DistributedDataParallel(network(), scheme="dear")
        second = sgd(other)
        other.attach(second)
        told = other.replica.waiting, other.replica.optimizer is second
        steps(model, optimizer, range(3))
        steps(other, second, range(3))
        return given, told, bits(model) == bits(other)

    assert run_ranks(2, work) == [((False, True), (False, True), True)] * 2


def test_a_residual_is_loaded_when_the_optimizer_is_known() -> None:
    def work() -> Any:
        model = DistributedDataParallel(network(), scheme=LOCAL)
        steps(model, sgd(model), range(4))
        saved = model.replica.state_dict()
        again = DistributedDataParallel(copy.deepcopy(model.module), scheme=LOCAL)
        message = refusal(RuntimeError, lambda: again.replica.load_state_dict(saved))
        again.attach(sgd(again))
        again.replica.load_state_dict(saved)
        norms = [
            m.replica.metrics(residual=True)["residual_norm"] for m in (model, again)
        ]
        return message, norms

    for message, (before, after) in run_ranks(2, work):
        assert "call attach(optimizer) before, on every rank" in message
        assert before == after > 0


def test_optimizers_that_hold_a_part() -> None:
    """Two optimizers share a model under wfbp; a scheme that must know one refuses."""

    def work() -> Any:
        def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
            first, *rest = model.parameters()
            return [torch.optim.SGD([first], lr=0.1), torch.optim.Adam(rest, lr=0.1)]

        found = []
        for wrap in (Torchs, DistributedDataParallel):
            model = wrap(network())
            both = pair(model)
            for step in range(3):
                model(batch(step)).square().mean().backward()
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(bits(model))
        model = DistributedDataParallel(network(), scheme="dear")
        first, _ = pair(model)
        model(batch(0)).square().mean().backward()
        return found[0] == found[1], refusal(ValueError, first.step)

    for equal, message in run_ranks(2, work):
        assert equal
        assert "0.bias requires a gradient but is not in the optimizer" in message
        assert "use 'wfbp'" in message
        assert "gradtide.optim.Several([...])" in message


@pytest.mark.parametrize("told", [True, False])
def test_optimizers_of_two_kinds_are_refused(told: bool) -> None:
    """By name on every rank, before or after they are found."""

    def work() -> Any:
        net = network()
        kind = (torch.optim.SGD, torch.optim.Adam)[dist.get_rank()]
        optimizer = kind(net.parameters(), lr=0.1)
        if told:
            wrap = partial(DistributedDataParallel, net, optimizer=optimizer)
            return refusal(ValueError, wrap)
        model = DistributedDataParallel(net, scheme="diloco(every=2)")
        model(batch(0)).square().mean().backward()
        return refusal(ValueError, optimizer.step)

    for message in run_ranks(2, work):
        assert "the optimizer differs between ranks: rank 0 has SGD" in message
        assert "rank 1 has Adam; build the same model and optimizer" in message


def test_another_optimizer_takes_over() -> None:
    def work() -> Any:
        found = []
        for wrap in (Torchs, lambda net: DistributedDataParallel(net, scheme="dear")):
            model = wrap(network())
            steps(model, sgd(model), range(4))
            second = torch.optim.AdamW(model.parameters(), lr=0.01)
            steps(model, second, range(4, 8))
            found.append(bits(model))
        return found[0] == found[1], model.replica.optimizer is second

    assert run_ranks(2, work) == [(True, True)] * 2


@pytest.mark.parametrize(
    "scheme", ["exdyna(0.05, schedule='local', warmup=6)", "diloco(every=3)"]
)
def test_another_optimizer_takes_over_where_steps_are_exchanged(scheme: Any) -> None:
    """Its first step takes means, from parameters that all ranks have alike.

    So does that of the former one, whose state was each rank's own, if it comes back.
    """

    def work() -> Any:
        model = DistributedDataParallel(network(), scheme=scheme)
        first = torch.optim.AdamW(model.parameters(), lr=0.01)
        second = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for round_, optimizer in enumerate((first, second, first)):
            steps(model, optimizer, range(8 * round_, 8 * round_ + 1))
            found.append(bits(model))
            steps(model, optimizer, range(8 * round_ + 1, 8 * round_ + 8))
        model.replica.end_round()
        return *found, bits(model), model.replica.optimizer is first

    one, other = run_ranks(2, work)
    assert one == other
    assert one[-1]


def test_who_is_found() -> None:
    p, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    class Told:
        def __init__(self) -> None:
            self.steps: list[Any] = []

        def begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
            assert args[0] is optimizer
            self.steps.append(("begins", optimizer))

        def ends(self, optimizer: Any) -> None:
            self.steps.append(("ends", optimizer))

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inner.step()

    told = Told()
    finder = Finder([p], told.begins, told.ends)
    inner, foreign = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([other], lr=0.1)
    outer = Outer([p], lr=0.1)
    foreign.step()
    outer.step()
    inner.step()
    expected = [("begins", outer), ("ends", outer), ("begins", inner), ("ends", inner)]
    assert told.steps == expected
    finder.rest()
    inner.step()
    assert told.steps == expected
    Finder([p], told.begins, told.ends)
    told.steps = []
    del told
    inner.step()  # nobody is there to be told


def test_parameters_that_come_before_the_first_step_are_refused() -> None:
    def work() -> Any:
        net = network()
        net[0].requires_grad_(False)
        model = DistributedDataParallel(net, scheme="dear")
        optimizer = sgd(model)
        net[0].requires_grad_(True)
        model(batch(0)).sum().backward()
        return refusal(RuntimeError, optimizer.step)

    for message in run_ranks(2, work):
        assert "0.weight was added or unfrozen after replicate()" in message


def test_nobody_steps_and_the_scheme_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtide.parallel.PATIENCE", 3)

    def work() -> Any:
        model = DistributedDataParallel(network(), scheme="dear")
        for step in range(3):
            model(batch(step)).sum().backward()
        with pytest.warns(UserWarning, match=r"no torch\.optim\.Optimizer"):
            model(batch(3))
        return True

    assert run_ranks(1, work) == [True]


# - DDP's manners ----------------------------------------------------------------------


def test_the_forward_decides_whether_its_backward_exchanges() -> None:
    """As in DDP: also where the backward comes later, or two come at once."""

    def work(scheme: str | None) -> Any:
        net = network()
        model = Torchs(net) if scheme is None else DistributedDataParallel(net)
        found = []

        def note() -> None:
            found.append([p.grad.flatten().tolist() for p in net.parameters()])
            model.zero_grad()

        with model.no_sync():
            loss = model(batch(0)).sum()
        loss.backward()  # stays here
        note()
        model.require_backward_grad_sync = False
        model(batch(1)).sum().backward()
        model.require_backward_grad_sync = True
        model(batch(2)).sum().backward()  # exchanges both
        note()
        first = model(batch(3)).sum()
        with model.no_sync():
            second = model(batch(4)).sum()
        (first + second).backward()  # exchanges
        note()
        with torch.no_grad(), model.no_sync():
            model(batch(5))
        model(batch(5)).sum().backward()
        note()
        return found

    for ddps, ours in zip(
        run_ranks(2, work, None), run_ranks(2, work, "wfbp"), strict=True
    ):
        assert ours == ddps


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_what_only_no_sync_has_used_is_exchanged(scheme: str) -> None:
    """Ranks would keep unlike gradients of layers that the last backward left out."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

        def forward(self, x: Tensor, which: int) -> Tensor:
            found: Tensor = self.layers[which](x)
            return found

    def work() -> Any:
        def ours(net: nn.Module, **_: Any) -> nn.Module:
            return DistributedDataParallel(net, scheme=scheme)

        found = []
        for wrap in (Torchs, ours):
            model = wrap(Either(), find_unused_parameters=True)
            optimizer = sgd(model)
            for step in range(6):
                for micro in (0, 1):
                    model.require_backward_grad_sync = micro == 1
                    which = (step + 2 * micro + dist.get_rank()) % 4
                    model(batch(2 * step + micro), which).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(bits(model))
        return found

    ranks = run_ranks(2, work)
    for ddps, own in ranks:
        assert own == ddps
    assert ranks[0] == ranks[1]


def average(state: Any, buffers: dict[str, Tensor]) -> Any:
    """A hook on buffers, for the mean of the ranks in the place of rank 0's."""
    floats = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    with torch.no_grad():
        for buffer in floats:
            dist.all_reduce(buffer.div_(2))


@pytest.mark.product
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"forward_sync_buffers": False},
        {"init_sync": False},
        {"hook": _BufferCommHookLocation.PRE_FORWARD},
    ],
)
def test_what_starts_alike_and_when_buffers_follow(options: dict[str, Any]) -> None:
    unknown = options.keys() - inspect.signature(Torchs).parameters.keys() - {"hook"}
    if unknown:
        pytest.skip(f"DDP of torch {torch.__version__} has no {', '.join(unknown)}")

    def work() -> Any:
        found = []
        for wrap in (Torchs, DistributedDataParallel):
            net = network(dist.get_rank(), norm=True)
            net[1].running_mean += dist.get_rank()
            hook = options.get("hook")
            model = wrap(net, **({} if hook else options))
            if hook:
                model._register_buffer_comm_hook(None, average, hook)
            found.append([bits(model)])
            optimizer = sgd(model)
            for step in range(6):
                model.train(step % 3 != 2)
                model.require_backward_grad_sync = step % 2 == 1
                if not model.training:
                    with torch.no_grad():
                        found[-1].append(model(batch(step)).tolist())
                    continue
                model(batch(step)).square().mean().backward()
                if model.require_backward_grad_sync:
                    optimizer.step()
                found[-1].append(bits(model))
        return found

    for ddps, ours in run_ranks(2, work):
        assert ours == ddps


def test_ignored_parameters_and_buffers_stay_a_ranks_own() -> None:
    def work() -> Any:
        found = []
        for wrap in (Torchs, DistributedDataParallel):
            net = network(dist.get_rank(), norm=True)
            ignored = ["0.weight", "1.running_mean"]
            Torchs._set_params_and_buffers_to_ignore_for_model(net, ignored)
            model = wrap(net)
            steps(model, sgd(model), range(3))
            found.append(bits(model))
        return found

    ranks = run_ranks(2, work)
    for ddps, ours in ranks:
        assert ours == ddps
    one, two = (rank[1] for rank in ranks)
    assert one[0] != two[0]
    assert one[1] == two[1]


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_gradients_that_are_not_zeroed_outlast_steps_without_them(scheme: str) -> None:
    def work() -> Any:
        def ours(net: nn.Module, **_: Any) -> nn.Module:
            return DistributedDataParallel(net, scheme=scheme)

        found = []
        for wrap in (Torchs, ours):
            net = nn.ModuleList([network(), network()])
            net.forward = lambda x, m=net: (m[0](x), m[1](x))  # type: ignore[assignment]
            model = wrap(net, find_unused_parameters=True)
            grads = []
            for step in range(5):
                one, two = model(batch(step))
                (two.sum() if step > 1 else (one * two).sum()).backward()
                grads.append([p.grad.tolist() for p in net.parameters()])
            found.append(grads)
        return found

    for ddps, own in run_ranks(2, work):
        assert own == ddps


def test_frameworks_recognise_it() -> None:
    def work() -> Any:
        model = DistributedDataParallel(network(), static_graph=True, bucket_cap_mb=1)
        assert isinstance(model, Torchs)
        assert set(model.state_dict()) == {
            f"module.{n}" for n in network().state_dict()
        }
        data = model._get_ddp_logging_data()
        assert data["world_size"] == 1
        assert data["module_name"] == "Sequential"
        assert not data.get("can_set_static_graph")
        model._set_static_graph()
        assert model.static_graph
        assert not model.reducer._rebuild_buckets()
        with model.no_sync():
            output = model(batch(0))
            model.reducer.prepare_for_backward([])  # as Lightning does
            output.sum().backward()
        assert model.replica.num_exchanges == 1
        return True

    assert run_ranks(1, work) == [True]


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_copies_and_pickles_train_on(scheme: str) -> None:
    def work() -> Any:
        model = DistributedDataParallel(network(), scheme=scheme)
        steps(model, sgd(model), range(4))
        holder = types.SimpleNamespace(model=model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        others = [
            copy.deepcopy(model),
            torch.load(file, weights_only=False),
            pickle.loads(pickle.dumps(holder)).model,
        ]
        steps(model, sgd(model), range(4, 8))
        for other in others:
            assert bits(other) != bits(model)
            with torch.no_grad():
                other(batch(0))
            with pytest.raises(RuntimeError, match="has no replica"):
                _ = other.replica
            steps(other, sgd(other), range(4, 8))
        return [bits(other) == bits(model) for other in others]

    assert run_ranks(2, work) == [[True] * 3] * 2


class ByArguments(nn.Sequential):
    """A module that is copied and pickled by arguments which hold its state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_arguments, (vars(self),)


def _by_arguments(state: dict[str, Any]) -> ByArguments:
    made = ByArguments.__new__(ByArguments)
    vars(made).update(state)
    return made


@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_copies_of_a_module_that_says_itself_how_it_is_copied(scheme: str) -> None:
    def work() -> Any:
        net = ByArguments(*network())
        model = DistributedDataParallel(net, scheme=scheme)
        steps(model, sgd(model), range(4))
        average = copy.deepcopy(net)
        others = copy.deepcopy(average), pickle.loads(pickle.dumps(net))
        steps(model, sgd(model), range(4, 8))
        for other in (average, *others):
            other.load_state_dict(net.state_dict())
        return [bits(other) == bits(net) for other in (average, *others)]

    assert run_ranks(2, work) == [[True] * 3] * 2


def test_the_module_is_let_go_with_its_wrapper() -> None:
    def work() -> Any:
        net = network()
        model = DistributedDataParallel(net, scheme="dear")
        optimizer = sgd(model)
        steps(model, optimizer, range(4))
        model(batch(4)).sum().backward()
        hooks = len(net[0].weight._post_accumulate_grad_hooks)
        del model
        gc.collect()
        assert hooks == 1
        assert not net[0].weight._post_accumulate_grad_hooks
        assert not net._forward_pre_hooks
        optimizer.zero_grad()
        net(batch(0)).sum().backward()
        own = net[0].weight.grad.tolist()
        again = DistributedDataParallel(net)
        steps(again, optimizer, range(2))
        anew = DistributedDataParallel(again.module)  # takes it over
        with pytest.raises(RuntimeError, match="wrapped anew"):
            again(batch(0))
        steps(anew, optimizer, range(2))
        return own, bits(net)

    (own, first), (other, second) = run_ranks(2, work)
    assert own != other
    assert first == second


def siblings() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    shared = nn.Linear(6, 8)
    return tuple(nn.Sequential(shared, nn.Linear(8, n)) for n in (3, 4))  # type: ignore[return-value]


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", LOCAL])
def test_a_wrapper_that_loses_a_parameter_says_so(scheme: Any) -> None:
    def work() -> Any:
        a, b = siblings()
        first = DistributedDataParallel(a, scheme=scheme)
        steps(first, sgd(first), range(2))
        second = DistributedDataParallel(b, scheme=scheme)
        wrapped = refusal(RuntimeError, lambda: first(batch(0)))
        itself = refusal(RuntimeError, lambda: a(batch(0)).sum().backward())
        assert "ModuleList" in wrapped
        assert "1.weight" in itself or "1.bias" in itself
        assert "ModuleList" in itself
        a.zero_grad()
        steps(second, sgd(second), range(4))
        again = DistributedDataParallel(a, scheme=scheme)  # averages all of it again
        steps(again, sgd(again), range(4))
        again.replica.flush()
        return bits(a), bits(b[0])

    first, second = run_ranks(2, work)
    assert first == second


def test_a_former_wrapper_that_is_gone_is_no_obstacle() -> None:
    def work() -> Any:
        a, b = siblings()
        first = DistributedDataParallel(a)
        second = DistributedDataParallel(b)
        del first
        a(batch(0)).sum().backward()
        return type(second).__name__

    run_ranks(2, work)


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", LOCAL])
def test_one_wrapper_for_two_models_that_share_a_parameter(scheme: Any) -> None:
    """What the refusals advise."""

    def work() -> Any:
        a, b = siblings()
        both = DistributedDataParallel(nn.ModuleList([a, b]), scheme=scheme)
        optimizer = sgd(both)
        for step in range(3):
            for model in (a, b):
                steps(model, optimizer, range(step, step + 1))
        both.replica.flush()
        return bits(both.module)

    def ddp() -> Any:
        a, b = siblings()
        both = nn.ModuleList([a, b])
        optimizer = sgd(both)
        for step in range(3):
            for model in (a, b):
                model(batch(step)).square().mean().backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
                optimizer.step()
                optimizer.zero_grad()
        return bits(both)

    first, second = run_ranks(2, work)
    assert first == second
    if scheme != LOCAL:
        assert first == run_ranks(2, ddp)[0]


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", LOCAL])
def test_a_module_may_keep_its_own_wrapper(scheme: Any) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    def work(own: bool) -> Any:
        net = Agent()
        model = DistributedDataParallel(net, scheme=scheme)
        optimizer = sgd(net)
        if own:
            net.ddp = model
        steps(model, optimizer, range(5))
        model.replica.flush()
        return [p.tolist() for p in net.parameters()]

    plain, kept = run_ranks(2, work, False), run_ranks(2, work, True)
    assert plain[0] == kept[0] == kept[1]


def test_install_and_undo(tmp_path: Any) -> None:
    (tmp_path / "program.py").write_text(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    )
    sys.path.insert(0, str(tmp_path))
    program = importlib.import_module("program")
    own = Torchs.__init__
    with gradtide.install("dear"):
        assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
        assert program.DDP is DistributedDataParallel
        assert DistributedDataParallel.default_scheme == gradtide.parse("dear")
        assert Torchs.__init__ is not own

        def work() -> Any:
            model = torch.nn.parallel.DistributedDataParallel(network())
            steps(model, sgd(model), range(2))
            assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
            return isinstance(model, Torchs), repr(model.replica.scheme)

        assert run_ranks(1, work) == [(True, repr(gradtide.parse("dear")))]
    assert torch.nn.parallel.DistributedDataParallel is Torchs
    assert torch.nn.parallel.distributed.DistributedDataParallel is Torchs
    assert program.DDP is Torchs
    assert Torchs.__init__ is own
    assert DistributedDataParallel.default_scheme == "wfbp"
    gradtide.install().close()
    with pytest.raises(ValueError, match="is not known"):
        gradtide.install("daer")
    sys.path.remove(str(tmp_path))


class Framework(Torchs):
    """A framework's own class, of before `install`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls = 0

    def train_step(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self(x)  # type: ignore[no-any-return]


def test_install_reaches_what_was_there_before() -> None:
    """Classes that derive from torch's, and references to it that were kept."""

    def work() -> Any:
        with gradtide.install("dear"):
            model = Framework(network())
            kept = Torchs(network())
            steps(kept, sgd(kept), range(2))
        optimizer = sgd(model)
        for step in range(3):
            model.train_step(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for one in (model, kept):
            assert isinstance(one, Torchs)
            assert isinstance(one, DistributedDataParallel)
            assert one.replica.scheme == gradtide.parse("dear")
        assert isinstance(model, Framework)
        assert model.calls == 3
        assert type(model).__name__ == "Framework"
        copied = pickle.loads(pickle.dumps(model))
        assert isinstance(copied, Framework)
        assert bits(copied) == bits(model)
        plain = Framework(network())
        assert not isinstance(plain, DistributedDataParallel)
        with pytest.warns(UserWarning, match=r"1 models \(Framework\) were wrapped"):
            gradtide.install().close()
        return bits(model)

    before = Torchs.__init__
    assert same(run_ranks(2, work))
    assert Torchs.__init__ is before


FRAMEWORK = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Apart(DistributedDataParallel):  # wraps parts, and is none itself
    def __init__(self, part):
        super(DistributedDataParallel, self).__init__()
        self.part = DistributedDataParallel(part)

class Named(DistributedDataParallel):
    def __init__(self, module):
        DistributedDataParallel.__init__(self, module)
"""


def test_install_leaves_calls_of_a_base_class_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`super(DistributedDataParallel, self)`, and the constructor by its name."""
    module = types.ModuleType("framework")
    monkeypatch.setitem(sys.modules, "framework", module)
    exec(FRAMEWORK, vars(module))

    def work() -> Any:
        with gradtide.install("dear"):
            apart = module.Apart(network())
            named = module.Named(network())
        assert not isinstance(apart, DistributedDataParallel)
        for model in (apart.part, named):
            assert isinstance(model, DistributedDataParallel)
            steps(model, sgd(model), range(3))
        return bits(apart.part), bits(named)

    assert same(run_ranks(2, work))


def test_hooks_that_cast_become_the_wire() -> None:
    def work() -> Any:
        model = DistributedDataParallel(network(), scheme="dear(lossless=True)")
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        scheme = model.replica.scheme
        steps(model, sgd(model), range(3))
        other = DistributedDataParallel(network())
        other._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return repr(scheme.collective), repr(other.replica.scheme.collective)

    casts = "Dense(wire='bf16', lossless=True)", "Dense(wire='fp16')"
    assert run_ranks(2, work) == [casts] * 2


def test_torchs_own_methods_name_what_is_trained() -> None:
    def work() -> list[str]:
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        )
        params, _ = model._build_params_for_reducer()
        assert len(model.modules_buffers) == 3
        return list(model._build_debug_param_to_name_mapping(params).values())

    assert run_ranks(2, work) == [["0.weight", "0.bias", "1.weight", "1.bias"]] * 2


def test_a_model_on_the_meta_device_is_refused_without_a_word_of_gpus() -> None:
    def work() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = nn.Linear(4, 4, device="meta")
            return refusal(ValueError, lambda: DistributedDataParallel(model))

    assert all("is on the meta device" in said for said in run_ranks(2, work))


def test_what_ddp_says_and_has_for_its_users() -> None:
    """Errors are logged, a deprecation is told, and functions find DDP's attributes."""

    def work() -> Any:
        model = DistributedDataParallel(network(), bucket_cap_mb_list=[1, 2])
        attributes = model.bucket_bytes_cap_list, model.broadcast_bucket_size
        before = dict(model._get_ddp_logging_data())
        model(batch(0)).sum().backward()
        said = [refusal(RuntimeError, model._set_static_graph)]
        said.append(model._get_ddp_logging_data()["error"])
        with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
            DistributedDataParallel(network(), broadcast_buffers=True)
        return attributes, "error" in before, said

    ((caps, size), errors, said) = run_ranks(1, work)[0]
    assert caps == [2**20, 2**21]
    assert size > 0
    assert not errors
    assert all("before training loop starts" in text for text in said)


@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("scheme", ["wfbp", "dear"])
def test_gradients_that_are_none_and_gradients_that_are_kept(scheme: str) -> None:
    """A function may return no gradient; who keeps one has it while nobody uses it."""

    def work() -> Any:
        net = network()
        model = DistributedDataParallel(net, optimizer=sgd(net), scheme=scheme)
        undefined = torch._C._functions.UndefinedGrad()
        for _ in range(3):
            undefined(model(batch(0)).sum()).backward()
        none = [p.grad is None for p in net.parameters()]
        for step in range(3):
            model(batch(step)).sum().backward()
        kept = net[2].weight.grad
        value = kept.tolist()
        for step in range(3):
            net[0](batch(step)).sum().backward()  # the last layer is used by nobody
        return none, value, kept.tolist(), net[2].weight.grad.tolist()

    for none, value, kept, now in run_ranks(2, work):
        assert scheme == "dear" or all(none)  # not known before they are asked for
        assert value == kept == now


def test_what_cannot_be_had_is_refused_with_the_remedy() -> None:
    def work() -> Any:
        model = DistributedDataParallel(network())
        frozen = network().requires_grad_(False)

        def wrap(**options: Any) -> Any:
            return DistributedDataParallel(network(), **options)

        def replicated() -> Any:
            net = network()
            gradtide.replicate(net, sgd(net))
            DistributedDataParallel(net)

        calls: list[tuple[str, type[Exception], Callable[[], Any]]] = [
            ("ddp.join()", ValueError, model.join_hook),
            ("dear", ValueError, lambda: model._register_fused_optim(torch.optim.SGD)),
            ("wrap the module", ValueError, lambda: model._update_process_group(None)),
            ("autocast", ValueError, lambda: wrap(mixed_precision=object())),
            ("None", ValueError, lambda: wrap(device_ids=[0])),
            ("as it is", RuntimeError, lambda: DistributedDataParallel(frozen)),
            ("plain module", ValueError, lambda: DistributedDataParallel(model)),
            ("call sync.remove()", ValueError, replicated),
            ("is not known", ValueError, lambda: wrap(scheme="daer")),
        ]

        return [remedy in refusal(error, call) for remedy, error, call in calls]

    (found,) = run_ranks(1, work)
    assert all(found), found


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m, o: gradtide.replicate(o, m), "the model is a SGD"),
        (lambda m, o: gradtide.replicate(m.state_dict(), o), "model is a OrderedDict"),
        (lambda m, o: gradtide.replicate(m, "dear"), "the optimizer is a str"),
        (lambda m, o: gradtide.DistributedDataParallel("dear"), "the model is a str"),
        (lambda m, o: gradtide.DistributedDataParallel(m, "dear"), "scheme='dear'"),
        (lambda m, o: gradtide.DistributedDataParallel(m, o), "device_ids is a SGD"),
        (
            lambda m, o: gradtide.DistributedDataParallel(m, process_group="all"),
            "process_group is a str",
        ),
    ],
)
def test_what_stands_in_the_wrong_place_is_named(
    call: Callable[[Any, Any], object], told: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=told):
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_scheme_that_is_no_text_is_named() -> None:
    with pytest.raises(ValueError, match="the scheme is a NoneType"):
        gradtide.scheme.as_scheme(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["dear", "topka2a(0.5, schedule='dear')"])
def test_one_optimizer_steps_two_wrapped_modules(scheme: str) -> None:
    """What one of them does to its part of the state is no edit for the other."""

    def run(scheme: str) -> list[float]:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()
        wrapped = [DistributedDataParallel(m, scheme=scheme) for m in (first, second)]
        params = [p for m in wrapped for p in m.parameters()]
        optimizer = torch.optim.AdamW(params, lr=0.05)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            wrapped[1](wrapped[0](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.sum().item() for p in params]

    found = run_ranks(2, run, scheme)
    assert found[0] == found[1]
    if scheme == "dear":
        assert found[0] == pytest.approx(run_ranks(2, run, "wfbp")[0], rel=1e-12)


@pytest.mark.parametrize("late", ["found", "attached"])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.5, schedule='local')"])
def test_what_is_frozen_when_the_optimizer_is_found_may_thaw(
    scheme: str, late: str
) -> None:
    def run(kind: Any) -> list[float]:
        model = network().double()
        wrapped = kind(model)
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for step in range(6):
            model[0].requires_grad_(step >= 3)
            if late == "attached" and step == 1 and hasattr(wrapped, "attach"):
                wrapped.attach(optimizer)
            wrapped(batch(step).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.sum().item() for p in model.parameters()]

    found = run_ranks(2, run, partial(DistributedDataParallel, scheme=scheme))
    assert found[0] == found[1]
    if "local" not in scheme:
        theirs = run_ranks(2, run, partial(Torchs, find_unused_parameters=True))
        assert found[0] == pytest.approx(theirs[0], rel=1e-12)
