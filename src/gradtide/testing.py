"""P ranks in one process, and the one law that every collective must keep.

`lockstep` drives one flow per rank: exact, fast, and free of hangs, because ranks that
ask for different things are refused at once with both requests named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gradtide.bucket import Collective, Payload
from gradtide.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cut,
    Flow,
    Group,
    Op,
    ReduceScatter,
    Swap,
    ToHost,
    part_sizes,
    payload_bytes,
)


class DivergedError(RuntimeError):
    """The ranks of a lockstep run asked for different things: training would hang."""


def lockstep(
    flows: Sequence[Flow], traffic: Counter[str] | None = None
) -> list[Tensor]:
    """Run one flow per rank to its end; returns the results in rank order.

    `traffic` is given the payload bytes of all ranks by request name, and the number of
    "rounds". Raises DivergedError when ranks disagree on what comes next.
    """
    answers: list[Any] = [None] * len(flows)
    while True:
        asked: dict[int, Any] = {}
        results: dict[int, Tensor] = {}
        for rank, (flow, answer) in enumerate(zip(flows, answers, strict=True)):
            try:
                asked[rank] = flow.send(answer)
            except StopIteration as stop:
                results[rank] = stop.value
        if results and asked:
            rank, op = next(iter(asked.items()))
            raise DivergedError(
                f"rank {next(iter(results))} returned while rank {rank} asks for "
                f"{_name(op)}"
            )
        if results:
            return [results[rank] for rank in range(len(flows))]
        answers = _answer_together([asked[rank] for rank in range(len(flows))], traffic)


def _answer_together(asked: list[Any], traffic: Counter[str] | None) -> list[Any]:
    names = [_name(op) for op in asked]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise DivergedError(f"rank 0 asks for {names[0]}, rank {rank} for {name}")
    if traffic is not None:
        traffic["rounds"] += 1
    if isinstance(asked[0], tuple):
        columns = [answer(ops, traffic) for ops in zip(*asked, strict=True)]
        return list(zip(*columns, strict=True))
    return answer(asked, traffic)


def _name(op: Op | tuple[Op, ...]) -> str:
    if isinstance(op, tuple):
        return " + ".join(map(_name, op))
    return type(op).__name__


def answer(ops: Sequence[Op], traffic: Counter[str] | None = None) -> list[Any]:
    """Answers to the same request of every rank, in rank order."""
    kind, size = type(ops[0]), len(ops)
    if traffic is not None:
        for rank, op in enumerate(ops):
            traffic[kind.__name__] += payload_bytes(op, Group(rank, size))
    return _ANSWERS[kind](ops)


def _all_reduce(ops: Sequence[AllReduce]) -> list[Tensor]:
    total = torch.stack([op.tensor for op in ops]).sum(0)
    return [op.tensor.copy_(total) for op in ops]


def _reduce_scatter(ops: Sequence[ReduceScatter]) -> list[Tensor]:
    sizes = part_sizes(ops[0], Group(0, len(ops)))
    total = torch.stack([op.tensor for op in ops]).sum(0)
    for op in ops:
        op.tensor.fill_(float("nan"))  # used up: whoever reads it again is found out
    parts = []
    for op, end, n in zip(ops, accumulate(sizes), sizes, strict=True):
        part = op.tensor[end - n : end]
        parts.append(part.copy_(total[end - n : end]))
    return parts


def _all_gather(ops: Sequence[AllGather]) -> list[Tensor]:
    if ops[0].into is not None:
        whole = torch.cat([op.tensor.flatten() for op in ops])
        return [op.into.copy_(whole) for op in ops if op.into is not None]
    if ops[0].sizes is not None:
        return [torch.cat([op.tensor for op in ops]) for _ in ops]
    return [torch.stack([op.tensor for op in ops]) for _ in ops]


def _all_to_all(ops: Sequence[AllToAll]) -> list[Tensor]:
    rows = [torch.split(op.tensor, list(op.send)) for op in ops]
    answers = []
    for rank, op in enumerate(ops):
        got = [rows[source][rank] for source in range(len(ops))]
        if [len(r) for r in got] != list(op.recv):
            raise DivergedError(
                f"rank {rank} expects rows {list(op.recv)}, is sent "
                f"{list(map(len, got))}"
            )
        answers.append(torch.cat(got))
    return answers


def _swap(ops: Sequence[Swap]) -> list[Tensor]:
    for rank, op in enumerate(ops):
        if ops[op.peer].peer != rank:
            raise DivergedError(
                f"rank {rank} swaps with {op.peer}, who swaps with {ops[op.peer].peer}"
            )
    return [ops[op.peer].tensor.clone() for op in ops]


def _broadcast(ops: Sequence[Broadcast]) -> list[Tensor]:
    sources = {op.source for op in ops}
    if len(sources) > 1:
        raise DivergedError(f"ranks broadcast from different sources {sorted(sources)}")
    sent = ops[ops[0].source].tensor.clone()
    return [op.tensor.copy_(sent) for op in ops]


_ANSWERS: dict[type[Op], Callable[[Any], list[Any]]] = {
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    Swap: _swap,
    Broadcast: _broadcast,
    ToHost: lambda ops: [op.tensor.cpu() for op in ops],
    Cut: lambda ops: [None] * len(ops),
}


def check_law(
    collective: Collective,
    size: int,
    *,
    numel: int | None = None,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    gradient: Callable[[torch.Generator, int], Tensor] | None = None,
) -> Counter[str]:
    """Assert the conservation law over `steps` steps of `size` ranks in lockstep.

    Also that the means are bit-identical on all ranks. `numel` is a multiple of `size`
    (default 64 * size); `gradient(generator, numel)` makes a rank's gradient (default:
    heavy-tailed). `tolerance` is relative to the largest sum. Returns the traffic in
    bytes. Raises AssertionError with the step and the error.
    """
    numel = numel or 64 * size
    make = gradient or (lambda rng, n: torch.randn(n, generator=rng).pow(3))
    rng = torch.Generator().manual_seed(size)
    flats = [torch.zeros(numel, dtype=dtype) for _ in range(size)]
    loads = [Payload(flat, [flat]) for flat in flats]
    traffic: Counter[str] = Counter()
    for step in range(steps):
        for flat in flats:
            flat += make(rng, numel).to(dtype)
        before = torch.stack(flats).sum(0)
        means = lockstep(
            [collective.reduce(load, Group(r, size)) for r, load in enumerate(loads)],
            traffic,
        )
        for rank, mean in enumerate(means):
            same = torch.equal(mean, means[0])
            assert same, f"step {step}: rank {rank} and rank 0 hold different means"
        mean = means[0].clone()
        for flat, handed_out in zip(flats, means, strict=True):
            if flat.data_ptr() == handed_out.data_ptr():
                flat.zero_()
        after = torch.stack(flats).sum(0)
        error = float((before - size * mean - after).abs().max())
        scale = max(float(before.abs().max()), 1e-30)
        assert error <= tolerance * scale, (
            f"step {step}, P = {size}: {error / scale:.1e} of the largest sum was "
            "neither delivered nor kept"
        )
    return traffic
