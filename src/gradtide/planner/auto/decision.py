"""What all ranks are to train with, decided by rank 0 and followed by everybody.

[Note: Together] Between two exchanges of this module stands nothing that a rank might
raise unnoticed: what can fail is tried, and whether it did is exchanged next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from gradtide.core.payload import settled
from gradtide.planner.advice import Advice, advise, more, ms
from gradtide.planner.measure import measure
from gradtide.planner.measuring.bench import Bench, RankError
from gradtide.planner.network import Network
from gradtide.planner.search import Choice, rank
from gradtide.planner.trace import StepTrace
from gradtide.scheme import RECIPES, Auto, Scheme, parse, prepared
from gradtide.scheme.recommended import candidates
from gradtide.transport import Transport

LOG = logging.getLogger("gradtide")
BUDGET = 3.0  # seconds of measuring the network


@dataclass(frozen=True)
class Seen:
    """What one rank has found out by itself."""

    trace: StepTrace
    obstacle: str  # why its updates cannot be deferred; empty where they can


@dataclass(frozen=True)
class Decision:
    """What all ranks train with from now on, and why."""

    scheme: Scheme
    words: str
    failed: bool = False  # something was raised: they stay with what they have


def stay(why: str) -> Decision:
    """Go on as training has begun, because something went wrong."""
    return Decision(RECIPES["wfbp"], why, failed=True)


def decide(
    transport: Transport, auto: Auto, see: Callable[[], Seen], device: torch.device
) -> Decision:
    """What all ranks are to train with; the same on each, see [Note: Together].

    `device` is where the gradients are.
    """
    if transport.group.size == 1:
        return Decision(RECIPES["wfbp"], "wfbp: one rank has nobody to average with")
    bench = Bench(transport, device)
    try:
        seen = bench.everyone(see)

        def planned() -> tuple[str, str] | None:
            network = measure(transport, BUDGET, device)
            return plan(auto, seen, network) if bench.group.rank == 0 else None

        answer = bench.first(planned)
    except RankError as error:
        LOG.debug("auto", exc_info=True)
        # What is raised while all measure together says already which rank it was.
        own = error.__cause__
        return stay(str(own if isinstance(own, RankError) else error))
    assert answer is not None
    text, words = answer
    return Decision(parse(text), words)


def plan(auto: Auto, seen: Sequence[Seen], network: Network) -> tuple[str, str]:
    """The scheme as text, and why; for the slowest of the ranks."""
    slowest = max((s.trace for s in seen), key=lambda trace: trace.compute)
    obstacle = next((s.obstacle for s in seen if s.obstacle), "")

    def refuse(scheme: Scheme) -> str:
        return obstacle if scheme.schedule.update == "forward" else ""

    if auto.momentum_correction:  # with it, Adam bears what is made for SGD
        slowest = replace(slowest, steps="sgd")
    choices = rank(slowest, network, candidates(), refuse=refuse)
    how = network.size, auto.margin, slowest.steps
    # What exchanges steps cannot be gone on with: training has begun otherwise.
    own = advise([c for c in choices if c.scheme.schedule.launch != "step"], *how)
    chosen = own.recommended if auto.lossy else own.dense
    scheme = _prepared(chosen.scheme, auto) if chosen.kind == "lossy" else chosen.scheme
    return repr(scheme), _words(advise(choices, *how), chosen, network)


def _prepared(scheme: Scheme, auto: Auto) -> Scheme:
    """With what else `auto` was asked for, in the place of the recipe's own warm-up."""
    if not auto.warmup and not auto.momentum_correction:
        return scheme
    bare = replace(scheme, collective=cast(Any, settled(scheme.collective)))
    return prepared(bare, auto.warmup, auto.momentum_correction)


def _words(advice: Advice, chosen: Choice, network: Network) -> str:
    where = f"{network.hosts} hosts x {network.ranks_per_host} ranks"
    why = "; ".join([*advice.reasons(chosen), *(rule.words for rule in advice.rules)])
    words = f"{chosen.name}, {ms(chosen.step)} a step predicted on {where}: {why}"
    other = advice.recommended
    if other is not chosen:
        steps = other.scheme.schedule.launch == "step"
        words += (
            f"; {other.name} would take {ms(other.step)}, worth it only if it needs "
            f"less than {more(advice.break_even(other))}: "
            + ("start with it" if steps else "auto(lossy=True) allows it")
        )
    return f"{words}; {chosen.scheme!r}"
