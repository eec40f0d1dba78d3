"""Which bucket travels how, told as a table: also what does not travel compressed.

What is told of a bucket is what was counted in its last exchange. Before the first one,
or since buckets were cut anew, it is what its collective is about to do.

[Note: foreseen] A collective alone knows whether a bucket is worth what it does, and
says so by what it asks for first. So its flow is begun on tensors without memory. If it
asks for what `Dense` asks for, everything will travel, and how many bytes that takes is
known. Otherwise it looks at numbers, which are not there, and nothing is foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtide.collectives import Dense
from gradtide.collectives.levels import TwoLevel
from gradtide.core.engine import Engine
from gradtide.core.ops import (
    AllGather,
    Among,
    Cut,
    Flow,
    Group,
    Handover,
    Op,
    ReduceScatter,
    ToHost,
    is_inside,
    message_of,
    part_sizes,
    payload_bytes,
    subgroup,
)
from gradtide.core.payload import (
    Payload,
    count_on,
    counts,
    dense_last,
    dense_next,
    density_of,
    settled,
    traits,
    wire_of,
)
from gradtide.runtime.layout.buckets import GradientBucket
from gradtide.runtime.training import Training
from gradtide.wire import Wire, codec_of

STAYS = Cut, Handover, ToHost  # nothing of it travels
NAMED = 2  # parameters of a bucket that are named: its first, and its last
HEAD = ("bucket", "parameters", "elements", "dense", "sent", "", "how")


class Told(NamedTuple):
    """What is known of a bucket's exchange; of one that is to come, bytes perhaps."""

    whole: bool  # every entry travels
    sent: int | None
    counted: bool


def table(training: Training, instead: str | None) -> str:
    """A table of what travels, of this rank; local, and reads counters only.

    `instead` says what else than the scheme has all buckets travel at the moment.
    """
    rows = [HEAD, *_rows(training, instead)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([_title(training), *lines, *_notes(training)])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, range(len(row)), strict=True)
    numbers = range(2, 5)
    placed = (c.rjust(w) if i in numbers else c.ljust(w) for c, w, i in cells)
    return "  ".join(placed).rstrip()


def _title(training: Training) -> str:
    engine, schedule = training.engine, training.step.schedule
    ranks = f"{engine.group.size} ranks"
    if engine.levels is not None:
        hosts = engine.levels.outer.size
        ranks += f" on {hosts} hosts of {engine.levels.local}"
    what = "means of gradients, in every step"
    if not training.actions.eager:
        what = "what each step did"
        if schedule.rounds:
            what = f"what {schedule.every} steps did, after these"
    elif schedule.launch == "step":
        what += ", until the warm-up is over; then what steps did"
    return f"{ranks}; {what}; bytes that this rank sends for one step:"


def _rows(training: Training, instead: str | None) -> Iterator[tuple[str, ...]]:
    engine, steps = training.engine, _steps(training)
    for bucket in training.placement.buckets:
        told = _told(bucket, engine)
        sent = None if instead is not None and not told.counted else told.sent
        dense = engine.dense_bytes(bucket.payload.flat.nbytes)
        yield (
            bucket.name,
            _names([slot.name for slot in bucket.slots]),
            f"{sum(slot.local.numel() for slot in bucket.slots):,}",
            f"{dense / steps:,.0f}",
            "?" if sent is None else f"{sent / steps:,.0f}",
            "counted" if told.counted else "not yet" if sent is None else "foreseen",
            instead or _how(bucket, told, engine.group.size) + _waiting(bucket),
        )
    stage = training.preconditioning
    for factors in () if stage is None else stage.kfac.factors:
        flow, seen = factors.flow, factors.exchanged
        wire = "fp32" if flow.wire is None else "bf16"
        yield (
            factors.name,
            _names([layer.name for layer in factors.views]),
            f"{flow.flat.numel():,}",
            f"{engine.dense_bytes(flow.flat.nbytes):,}",
            "?" if seen is None else f"{seen:,}",
            "not yet" if seen is None else "counted",
            f"K-FAC's {factors.kind}, in {wire}, when it is due: no collective's",
        )


def _steps(training: Training) -> int:
    """Steps from one exchange of a bucket to the next."""
    return 1 if training.actions.eager else training.step.schedule.every


def _names(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _told(bucket: GradientBucket, engine: Engine) -> Told:
    seen = bucket.exchanged
    if seen is not None:
        return Told(seen[1], seen[0], counted=True)
    sent = foreseen(bucket, engine)
    return Told(sent is not None, sent, counted=False)


def _how(bucket: GradientBucket, told: Told, size: int) -> str:
    """By what a bucket travels, and why that is not what the scheme says."""
    own = settled(bucket.collective)
    if size == 1:
        return "there is one rank"
    wire, dtype = wire_of(own), bucket.payload.flat.dtype
    cast = not codec_of(wire, dtype).exact
    words = f" in {wire}" if wire is not None and cast else ""
    if wire is not None and not cast:
        words = f" ({dtype} is not cast to {wire})".replace("torch.", "")
    if traits(own).dense:
        owners = "; means to owners, and updates to all" if bucket.owned else ""
        return f"densely{words}{owners}"
    if not told.whole:
        return _named(own) + words
    state = bucket.payload.state
    warm = (dense_last if told.counted else dense_next)(bucket.collective, state)
    if warm:
        return f"densely{words}: the warm-up before {_named(own)}"
    if traits(own).depends_on == "shapes":
        reason = "no matrix in it is shorter as factors"
    else:
        reason = f"too short for fewer bytes among {size} ranks"
    return f"densely{words}, not by {_named(own)}: {reason}"


def _named(collective: object) -> str:
    """A collective with what says how much it sends."""
    much = density_of(collective)
    rank = getattr(collective, "rank", None) if much is None else much
    return type(collective).__name__ + ("" if rank is None else f"({rank:g})")


def _waiting(bucket: GradientBucket) -> str:
    """What of a bucket is left out at the moment."""
    unused = [slot for slot in bucket.slots if not slot.used]
    if not unused or bucket.exchanged is None:
        return ""
    count = f"{len(unused)} of {len(bucket.slots)} parameters"
    return f"; no rank trained {count} in the last step"


def _notes(training: Training) -> list[str]:
    placement, engine = training.placement, training.engine
    others = [p for p in training.model.parameters() if p not in placement.places]
    frozen = sum(not p.requires_grad for p in others)
    told = {
        f"{frozen} parameters require no gradient: nothing of them travels": frozen,
        f"{len(others) - frozen} parameters are each rank's own": (
            len(others) > frozen
        ),
        "buckets are cut anew when the first step has shown the order of gradients": (
            placement.recorded is not None
        ),
        "inside each host everything travels densely, which is not counted": (
            engine.levels is not None
        ),
        "K-FAC's inverses come on top": training.preconditioning is not None,
    }
    return [f"- {note}" for note, true in told.items() if true]


# - What is foreseen -------------------------------------------------------------------


@torch.no_grad()
def foreseen(bucket: GradientBucket, engine: Engine) -> int | None:
    """Bytes of the next exchange, if all of the bucket travels; see [Note: foreseen].

    None if less travels, or if its collective's first request does not tell.
    """
    group, own = engine.group, settled(bucket.collective)
    for wire in dict.fromkeys((wire_of(own), None)):  # a warm-up's last casts nothing
        asked = [*_asked(_densely(wire, bucket, engine), group)]
        try:
            flow = bucket.collective.reduce(_stand_in(bucket), group)
            first = next(_asked(flow, group), None)
        except Exception:  # of many kinds: it has looked for a number
            return None
        if asked and first is not None and _shape(first) == _shape(asked[0]):
            return sum(payload_bytes(op, group) for op in asked)
    return None


def _densely(wire: Wire, bucket: GradientBucket, engine: Engine) -> Flow:
    """An exchange of all of a bucket, as its collective would go over to it."""
    group, levels = engine.group, engine.levels
    dense, payload = Dense(wire), _stand_in(bucket)
    if levels is None:
        return dense.reduce(payload, group)
    if not traits(settled(bucket.collective)).divisible:
        return levels.carried(dense.reduce(payload, group))
    return TwoLevel(dense, levels.table).reduce(payload, group)


def _stand_in(bucket: GradientBucket) -> Payload:
    """As long as a bucket's, as many steps on, and without memory."""
    flat = torch.empty_like(bucket.payload.flat, device="meta")
    payload = Payload(flat, [slot.of(flat) for slot in bucket.slots])
    count_on(payload.state, counts(bucket.payload.state))
    return payload


def _asked(flow: Flow, group: Group) -> Iterator[Op]:
    """What a flow asks of other hosts, answered by what it sends."""
    answer: Any = None
    try:
        while True:
            asked = flow.send(answer)
            several = asked if isinstance(asked, tuple) else (asked,)
            if not is_inside(asked):
                yield from (op for op in several if not isinstance(op, STAYS))
            answer = _echo(several[0], group)
    except StopIteration:
        return
    finally:
        flow.close()


def _echo(op: Op, group: Group) -> Tensor | None:
    """An answer as long as the real one, as far as a dense exchange looks at it."""
    match message_of(op):
        case Cut() | Handover():
            return None
        case AllGather(into=into) if into is not None:
            return into
        case ReduceScatter(tensor=x) as message:
            own = subgroup(op, group) if isinstance(op, Among) else group
            return x[: part_sizes(message, own)[own.rank]]
        case message:
            return message.tensor


def _shape(asked: Any) -> tuple[Any, ...]:
    message = message_of(asked)
    sent: Tensor = message.tensor  # type: ignore[union-attr]
    return type(message), sent.shape, sent.dtype
