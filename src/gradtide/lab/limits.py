"""How fast a step could be: arithmetic on compute and wire, nothing measured here.

[Note: Limits] With f and b the seconds of forward and backward alone, and c the seconds
that a link of the given rate needs for the payload that one rank sends, split into c1
(before the turn of the exchange: reduce-scatter and whatever else precedes the
all-gather) and c2 (the all-gather), no step can be shorter than

    backward part:  max(b, c')  buckets leave when full    b + c'  when backward ended
    forward part:   f           updates at step()          max(f, c2)  in the forward

(after the step counts as when backward ended),
with c' = c1 where the second half travels in the forward, else c1 + c2. So DDP and WFBP
have f + max(b, c), sequential f + b + c, DeAR max(f, c2) + max(b, c1). Rounds whose
exchange is applied later have max(f + b, c). Optimistic on
purpose: no latency, no packet headers, no optimizer step, and the first gradient ready
when backward begins.

One edge of a ring leaves each host, however many ranks it holds: a host's link carries
what one rank sends. The limit takes that for granted.
"""

from __future__ import annotations

from gradtide.core.schedule import Schedule
from gradtide.lab.workloads.workload import Timing


def limit_seconds(
    compute: Timing,
    wire: tuple[float, float],
    rate: float | None,
    schedule: Schedule,
) -> float | None:
    """The shortest step, see [Note: Limits]; None where `rate` (bits/s) is None.

    `wire` is payload bytes per rank and step, before and after the turn of an exchange.
    """
    if rate is None:
        return None
    first, second = (8 * part / rate for part in wire)
    forward, during = compute.forward, first + second
    if schedule.update == "forward":
        forward, during = max(forward, second), first
    if schedule.delay:
        return max(forward + compute.backward, during)
    if schedule.launch != "ready":
        return forward + compute.backward + during
    return forward + max(compute.backward, during)
