"""What could be trained with, how long a step would take, and what cannot be used.

Every candidate runs on the virtual clock; nothing is measured here, and nothing is
recommended (`advice`). Pure and deterministic: the same trace, network and schemes give
the same list in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from gradtide.bucket import traits
from gradtide.fusion import BySize, Cuts, Fusion, MgWfbp
from gradtide.plan.conditions import refusal, wire
from gradtide.plan.network import Network
from gradtide.plan.trace import StepTrace
from gradtide.plan.virtual import Prediction, exchange_seconds, simulate
from gradtide.scheme import RECIPES, Scheme

Kind: TypeAlias = Literal["lossless", "rounded", "lossy"]
Simulate: TypeAlias = Callable[[StepTrace, Scheme, Network], Prediction]

# What every plan is held against, the plainest first: among equals the first is chosen.
DENSE = {name: RECIPES[name] for name in ("wfbp", "dear", "wfbp-bf16", "dear-bf16")}
TUNED = 1.02  # by so much a fusion must be better than the recipe's own
NEAR = 1.25  # of a kind, those within this factor of its best get their fusion tuned
TRIED = 3  # at most, of each kind
_MEGABYTES = (2.0, 5.0, 10.0, 25.0, 50.0)
_LINE = (1_000_000, 10_000_000)  # bytes of the exchanges that costs are a line through


@dataclass(frozen=True)
class Choice:
    """A scheme, and what the virtual clock says of it.

    `refused` says why it is of no use here; empty where it can be used. `name` is what
    was asked for; the fusion of `scheme` may have been tuned since.
    """

    name: str
    scheme: Scheme
    prediction: Prediction
    refused: str = ""

    @property
    def kind(self) -> Kind:
        return kind(self.scheme)

    @property
    def step(self) -> float:
        """Seconds."""
        return self.prediction.step


def kind(scheme: Scheme) -> Kind:
    """Whether means are exact, rounded on the wire, or partly delivered later."""
    if not traits(scheme.collective).dense:
        return "lossy"
    return "lossless" if wire(scheme.collective) is None else "rounded"


def sparse_recipes() -> dict[str, Scheme]:
    """All recipes that leave something behind, at their default densities.

    Not those that exchange steps: their loss is another one, step by step.
    """
    return {name: s for name, s in RECIPES.items() if _sparse(name, s)}


def _sparse(name: str, scheme: Scheme) -> bool:
    local = scheme.schedule.launch == "step"
    return kind(scheme) == "lossy" and name != "auto" and not local


def rank(
    trace: StepTrace,
    network: Network,
    schemes: Mapping[str, Scheme] | None = None,
    *,
    tune: bool = True,
    refuse: Callable[[Scheme], str] = lambda scheme: "",
    simulate: Simulate = simulate,
) -> list[Choice]:
    """What can be used, the fastest first, then what cannot, in the order given.

    DENSE and `schemes` (by name; None: all sparse recipes). With `tune`, schemes that
    have a recipe's fusion and come near the best of their kind are tried with others,
    too. `refuse` says why a scheme cannot be used (empty: it can). Raises ValueError
    for a network of one rank.
    """
    if network.size < 2:
        raise ValueError("one rank has nobody to average with: plan for 2 or more")
    asked = {**DENSE, **(sparse_recipes() if schemes is None else schemes)}
    choices = [
        Choice(name, scheme, simulate(trace, scheme, network))
        for name, scheme in asked.items()
    ]
    dense = {wire(DENSE[c.name].collective): c for c in choices if c.name in DENSE}
    choices = [
        replace(c, refused=refuse(c.scheme) or _refusal(c, trace, network, dense))
        for c in choices
    ]
    if tune:
        choices = [
            _tuned(choice, trace, network, simulate) if near else choice
            for choice, near in zip(choices, _near(choices), strict=True)
        ]
    return in_order(choices)


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """The fastest first; of equals, and of what is refused, the first given first."""
    return sorted(
        choices,
        key=lambda choice: (bool(choice.refused), 0 if choice.refused else choice.step),
    )


def _refusal(
    choice: Choice,
    trace: StepTrace,
    network: Network,
    dense: Mapping[str | None, Choice],
) -> str:
    scheme = choice.scheme
    if choice.name in DENSE:
        return ""
    # fp16 sends what bf16 does.
    other = dense[wire(scheme.collective) and "bf16"].prediction.sent_bytes
    here = choice.prediction.sent_bytes
    return refusal(scheme, trace, network.size, here, other)


def _near(choices: Sequence[Choice]) -> list[bool]:
    """Whether tuning could make the choice the best of its kind: the nearest few."""
    first: dict[Kind, list[Choice]] = {}
    for choice in in_order(choices):
        near = first.setdefault(choice.kind, [])
        close = not near or choice.step <= NEAR * near[0].step
        if not choice.refused and close and len(near) < TRIED:
            near.append(choice)
    return [any(c is near for near in first.get(c.kind, ())) for c in choices]


def _tuned(
    choice: Choice, trace: StepTrace, network: Network, simulate: Simulate
) -> Choice:
    """The choice with the fusion that is clearly better, if there is one."""
    best = choice
    for fusion in fusions(choice.scheme, trace, network):
        scheme = replace(choice.scheme, fusion=fusion)
        other = replace(
            choice, scheme=scheme, prediction=simulate(trace, scheme, network)
        )
        if other.step < best.step:
            best = other
    return best if best.step * TUNED <= choice.step else choice


def fusions(scheme: Scheme, trace: StepTrace, network: Network) -> list[Fusion]:
    """What to try in place of a recipe's own fusion; nothing in place of a user's."""
    own = scheme.fusion
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
