"""Buffers follow rank 0's as in DDP, of any dtype and shape that ranks agree on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradtide
from gradtide.core.engine import Engine
from gradtide.runtime.layout.broadcast import digest


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 10, generator=draw), torch.randint(4, (8,), generator=draw)


class Net(nn.Module):
    """Has a buffer that is multiplied, and one that statistics are in."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bn = nn.Linear(10, 32), nn.Linear(32, 4), None
        if norm != "none":
            self.bn = nn.BatchNorm1d(32).train(norm == "train")
        self.register_buffer("scale", torch.full((32,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu() * self.scale
        logits: Tensor = self.b(h if self.bn is None else self.bn(h))
        return logits


@pytest.mark.parametrize("norm", ["none", "train", "eval"])
def test_two_forwards_before_one_backward(norm: str) -> None:
    assert all(run_ranks(2, _twice, norm))


def _twice(norm: str) -> bool:
    reference = DistributedDataParallel(Net(norm))
    found = [_train_twice(reference, sgd(reference))]
    for scheme in ("wfbp", "dear"):
        model = Net(norm)
        optimizer = sgd(model)
        sync = gradtide.replicate(model, optimizer, scheme)
        found.append(_train_twice(model, optimizer))
        sync.remove()
    return torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _train_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    for step in range(3):
        (x, y), (u, v) = batch(step), batch(50 + step)
        (cross_entropy(model(x), y) + cross_entropy(model(u), v)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "int16": lambda x: x.to(torch.int16),
    "uint16": lambda x: x.to(torch.uint16),
    "uint32": lambda x: x.to(torch.uint32),
    "uint64": lambda x: x.to(torch.uint64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "16 bits": lambda x: x.bfloat16(),
    "yes or no": lambda x: x > 4,
    "complex": lambda x: torch.complex(x, -x),
    "conjugated": lambda x: torch.complex(x, -x).conj(),
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:, :1].expand(2, 3),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.qint8),
    "by channel": lambda x: torch.quantize_per_channel(
        x, torch.tensor([0.5, 0.25]), torch.tensor([0, 3]), 0, torch.quint8
    ),
    "empty": lambda x: x[:0],
    "no dimension": lambda x: x[0, 0],
}


def odd_buffers(rank: int) -> dict[str, Tensor]:
    values = torch.arange(6.0).view(2, 3) + rank
    with warnings.catch_warnings(action="ignore"):  # torch is to drop what is quantised
        return {name: make(values.clone()) for name, make in ODD.items()}


def test_buffers_of_all_dtypes_follow_rank_0s() -> None:
    told = run_ranks(2, _odd)
    assert told[0] == told[1]


def _odd() -> list[bytes]:
    model = nn.Linear(10, 4)
    for name, buffer in odd_buffers(dist.get_rank()).items():
        model.register_buffer(name, buffer)
    sync = gradtide.replicate(model, sgd(model), "wfbp")
    at_first = _told(model)
    for name, buffer in odd_buffers(3 + dist.get_rank()).items():
        setattr(model, name, buffer)
    model(batch(0)[0]).sum().backward()
    after = _told(model)
    assert at_first != after
    sync.remove()
    return [*at_first, *after]


def _told(model: nn.Module) -> list[bytes]:
    return [digest(buffer) for buffer in model.buffers()]


class Observed(nn.Module):
    """Its observer grows in the first forward, as a quantiser's for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 4)
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.seen.numel() == 0:
            self.seen.resize_(4)
            self.seen.zero_()
        self.seen.copy_(torch.maximum(self.seen, y.detach().abs().amax(0)))
        return y


def test_buffers_may_grow_on_all_ranks_alike() -> None:
    told = run_ranks(2, _grow)
    assert told[0] == told[1]


def _grow() -> list[float]:
    model = Observed()
    optimizer = sgd(model)
    sync = gradtide.replicate(model, optimizer, "wfbp")
    for step in range(3):
        model(batch(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.linear.weight.zero_()  # from now on nothing is larger than what was seen
        model.linear.bias.zero_()
    model(batch(3)[0])
    sync.remove()
    return model.seen.tolist()


def reshape(model: Net) -> None:
    model.scale = torch.ones(1)


def turn(model: Net) -> None:
    model.scale = torch.ones(32, 1)[:, 0].reshape(1, 32)


def cast(model: Net) -> None:
    model.scale = model.scale.half()


def delete(model: Net) -> None:
    del model.scale
    model.__dict__["scale"] = 1.0


def nothing(model: Net) -> None:
    model.scale = None  # type: ignore[assignment]
    model.a.register_forward_pre_hook(lambda *_: None)
    model.forward = lambda x: model.b(model.a(x))  # type: ignore[method-assign]


def register(model: Net) -> None:
    model.a.register_buffer("scale", torch.ones(3))


CHANGES = {
    reshape: "buffer scale differs between ranks: rank 0 has (32,)",
    turn: "buffer scale differs .* rank 1 has (1, 32)",
    cast: "buffer scale differs .* rank 1 has (32,) torch.float16",
    delete: "buffer scale differs .* rank 1 has not there",
    nothing: "buffer scale differs .* rank 1 has not there",
    register: "buffer a.scale differs .* rank 0 has not there",
}


@pytest.mark.product
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_another_buffer_on_one_rank_is_named_on_all(change: Any) -> None:
    first, second = run_ranks(2, _change, change)
    assert first == second
    for part in CHANGES[change].split(" .* "):
        assert part in first
    assert "_ddp_params_and_buffers_to_ignore" in first


def _change(change: Callable[[Net], None]) -> str:
    told = []
    for scheme in ("wfbp", "dear", "Scheme(TopK(0.1), schedule=LOCAL)"):
        model = Net("train")
        optimizer = sgd(model)
        sync = gradtide.replicate(model, optimizer, scheme)
        with pytest.raises(ValueError) as caught:  # noqa: PT011, PT012  # told beside
            for step in range(5):
                if step == 2 and dist.get_rank() == 1:
                    change(model)
                x, y = batch(step)
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert step == 3, step  # the next forward
        told.append(str(caught.value))
        sync.remove()
    assert len(set(told)) == 1
    return told[0]


def test_a_buffer_that_all_ranks_add_follows_rank_0s() -> None:
    told = run_ranks(2, _add)
    assert told[0] == told[1] == [0.0, 1.0]


def _add() -> list[float]:
    model = nn.Linear(10, 4)  # without any at first
    optimizer = sgd(model)
    sync = gradtide.replicate(model, optimizer, "dear")
    for step in range(4):
        if step == 1:
            model.register_buffer("own", torch.tensor([0.0, 1.0]) + dist.get_rank())
        model(batch(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.remove()
    own: list[float] = model.own.tolist()  # type: ignore[operator, union-attr]
    return own


def test_a_sparse_buffer_is_refused() -> None:
    for told in run_ranks(2, _sparse):
        assert "the buffer where is sparse" in told


def _sparse() -> str:
    model = nn.Linear(10, 4)
    model.register_buffer("where", torch.eye(3).to_sparse())
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # told beside
        gradtide.replicate(model, None)
    return str(caught.value)


def test_a_users_memory_can_still_be_resized() -> None:
    run_ranks(2, _resize)


def _resize() -> None:
    model = nn.Linear(10, 4)
    model.register_buffer("own", torch.tensor([1.0 + dist.get_rank()]))
    sync = gradtide.replicate(copy.deepcopy(model), None)
    sync.remove()
    sync = gradtide.replicate(model, None)
    model(batch(0)[0])
    model.own.resize_(100)  # type: ignore[operator, union-attr]
    model.weight.untyped_storage().resize_(1000)
    sync.remove()


def test_buffers_of_all_dtypes_are_one_message() -> None:
    for sent, found in run_ranks(2, _mixed):
        assert sent == 1
        assert found == [[1, 0, 1], [0.5] * 4, [2 - 1j] * 3, [0.25], [3] * 5, [True]]


def _mixed() -> tuple[int, list[Any]]:
    model, away = nn.Linear(10, 4), float(dist.get_rank())
    given = {
        "bytes": torch.tensor([1, 0, 1], dtype=torch.int8),
        "strided": torch.full((4, 2), 0.5)[:, 1],
        "conjugate": torch.full((3,), 2 + 1j).conj(),
        "narrow": torch.tensor([0.25], dtype=torch.bfloat16),
        "wide": torch.full((5,), 3, dtype=torch.int64),
        "flag": torch.tensor([True]),
        "empty": torch.empty(0, 3),
    }
    for name, buffer in given.items():
        model.register_buffer(name, buffer)
    sync = gradtide.replicate(model, None)
    with torch.no_grad():
        for name in given:
            buffer = getattr(model, name)
            setattr(model, name, torch.zeros_like(buffer) if away else buffer)
    ask, seen = Engine.ask, []

    def counting(engine: Engine, name: str, *args: Any) -> Any:
        seen.append(name)
        return ask(engine, name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "ask", counting)
        model(batch(0)[0])
    found = [getattr(model, name).tolist() for name in given if name != "empty"]
    sync.remove()
    return seen.count("broadcast"), found
