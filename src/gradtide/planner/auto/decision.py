"""What all ranks are to train with, decided by rank 0 and followed by everybody.

[Note: In training] What is chosen follows what was trained with until now (`Present`),
so not everything can be. A warm-up is for the beginning of a training: where means were
exact for as long already, none is left. And what is there stays, unless something of
its kind is faster by KEPT, because another one learns anew what it knows of entries.

[Note: Together] Between two exchanges of this module stands nothing that a rank might
raise unnoticed: what can fail is tried, and whether it did is exchanged next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from gradtide.collectives import Warmup
from gradtide.core.payload import settled, traits
from gradtide.planner.advice import Advice, advise, more, ms
from gradtide.planner.measure import measure
from gradtide.planner.measuring.bench import Bench, RankError
from gradtide.planner.network import Network
from gradtide.planner.search import Choice, kind, rank
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import simulate
from gradtide.scheme import RECIPES, Auto, Scheme, parse, prepared
from gradtide.scheme.recommended import candidates
from gradtide.transport import Transport

LOG = logging.getLogger("gradtide")
BUDGET = 3.0  # seconds of measuring the network
KEPT = 1.05  # by this factor and less, a scheme of the same kind is not worth it


@dataclass(frozen=True)
class Seen:
    """What one rank has found out by itself."""

    trace: StepTrace
    obstacle: str  # why its updates cannot be deferred; empty where they can
    alone: str = ""  # why its steps cannot be exchanged; empty where they can


@dataclass(frozen=True)
class Present:
    """What is trained with, for how many steps by now, and if a plan has chosen it."""

    scheme: Scheme = RECIPES["wfbp"]
    steps: int = 0
    chosen: bool = False

    def forbids(self, scheme: Scheme) -> str:
        """Why another scheme cannot follow; empty where it can."""
        before, then = (s.schedule.launch == "step" for s in (self.scheme, scheme))
        if before and not then:
            return "each rank has an optimizer's state of its own by now"
        left = self.chosen and traits(settled(self.scheme.collective)).residual
        return "a residual of gradients is no step" if then > before and left else ""


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
    transport: Transport,
    auto: Auto,
    see: Callable[[], Seen],
    device: torch.device,
    present: Present,
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
            if bench.group.rank:
                return None
            return plan(auto, seen, network, present)

        answer = bench.first(planned)
    except RankError as error:
        LOG.debug("auto", exc_info=True)
        # What is raised while all measure together says already which rank it was.
        own = error.__cause__
        return stay(str(own if isinstance(own, RankError) else error))
    assert answer is not None
    text, words = answer
    return Decision(parse(text), words)


def plan(
    auto: Auto,
    seen: Sequence[Seen],
    network: Network,
    present: Present = Present(),
) -> tuple[str, str]:
    """The scheme as text, and why; for the slowest of the ranks."""
    slowest = max((s.trace for s in seen), key=lambda trace: trace.compute)
    obstacle = next((s.obstacle for s in seen if s.obstacle), "")
    alone = next((s.alone for s in seen if s.alone), "")

    def refuse(scheme: Scheme) -> str:
        if scheme.schedule.launch == "step":
            return alone or present.forbids(scheme)
        return obstacle if scheme.schedule.update == "forward" else ""

    if auto.momentum_correction:  # with it, Adam bears what is made for SGD
        slowest = replace(slowest, steps="sgd")
    choices = rank(slowest, network, candidates(), refuse=refuse)
    advice = advise(choices, network.size, auto.margin, slowest.steps)
    chosen = advice.recommended if auto.lossy else advice.dense
    why = present.forbids(chosen.scheme)
    if present.chosen and (why or _kept(present, chosen, slowest, network)):
        words = f"stays: {_words(advice, chosen, network)}"
        return repr(present.scheme), f"{words}; but {why}" if why else words
    scheme = chosen.scheme
    if chosen.kind == "lossy":
        scheme = _prepared(scheme, auto, present.steps)
    return repr(scheme), _words(advice, chosen, network)


def _kept(present: Present, chosen: Choice, trace: StepTrace, network: Network) -> bool:
    """Whether what is trained with is as good as what was chosen."""
    own = present.scheme
    if kind(own) != chosen.kind:
        return False
    if settled(own.collective) == settled(chosen.scheme.collective) and (
        own.schedule == chosen.scheme.schedule and chosen.kind == "lossy"
    ):
        return True
    return simulate(trace, own, network).step <= KEPT * chosen.step


def _prepared(scheme: Scheme, auto: Auto, steps: int) -> Scheme:
    """With what else `auto` was asked for, in the place of the recipe's own warm-up.

    What was exact for as many `steps` needs none.
    """
    bare = replace(scheme, collective=cast(Any, settled(scheme.collective)))
    if auto.warmup or auto.momentum_correction:
        scheme = prepared(bare, auto.warmup, auto.momentum_correction)
    wrapper = scheme.collective
    if isinstance(wrapper, Warmup) and steps >= wrapper.steps * len(wrapper.densities):
        inside = wrapper.collective
        return replace(scheme, collective=inside)
    return scheme


def _words(advice: Advice, chosen: Choice, network: Network) -> str:
    where = network.words
    why = "; ".join([*advice.reasons(chosen), *(rule.words for rule in advice.rules)])
    words = f"{chosen.name}, {ms(chosen.step)} a step predicted on {where}: {why}"
    other = advice.recommended
    if other is not chosen:
        words += (
            f"; {other.name} would take {ms(other.step)}, worth it only if it needs "
            f"less than {more(advice.break_even(other))}: auto(lossy=True) allows it"
        )
    return f"{words}; {chosen.scheme!r}"
