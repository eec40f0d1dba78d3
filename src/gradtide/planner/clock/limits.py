"""How fast a step could be: arithmetic on compute and wire, nothing measured here.

[Note: Limits] With f and b the seconds of forward and backward alone, and c the seconds
that a link of the given rate needs for the payload that one rank sends, split into c1
(before the turn of the exchange: reduce-scatter and whatever else precedes the
all-gather) and c2 (the all-gather), no step can be shorter than

    backward part:  max(b, c')  buckets leave when full    b + c'  when backward ended
    forward part:   f           updates at step()          max(f, c2)  in the forward

(after the step counts as when backward ended), with c' = c1 where the second half
travels in the forward, else c1 + c2. So DDP and WFBP have f + max(b, c), sequential
f + b + c, DeAR max(f, c2) + max(b, c1). Rounds whose exchange is applied later have
max(f + b, c). Optimistic on purpose: no latency, no packet headers, no optimizer step,
and the first gradient ready when backward begins.

One edge of a ring leaves each host, however many ranks it holds: a host's link carries
what one rank sends. The limit takes that for granted.
"""

from __future__ import annotations

from gradtide.core.schedule import Schedule


def limit_seconds(
    forward: float, backward: float, wire: tuple[float, float], schedule: Schedule
) -> float:
    """The shortest step, see [Note: Limits].

    `wire` is seconds of a link, before and after the turn of an exchange.
    """
    first, second = wire
    if schedule.update == "forward":
        forward, second = max(forward, second), 0.0
    if schedule.delay:
        return max(forward + backward, first + second)
    if schedule.launch != "ready":
        return forward + backward + first + second
    return forward + max(backward, first + second)
