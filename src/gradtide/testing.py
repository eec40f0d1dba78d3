"""P ranks in one process, and the one law that every collective must keep.

`lockstep` drives one flow per rank: exact, fast, and free of hangs, because ranks that
ask for different things are refused at once with both requests named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

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

    A request is answered when all of whom it is asked have asked for it, whatever the
    others do meanwhile: as on a network, see `ops.Among`. `traffic` counts the payload
    bytes of all ranks by request name, and "rounds". Raises DivergedError when ranks
    disagree on what comes next.
    """
    asked: list[Any] = [None] * len(flows)
    results: list[Any] = [None] * len(flows)
    answers: dict[int, Any] = dict.fromkeys(range(len(flows)))
    while answers:
        for rank, reply in answers.items():
            try:
                asked[rank] = flows[rank].send(reply)
            except StopIteration as stop:
                asked[rank], results[rank] = None, stop.value
        answers = _answered(asked, traffic)
        if answers and traffic is not None:
            traffic["rounds"] += 1
    return results


def _answered(asked: Sequence[Any], traffic: Counter[str] | None) -> dict[int, Any]:
    """Answers for the ranks, by number, that all ask their circle for the same.

    None, if all flows have ended.
    """
    size = len(asked)
    circles = [_circle(op, rank, size) for rank, op in enumerate(asked)]
    found: dict[int, Any] = {}
    for rank, circle in enumerate(circles):
        together = all(circles[other] == circle for other in circle)
        if not together or rank != circle[0] or asked[rank] is None:
            continue
        for other in circle:
            _agree(asked, rank, other)
        columns = zip(*(_several(asked[other]) for other in circle), strict=True)
        answers = []
        for column in columns:
            _count(column, circle, size, traffic)
            answers.append(answer(list(map(ops.message_of, column))))
        together = isinstance(asked[rank], tuple)
        replies = zip(*answers, strict=True) if together else answers[0]
        found.update(zip(circle, replies, strict=True))
    if not found and any(op is not None for op in asked):
        for rank in range(size):
            _agree(asked, 0, rank)
        raise DivergedError(f"nobody can be answered: {list(map(_name, asked))}")
    return found


def _circle(asked: Any, rank: int, size: int) -> tuple[int, ...]:
    """The ranks that must all ask for it before it is answered; for some, itself."""
    match _several(asked)[0]:
        case ops.ToHost():
            return (rank,)
        case ops.Among(ranks=ranks):
            return tuple(ranks)
        case _:
            return tuple(range(size))


def _count(
    row: Sequence[Op], ranks: Sequence[int], size: int, traffic: Counter[str] | None
) -> None:
    """Count the bytes of a request of some ranks."""
    if traffic is not None:
        for rank, op in zip(ranks, row, strict=True):
            traffic[_name(op)] += ops.payload_bytes(op, Group(rank, size))


def _several(asked: Any) -> tuple[Any, ...]:
    return asked if isinstance(asked, tuple) else (asked,)


def _agree(asked: Sequence[Any], one: int, other: int) -> None:
    names = _name(asked[one]), _name(asked[other])
    if names[0] != names[1]:
        raise DivergedError(
            f"rank {one} asks for {names[0]}, rank {other} for {names[1]}"
        )


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
    _count(row, range(size), size, traffic)
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
    rows = [torch.split(_shown(op), list(op.send)) for op in row]
    answers = []
    for rank, op in enumerate(row):
        got = [rows[source][rank] for source in range(len(row))]
        _same(list(op.recv), list(map(len, got)), f"rows for rank {rank}")
        answers.append(torch.cat(got))
    return answers


def _shown(op: ops.AllToAll) -> Tensor:
    """What arrives: all ones in bits where a sender said that it does not matter."""
    if op.used is None:
        return op.tensor
    shown = op.tensor.clone()
    for each, used in zip(shown, op.used, strict=True):
        each[used:].view(torch.uint8).fill_(255)
    return shown


# - The law ----------------------------------------------------------------------------

Scale: TypeAlias = Callable[[int, Group, int], Tensor | float]


def _zero_half(step: int, group: Group, numel: int) -> Tensor:
    """One half of a bucket has no gradient; now and then it is the other one."""
    return _window(numel, step // 5 % 2, 1, 2, inside=0.0, outside=1.0)


def _shifting(step: int, group: Group, numel: int) -> Tensor:
    """Where gradients are large moves through the bucket."""
    return _window(numel, step // 2 % 6, 1, 6, inside=1.0, outside=0.01)


def _experts(step: int, group: Group, numel: int) -> Tensor:
    """In one half of a bucket one of three experts is active, for some steps."""
    active = _window(numel, step // 7 % 3, 1, 6, inside=1.0, outside=0.01)
    active[numel // 2 :] = 1.0
    return active


def _own_expert(step: int, group: Group, numel: int) -> Tensor:
    """Each rank trains an expert of its own, and another one in the next step."""
    at = (group.rank + step) % group.size
    return _window(numel, at, 1, group.size, inside=1.0, outside=0.0)


def _small_layer(step: int, group: Group, numel: int) -> Tensor:
    """A small layer has far larger gradients than all others."""
    return _window(numel, 0, 1, 12, inside=30.0, outside=1.0)


def _idle_rank(step: int, group: Group, numel: int) -> float:
    """One rank has no gradient: another one in each step."""
    return float(group.rank != step % group.size)


def _lone_rank(step: int, group: Group, numel: int) -> float:
    """One rank alone has a gradient."""
    return float(group.rank == step % group.size)


def _nothing(step: int, group: Group, numel: int) -> float:
    """In two of three steps nobody has a gradient."""
    return float(step % 3 == 2)


def _few(step: int, group: Group, numel: int) -> Tensor:
    """Fewer entries than are sent are not zero, and each rank has others."""
    scale = torch.zeros(numel, dtype=torch.float32, device="cpu")
    scale[(7 * step + group.rank) % numel] = 1.0
    return scale


def _fading(step: int, group: Group, numel: int) -> float:
    """Gradients shrink quickly, and are large again at once."""
    return 8.0 ** -(step % 6)


def _window(
    numel: int, first: int, count: int, of: int, *, inside: float, outside: float
) -> Tensor:
    """Factors for a bucket that is cut into `of` parts, of which some are `inside`."""
    scale = torch.full((numel,), outside, dtype=torch.float32, device="cpu")
    scale[numel * first // of : numel * (first + count) // of] = inside
    return scale


SCALES: dict[str, Scale] = {
    "a half without gradient": _zero_half,
    "shifting regions": _shifting,
    "experts": _experts,
    "experts of a rank's own": _own_expert,
    "a small layer with large gradients": _small_layer,
    "an idle rank": _idle_rank,
    "a lone rank": _lone_rank,
    "steps without gradient": _nothing,
    "few entries": _few,
    "fading": _fading,
}
"""By what gradients are multiplied, so that ranks, and the places of a host, differ.

A function of the step, the rank's place among all, and the length of the bucket.
"""


def check_law(
    collective: Collective,
    size: int,
    *,
    numel: int | None = None,
    steps: int = 20,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    gradient: Callable[[torch.Generator, int], Tensor] | None = None,
    scales: Sequence[Scale] | None = None,
    parts: Callable[[Tensor], Sequence[Tensor]] = lambda flat: [flat],
) -> Counter[str]:
    """Assert the conservation law over `steps` steps of `size` ranks in lockstep.

    Also that the means are bit-identical on all ranks, and that a request is what all
    ask for of whom it is asked. `numel` is a multiple of `size` (default 64 *
    size); `gradient(generator, numel)` makes a rank's gradient (default: heavy-tailed).
    After these steps come others with data that make ranks, and the places of a host,
    differ: one with each of `scales` (default: `SCALES`, or none with a `gradient`).
    `parts` are the tensors that a bucket is made of, for collectives that look at them.
    `tolerance` is relative to the largest sum. Returns the traffic of the first `steps`
    in bytes. Raises AssertionError with the step and the error.
    """
    numel = numel or 64 * size
    if scales is None:
        scales = [] if gradient else list(SCALES.values())
    make = gradient or (
        lambda rng, n: torch.randn(
            n, generator=rng, dtype=torch.float32, device="cpu"
        ).pow(3)
    )
    rng = torch.Generator().manual_seed(size)
    groups = [Group(rank, size) for rank in range(size)]
    flats = [torch.zeros(numel, dtype=dtype, device="cpu") for _ in groups]
    loads = [Payload(flat, parts(flat)) for flat in flats]
    traffic: Counter[str] = Counter()
    for step, scale in enumerate([*[None] * steps, *scales]):
        for flat, group in zip(flats, groups, strict=True):
            fresh = make(rng, numel)
            if scale is not None:
                fresh = fresh * scale(step, group, numel)
            flat += fresh.to(dtype)
        before = torch.stack(flats).double().sum(0)
        flows = list(map(collective.reduce, loads, groups))
        means = lockstep(flows, traffic if step < steps else None)
        for rank, mean in enumerate(means):
            same = torch.equal(mean, means[0])
            assert same, f"step {step}: rank {rank} and rank 0 hold different means"
        mean = means[0].to(torch.float64, copy=True)
        for flat, handed_out in zip(flats, means, strict=True):
            if flat.data_ptr() == handed_out.data_ptr():
                flat.zero_()
        after = torch.stack(flats).double().sum(0)
        error = float((before - size * mean - after).abs().max())
        largest = max(float(before.abs().max()), 1e-30)
        assert error <= tolerance * largest, (
            f"step {step}, P = {size}: {error / largest:.1e} of the largest sum was "
            "neither delivered nor kept"
        )
    return traffic
