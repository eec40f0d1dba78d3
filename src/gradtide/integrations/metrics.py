"""Numbers of a training for whichever logger a framework has."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TextIO, TypeVar
from weakref import WeakKeyDictionary

from gradtide.replica import Replica

_PER_STEP = ("exposed_seconds", "exchange_seconds", "sent_bytes")

Batch = TypeVar("Batch")


class Meter:
    """Tells the numbers of `Replica.metrics` per step, whenever a logger wants them.

    `Replica.metrics` counts since the call before. A logger asks every so many steps,
    so times and bytes are divided by the steps since then.
    """

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()

    def read(self, replica: Replica) -> dict[str, float]:
        """Return the numbers since the last call, under names with "gradtide/". Local.

        Args:
            replica: The replica, as `replicate` returned it.

        Returns:
            `exposed_seconds`, `exchange_seconds` and `sent_bytes`, each per step;
                `density`, `compressed_share` and `skipped_steps` as `Replica.metrics`
                tells them.
        """
        found = replica.metrics()
        step = found.pop("step")
        steps = max(step - self._steps.get(replica, 0.0), 1)
        self._steps[replica] = step
        for name in _PER_STEP:
            found[name] /= steps
        return {f"gradtide/{name}": value for name, value in found.items()}


def line(numbers: Mapping[str, float]) -> str:
    """Return a short text of what `Meter.read` returned, for runs without a logger.

    Args:
        numbers: The numbers, which may have others among them.

    Returns:
        As "12.3 ms exposed, 1.24 MB sent, density 0.01" a step.
    """
    exposed = 1e3 * numbers["gradtide/exposed_seconds"]
    sent = numbers["gradtide/sent_bytes"] / 1e6
    density = numbers["gradtide/density"]
    return f"{exposed:.1f} ms exposed, {sent:.3g} MB sent, density {density:.3g}"


def progress(
    batches: Iterable[Batch],
    replica: Replica,
    every: float = 5.0,
    stream: TextIO | None = None,
) -> Iterator[Batch]:
    """Go through batches, and write now and then how training gets on.

    It is for runs without a logger: `for x, y in progress(loader, sync):`. Rank 0 alone
    writes. On a terminal its line is written over, elsewhere (a log file) a line
    follows the other. Nothing is exchanged; between two lines it costs a look at the
    clock. What it tells, `Replica.metrics` does not tell any more: use one of the two.

    Args:
        batches: What the loop is over, a DataLoader for example.
        replica: The replica that is trained, as `replicate` returned it; `ddp.replica`
            of a DistributedDataParallel.
        every: The seconds between two lines. One more is written at the end.
        stream: Where to write to; None stands for the standard error.

    Yields:
        The batches, as they are.
    """
    if replica.engine.group.rank != 0:
        yield from batches
        return
    out = sys.stderr if stream is None else stream
    over, end = ("\r", "\x1b[K") if out.isatty() else ("", "\n")
    of = f"/{len(batches)}" if isinstance(batches, Sized) else ""
    meter, count, told, last = Meter(), 0, 0, time.monotonic()
    meter.read(replica)

    def tell() -> None:
        nonlocal told, last
        now = time.monotonic()
        rate = (count - told) / max(now - last, 1e-9)
        numbers = line(meter.read(replica))
        out.write(f"{over}batch {count}{of}, {rate:.3g} a second, {numbers}{end}")
        out.flush()
        told, last = count, now

    try:
        for batch in batches:
            yield batch
            count += 1
            if time.monotonic() - last >= every:
                tell()
    finally:
        if count > told:
            tell()
        if over:
            out.write("\n")
