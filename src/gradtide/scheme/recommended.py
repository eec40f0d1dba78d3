"""Which recipe when: the one table that README, `plan`, `doctor`, `auto`, `simulate`
and `gradtide schemes` have their recommendations from.

Knows texts; knows nothing of networks and models (`planner`).

[Note: The ladder] Rows are in the order in which they are to be tried: the plainest
first. Whoever asks takes the first that suffices, and goes down only where the next
one is worth what it asks for. Those that are not `short` are steps aside, for a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradtide.scheme.config import Scheme
from gradtide.scheme.parser import parse

# Whose steps a recipe is made for: such as divide by the size of gradients, or not.
Steps: TypeAlias = Literal["any", "adam", "sgd"]


@dataclass(frozen=True)
class Recommendation:
    """A recipe, when to use it, what of a dense exchange's bytes it sends, and what it
    needs; `short`: it is in README's table, which has those to begin with."""

    recipe: str
    when: str
    sends: str
    needs: str
    steps: Steps = "any"
    short: bool = False
    left_out: str = ""  # why it is not among what is predicted, side by side

    @property
    def scheme(self) -> Scheme:
        return parse(self.recipe)


_FROM_SCRATCH = "Adam; training from scratch, 240 steps of it as warm-up"
_CODED = "a loss that bears gradients in bf16, a CPU with numba, and a second buffer"
RECOMMENDED = (
    Recommendation(
        "wfbp",
        "the default: backward hides most of the exchange, as with DDP, or you read or "
        "edit single gradients before `step()`",
        "as much as DDP",
        "nothing",
        short=True,
    ),
    Recommendation(
        "dear",
        "the exchange takes longer than backward: half of it hides in the next "
        "forward. The same bits as `wfbp`",
        "as much as DDP",
        "a loop that leaves gradients alone before `step()`, or clips them by norm",
        short=True,
    ),
    Recommendation(
        "wfbp(wire='bf16')",
        "the network is the bottleneck, and you read or edit single gradients",
        "half",
        "a loss that bears gradients in bf16",
    ),
    Recommendation(
        "dear(wire='bf16')",
        "the network is the bottleneck",
        "half",
        "what `dear` needs, and a loss that bears gradients in bf16",
        short=True,
    ),
    Recommendation(
        "wfbp(wire='bf16', lossless=True)",
        "the same as `wfbp(wire='bf16')`, to the bit, on a slower network: exponents "
        "travel in fewer bits",
        "about 36 %",
        _CODED,
    ),
    Recommendation(
        "dear(wire='bf16', lossless=True)",
        "the same as `dear(wire='bf16')`, to the bit, on a slower network",
        "about 36 %",
        f"what `dear` needs, and {_CODED}",
    ),
    Recommendation(
        "wfbp(wire='int8')",
        "half the bytes are too many, and there is no time to warm up, as in "
        "fine-tuning: what rounding takes off is sent later",
        "a quarter",
        "a second buffer for gradients",
    ),
    Recommendation(
        "wfbp(wire='e3m0')",
        "the same, and a quarter is too many",
        "an eighth",
        "a second buffer for gradients, and a look at the loss",
    ),
    Recommendation(
        "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')",
        "half the bytes are too many: begin with this one; it has the lowest losses "
        "of all that send fewer",
        "an eighth in the warm-up, then about 2.2 %",
        "Adam; training from scratch, 60 steps of it as warm-up",
        "adam",
        short=True,
    ),
    Recommendation(
        "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')",
        "the same, on a slower network",
        "an eighth in the warm-up, then about 0.3 %",
        _FROM_SCRATCH,
        "adam",
        short=True,
    ),
    Recommendation(
        "oktopk(0.01, schedule='local', warmup=240)",
        "the same, where entries should be chosen by their sum over all ranks",
        "all in the warm-up, then about 1.3 %",
        _FROM_SCRATCH,
        "adam",
    ),
    Recommendation(
        "exdyna(0.01, warmup=160)",
        "half the bytes are too many, and you train with SGD (with Adam its loss stays "
        "far behind)",
        "a third in the warm-up, then about 1.1 %",
        "SGD; training from scratch, 160 steps of it as warm-up",
        "sgd",
    ),
    Recommendation(
        "diloco(warmup=240)",
        "the network is so slow, or so far away, that one exchange a step is too much: "
        "ranks step alone, and exchange every 30 steps what these did",
        "all in the warm-up, then about 3.3 %",
        f"{_FROM_SCRATCH}, and a look at the loss: what it costs in steps differs more "
        "from model to model than with all others",
        "adam",
    ),
    Recommendation(
        "pad_kfac(factor_every=10, inverse_every=100)",
        "steps are scarce: K-FAC takes fewer and dearer ones, and your optimizer stays",
        "more than DDP",
        "linear layers or convolutions",
        left_out="it changes what a step does, not only how long it takes",
    ),
    Recommendation(
        "auto",
        "you do not want to choose: it trains as `wfbp`, measures for 12 steps, and "
        "goes on with one of the six on top",
        "as much as what it chooses",
        "nothing",
        left_out="it plans by itself, when training has begun",
    ),
)


def candidates() -> dict[str, Scheme]:
    """Schemes by their recipes that can be held against each other by their steps."""
    return {row.recipe: row.scheme for row in RECOMMENDED if not row.left_out}


def made_for(recipe: str) -> Steps:
    """Whose steps a recipe is made for; "any" of what is not recommended."""
    return next((row.steps for row in RECOMMENDED if row.recipe == recipe), "any")


def unsuited(recipe: str, steps: Steps) -> str:
    """Why a recipe is not for an optimizer of a kind; empty where it may be."""
    made = made_for(recipe)
    if "any" in (made, steps) or made == steps:
        return ""
    names = {"adam": "Adam and its kin", "sgd": "SGD"}
    return f"it is for {names[made]}, and this trains with {names[steps]}"


def markdown(rows: Iterable[Recommendation]) -> str:
    """The table as it stands in README and docs."""
    lines = ["| recipe | use it when | sends | needs |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.recipe}`", row.when, row.sends, row.needs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
