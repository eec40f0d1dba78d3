"""Numbers of a training for whichever logger a framework has."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from gradtide.replica import Replica

_PER_STEP = ("exposed_seconds", "exchange_seconds", "sent_bytes")


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
                `density` and `skipped_steps` as `Replica.metrics` tells them.
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
