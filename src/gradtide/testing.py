"""P ranks in one process, and the one law that every collective must keep.

`lockstep` drives one flow per rank: exact, fast, and free of hangs, because ranks that
ask for different things are refused at once with both requests named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtide.core import ops
from gradtide.core.ops import Flow, Group, Op
from gradtide.core.payload import Collective, Payload


class DivergedError(RuntimeError):
    """The ranks of a lockstep run asked for different things: training would hang."""


def lockstep(
    flows: Sequence[Flow], traffic: Counter[str] | None = None
) -> list[Tensor]:
    """Run one flow per rank to its end; returns the results in rank order.

    `traffic` counts the payload bytes of all ranks by request name, and "rounds".
    Raises DivergedError when ranks disagree on what comes next.
    """
    answers: list[Any] = [None] * len(flows)
    while True:
        asked, results = resume(flows, answers)
        names = [_name(op) for op in asked]
        for rank, name in enumerate(names):
            if name != names[0]:
                raise DivergedError(
                    f"rank 0 asks for {names[0]}, rank {rank} for {name}"
                )
        if results:
            return results
        if traffic is not None:
            traffic["rounds"] += 1
        if isinstance(asked[0], tuple):
            columns = [answer(row, traffic) for row in zip(*asked, strict=True)]
            answers = list(zip(*columns, strict=True))
        else:
            answers = answer(asked, traffic)


def resume(
    flows: Sequence[Flow], answers: Sequence[Any]
) -> tuple[list[Any], list[Tensor]]:
    """What all flows ask for next (None: nothing more), and the results of the last."""
    asked: list[Any] = []
    results: list[Tensor] = []
    for flow, reply in zip(flows, answers, strict=True):
        try:
            asked.append(flow.send(reply))
        except StopIteration as stop:
            results.append(stop.value)
            asked.append(None)
    return asked, results


def _name(op: Op | tuple[Op, ...] | None) -> str:
    if isinstance(op, tuple):
        return " + ".join(map(_name, op))
    if isinstance(op, ops.Among):
        return f"{_name(op.op)} {'inside' if op.inside else 'across'}"
    return "nothing more" if op is None else type(op).__name__


def answer(row: Sequence[Any], traffic: Counter[str] | None = None) -> list[Any]:
    """Answers to the same request of every rank, in rank order."""
    first, size = row[0], len(row)
    if traffic is not None:
        for rank, op in enumerate(row):
            traffic[_name(op)] += ops.payload_bytes(op, Group(rank, size))
    match first:
        case ops.Among():
            return _among(row)
        case ops.AllReduce():
            total = torch.stack([op.tensor for op in row]).sum(0)
            return [op.tensor.copy_(total) for op in row]
        case ops.Mean():
            mean = torch.stack([op.tensor for op in row]).sum(0).div_(size)
            return [op.tensor.copy_(mean) for op in row]
        case ops.ReduceScatter():
            return _reduce_scatter(row)
        case ops.AllGather(into=None, sizes=sizes):
            merge = torch.stack if sizes is None else torch.cat
            return [merge([op.tensor for op in row]) for _ in row]
        case ops.AllGather():
            whole = torch.cat([op.tensor.flatten() for op in row])
            return [op.into.copy_(whole) for op in row]
        case ops.AllToAll():
            return _all_to_all(row)
        case ops.Swap():
            for rank, op in enumerate(row):
                _same(rank, row[op.peer].peer, f"who swaps with {op.peer}")
            return [row[op.peer].tensor.clone() for op in row]
        case ops.Broadcast(source=source):
            for op in row:
                _same(source, op.source, "the source of a broadcast")
            sent = row[source].tensor.clone()
            return [op.tensor.copy_(sent) for op in row]
        case ops.ToHost():
            return [op.tensor.cpu() for op in row]
        case _:
            assert isinstance(first, ops.Cut | ops.Handover)
            return [None] * size


def _among(row: Sequence[ops.Among]) -> list[Any]:
    """Every subgroup's answers; its ranks must name one another."""
    answers: list[Any] = [None] * len(row)
    for rank, op in enumerate(row):
        for other in op.ranks:
            named = list(row[other].ranks)
            _same(list(op.ranks), named, f"those whom {rank} and {other} ask")
        if rank == op.ranks[0]:
            found = answer([row[other].op for other in op.ranks])
            for other, own in zip(op.ranks, found, strict=True):
                answers[other] = own
    return answers


def _same(expected: object, found: object, what: str) -> None:
    if expected != found:
        raise DivergedError(f"{what}: {expected} on one rank, {found} on another")


def _reduce_scatter(row: Sequence[ops.ReduceScatter]) -> list[Tensor]:
    sizes = ops.part_sizes(row[0], Group(0, len(row)))
    total = torch.stack([op.tensor for op in row]).sum(0)
    if row[0].mean:
        total.div_(len(row))
    for op in row:
        op.tensor.fill_(float("nan"))  # used up: whoever reads it again is found out
    sums = torch.split(total, sizes)
    own = [torch.split(op.tensor, sizes)[rank] for rank, op in enumerate(row)]
    return [part.copy_(whole) for part, whole in zip(own, sums, strict=True)]


def _all_to_all(row: Sequence[ops.AllToAll]) -> list[Tensor]:
    rows = [torch.split(op.tensor, list(op.send)) for op in row]
    answers = []
    for rank, op in enumerate(row):
        got = [rows[source][rank] for source in range(len(row))]
        _same(list(op.recv), list(map(len, got)), f"rows for rank {rank}")
        answers.append(torch.cat(got))
    return answers


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
        flows = [collective.reduce(x, Group(r, size)) for r, x in enumerate(loads)]
        means = lockstep(flows, traffic)
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
