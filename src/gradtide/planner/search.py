"""What could be trained with, how long a step would take, and what cannot be used.

Every candidate runs on the virtual clock; nothing is measured here, and nothing is
recommended (`advice`). Pure and deterministic: the same trace, network and schemes give
the same list in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from gradtide.collectives import Warmup
from gradtide.core.payload import pays_below, settled, traits, wire_of
from gradtide.core.schedule import WFBP
from gradtide.fusion import BySize, Cuts, Fusion, MgWfbp
from gradtide.planner.data.presets import like, preset
from gradtide.planner.network import MOST, Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import Prediction, exchange_seconds, simulate
from gradtide.scheme import RECIPES, Scheme, parse
from gradtide.scheme.recommended import candidates, unsuited

Kind: TypeAlias = Literal["lossless", "rounded", "lossy"]

# What every plan is held against, the plainest first: among equals the first is chosen.
DENSE = {
    text: parse(text)
    for text in ("wfbp", "dear", "wfbp(wire='bf16')", "dear(wire='bf16')")
}
TUNED = 1.02  # by so much a fusion must be better than the recipe's own
NEAR = 1.25  # of a kind, those within this factor of its best get their fusion tuned
TRIED = 3  # at most, of each kind
SAVED = 0.02  # of the dense bytes must be saved: less is not worth any residual
_MEGABYTES = (2.0, 5.0, 10.0, 25.0, 50.0)
_LINE = (1_000_000, 10_000_000)  # bytes of the exchanges that costs are a line through


@dataclass(frozen=True)
class Choice:
    """A scheme, and what the virtual clock says of it."""

    name: str  # as it was asked for
    scheme: Scheme  # its fusion may have been tuned since
    prediction: Prediction
    refused: str = ""  # why it is of no use here; empty where it can be used
    # Steps that it begins with at other densities, and what one of them takes: seconds.
    warmup: tuple[int, float] | None = None

    @property
    def text(self) -> str:
        """What to write for it, its fusion included."""
        if parse(self.name) == self.scheme:
            return self.name
        told = f"fusion={self.scheme.fusion!r}"
        own = f"{self.name[:-1]}, " if self.name.endswith(")") else f"{self.name}("
        try:
            same = parse(f"{own}{told})") == self.scheme
        except ValueError:  # a constructor call, which has a fusion already
            same = False
        return f"{own}{told})" if same else repr(self.scheme)

    @property
    def kind(self) -> Kind:
        return kind(self.scheme)

    @property
    def step(self) -> float:
        """Seconds."""
        return self.prediction.step


def kind(scheme: Scheme) -> Kind:
    """Whether means are exact, rounded on the wire, or partly delivered later.

    What exchanges steps in the place of gradients trains otherwise, and so does what
    has another step made of them: both are lossy, too.
    """
    otherwise = scheme.schedule.launch == "step" or scheme.preconditioner is not None
    if traits(scheme.collective).residual or otherwise:
        return "lossy"
    return "lossless" if wire(scheme.collective) is None else "rounded"


def wire(collective: object) -> str | None:
    """The type on the wire, where it is not the gradients' own."""
    found: str | None = wire_of(settled(collective))
    return found


def rank(
    trace: StepTrace,
    network: Network,
    schemes: Mapping[str, Scheme] | None = None,
    *,
    tune: bool = True,
    refuse: Callable[[Scheme], str] = lambda scheme: "",
) -> list[Choice]:
    """What can be used, the fastest first, then what cannot, in the order given.

    DENSE and `schemes` (by name; None: those that are recommended). With `tune`,
    schemes that have a recipe's fusion and come near the best of their kind are tried
    with others, too. `refuse` says why a scheme cannot be used (empty: it can). Raises
    ValueError for a network of one rank.
    """
    if network.size < 2:
        raise ValueError("one rank has nobody to average with: plan for 2 or more")
    if network.size > MOST:
        raise ValueError(f"{network.size} ranks: at most {MOST} can be planned for")
    asked = {**DENSE, **(candidates() if schemes is None else schemes)}
    choices = [
        Choice(name, scheme, simulate(trace, scheme, network))
        for name, scheme in asked.items()
    ]
    dense = {wire(DENSE[c.name].collective): c for c in choices if c.name in DENSE}

    def refused(choice: Choice) -> str:
        told = refuse(choice.scheme) or unsuited(choice.name, trace.steps)
        told = told or untimed(choice.scheme, network)
        if told or choice.name in DENSE:
            return told
        # fp16 sends what bf16 does.
        other = dense[wire(choice.scheme.collective) and "bf16"].prediction.sent_bytes
        sent = choice.prediction.sent_bytes
        return refusal(choice.scheme, trace, network.size, sent, other)

    choices = [replace(choice, refused=refused(choice)) for choice in choices]
    near = _near(choices) if tune else []
    tried = (_tuned(c, trace, network) if c in near else c for c in choices)
    return in_order(_with_warmup(choice, trace, network) for choice in tried)


def _with_warmup(choice: Choice, trace: StepTrace, network: Network) -> Choice:
    """The choice, with what the steps of its warm-up take, if it has one."""
    wrapper, scheme = choice.scheme.collective, choice.scheme
    if choice.refused or not isinstance(wrapper, Warmup):
        return choice
    stages = []
    for collective, density in zip(wrapper.stages(), wrapper.densities, strict=True):
        stage = replace(scheme, collective=collective)
        if density == 1 and scheme.schedule.launch == "step":  # gradients, as ever
            stage = replace(stage, schedule=WFBP, outer=None)
        stages.append(stage)
    steps = {stage: simulate(trace, stage, network).step for stage in set(stages)}
    mean = sum(steps[stage] for stage in stages) / len(stages)
    return replace(choice, warmup=(wrapper.steps * len(stages), mean))


def untimed(scheme: Scheme, network: Network) -> str:
    """That nobody has timed a scheme on such processors; empty where somebody has."""
    if network.device.beside or not getattr(scheme.collective, "lossless", False):
        return ""
    return "nobody has timed its code on an accelerator: compare both there"


def refusal(
    scheme: Scheme, trace: StepTrace, size: int, sent: float, dense: float
) -> str:
    """Why a scheme is of no use among `size` ranks; empty where it may be.

    `sent` and `dense` are the bytes that a rank sends in a step by it and by a dense
    exchange with the same type on the wire.
    """
    own = traits(settled(scheme.collective))
    if own.dense or scheme.preconditioner is not None:  # which saves steps, not bytes
        return ""
    if own.depends_on == "shapes" and all(len(u.shape) < 2 for u in trace.units):
        return "it works on matrices, and the trace has no shapes: compare in the lab"
    if sent < (1 - SAVED) * dense:
        return ""
    words = f"sends {sent / 1e6:.3g} MB a step, a dense exchange {dense / 1e6:.3g} MB"
    bound = pays_below(settled(scheme.collective), size)
    if bound is not None:
        words += f": among {size} ranks it pays below a density of {bound:.2g}"
    return words


def equipped(network: Network, asked: str | None, trace: StepTrace) -> Network:
    """The network with the processors that are asked for, by name.

    Without a name they stay if they were measured, and else are those of the trace.
    Raises ValueError for a name that is not known.
    """
    if asked is not None:
        return network.on(preset(asked))
    return network.on(like(trace.device)) if network.device.name else network


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """The fastest first; of equals, and of what is refused, the first given first."""
    return sorted(choices, key=lambda c: math.inf if c.refused else c.step)


def _near(choices: Sequence[Choice]) -> list[Choice]:
    """Those that tuning could make the best of their kind: the nearest few."""
    near: list[Choice] = []
    for one in get_args(Kind):
        own = in_order(c for c in choices if c.kind == one and not c.refused)
        near += [c for c in own if c.step <= NEAR * own[0].step][:TRIED]
    return near


def _tuned(choice: Choice, trace: StepTrace, network: Network) -> Choice:
    """The choice with the fusion that is clearly better, if there is one."""
    best = choice
    for fusion in fusions(choice.scheme, trace, network):
        scheme = replace(choice.scheme, fusion=fusion)
        told = simulate(trace, scheme, network)
        if told.step < best.step:
            best = replace(choice, scheme=scheme, prediction=told)
    return best if best.step * TUNED <= choice.step else choice


def fusions(scheme: Scheme, trace: StepTrace, network: Network) -> list[Fusion]:
    """What to try in place of a recipe's own fusion; nothing in place of a user's."""
    own = scheme.fusion
    if scheme.schedule.rounds:  # most of their steps send nothing
        return []
    if scheme.preconditioner is not None:  # most of what is sent is no gradient
        return []
    if own not in {recipe.fusion for recipe in RECIPES.values()}:
        return []
    assert isinstance(own, BySize)
    # As the recipe has them: few large buckets, or small ones at both ends.
    few = own.ends == own.megabytes
    sizes: list[Fusion] = [
        BySize(mb, mb, own.pieces) if few else replace(own, megabytes=mb)
        for mb in _MEGABYTES
    ]
    tried = [fusion for fusion in sizes if fusion != own]
    return tried if few else [*tried, *_merged(scheme, trace, network)]


def _merged(scheme: Scheme, trace: StepTrace, network: Network) -> list[Fusion]:
    """MG-WFBP's buckets for this trace, as training can have them: cut in advance."""
    if len({unit.itemsize for unit in trace.units}) > 1:
        return []
    small, large = (exchange_seconds(n, scheme, network) for n in _LINE)
    slope = (large - small) / (_LINE[1] - _LINE[0])
    start = max(small - slope * _LINE[0], 0.0)
    try:
        cuts = MgWfbp()(trace.fusion(), lambda nbytes: start + slope * nbytes)
    except ValueError:  # a network without cost, a trace without times
        return []
    return [Cuts(tuple(cut.stop for cut in cuts))]
