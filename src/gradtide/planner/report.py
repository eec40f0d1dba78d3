"""A plan as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from operator import attrgetter

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradtide.core.grouped import grouped
from gradtide.planner.advice import Advice, percent
from gradtide.planner.data import document
from gradtide.planner.data.presets import like
from gradtide.planner.network import Network
from gradtide.planner.prior import Cost
from gradtide.planner.search import Choice
from gradtide.planner.steps.stages import Stages
from gradtide.planner.trace import StepTrace
from gradtide.planner.virtual import Prediction
from gradtide.scheme.recommended import RECOMMENDED, candidates

FORMAT = "gradtide plan"
MOST = 6  # lossy schemes in a table
_NUMBERS = ("step ms", "exposed", "limit", "MB sent", "break-even")


def show(advice: Advice, trace: StepTrace, network: Network) -> Group:
    """The verdict, the rules that hold, and the schemes, the fastest first.

    At most MOST lossy ones; below, what is refused.
    """
    grid = _grid("scheme", min_width=26)
    for heading in _NUMBERS:
        grid.add_column(heading, justify="right", no_wrap=True)
    # Below the table: in 80 columns they would get one of a word's width.
    why = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    why.add_column(overflow="fold", max_width=28)
    why.add_column(overflow="fold")
    usable = [choice for choice in advice.choices if not choice.refused]
    named = " ".join([advice.verdict, *advice.needs, *(r.words for r in advice.rules)])
    # Invariant: what is named above the table is in it.
    left_out = [choice for choice in usable if choice.kind == "lossy"][MOST:]
    left_out = [choice for choice in left_out if choice.name not in named]
    for choice in usable:
        if choice in left_out:
            continue
        style = "bold" if choice is advice.recommended else ""
        grid.add_row(choice.name, *_numbers(advice, choice), style=style)
        why.add_row(choice.name, "; ".join(advice.reasons(choice)), style=style)
    lines = [
        Text(
            f"{trace.name}: {trace.nbytes / 1e6:.4g} MB of gradients, "
            f"{1e3 * trace.compute:.4g} ms of compute a step; {network.words}; "
            "predicted on the virtual clock"
        ),
        Text(f"device: {told_of(network, trace)}"),
        Text(advice.verdict, style="bold"),
        *map(Text, advice.needs),
        *(
            Text(f"{rule.name}: {rule.words}")
            for rule in advice.rules
            if rule.words not in advice.verdict
        ),
        Text(),
        Text(line(advice.recommended), no_wrap=True, overflow="ignore"),
    ]
    curved = stages({choice.name: choice.prediction for choice in advice.choices})
    if curved is not None:
        lines.append(Text("K-FAC: below, what a step consists of"))
    refused = grouped((c for c in advice.choices if c.refused), lambda c: c.refused)
    useless = [
        Text(f"of no use here: {', '.join(c.name for c in own)}: {why}", style="dim")
        for why, own in refused.items()
    ]
    if candidates().keys() <= {choice.name for choice in advice.choices}:
        useless += [
            Text(f"not ranked: {row.recipe}: {row.left_out}", style="dim")
            for row in RECOMMENDED
            if row.left_out
        ]
    return Group(*lines, grid, why, *([curved] if curved else []), *useless)


def told_of(network: Network, trace: StepTrace) -> str:
    """Whose processor was assumed, with --device another, and what is not its own."""
    name = network.device.name
    if not name:
        return "as the network's profile has it"
    return ". ".join([f"{name} (else: --device)", *not_its_own(network, trace)])


def not_its_own(network: Network, trace: StepTrace) -> list[str]:
    """That what is computed was timed on another processor than the one assumed."""
    there = like(trace.device).device
    if not (trace.device and network.device.name) or network.device == there:
        return []
    return [
        f"The {1e3 * trace.compute:.4g} ms of compute are those of {trace.device}: on "
        "this device they are others, and another recipe may be best (make the trace "
        "there; for a replay say --step-ms)"
    ]


def line(choice: Choice) -> str:
    """What to write in a program to train with a choice."""
    text = choice.text
    quote = "'" if '"' in text else '"'
    return f"gradtide.replicate(model, optimizer, {quote}{text}{quote})"


def stages(predictions: Mapping[str, Prediction]) -> Table | None:
    """What those steps that have K-FAC consist of, ms: shares, and busy in brackets."""
    told = {name: p for name, p in predictions.items() if p.breakdown is not None}
    if not told:
        return None
    grid = _grid("ms of a step (busy)")
    for name in told:
        grid.add_column(name, justify="right")
    grid.add_row("whole", *(f"{1e3 * p.step:.4g}" for p in told.values()), style="bold")
    for name in (field.name for field in fields(Stages)):
        read = attrgetter(f"breakdown.{name}", f"busy.{name}")
        both = map(read, told.values())
        cells = (f"{1e3 * own:.4g} ({1e3 * busy:.4g})" for own, busy in both)
        grid.add_row(name, *cells)
    return grid


def _grid(heading: str, min_width: int | None = None) -> Table:
    """A table with its first column."""
    grid = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    grid.add_column(heading, overflow="fold", min_width=min_width, max_width=28)
    return grid


def _numbers(advice: Advice, choice: Choice) -> list[str]:
    told = choice.prediction
    seconds, gain = (told.step, told.exposed, told.limit), _break_even(advice, choice)
    return [
        *(f"{1e3 * value:.4g}" for value in seconds),
        f"{told.sent_bytes / 1e6:.3g}",
        "-" if gain is None else percent(gain),
    ]


def _break_even(advice: Advice, choice: Choice) -> float | None:
    """None where a scheme loses nothing or is refused."""
    lossy = choice.kind == "lossy" and not choice.refused
    return advice.break_even(choice) if lossy else None


def dumps(advice: Advice, trace: StepTrace, network: Network) -> str:
    """The plan as JSON; seconds, bytes, and shares.

    `scheme` is what `gradtide.replicate` takes.
    """
    content = {
        "trace": trace.name,
        "hosts": network.hosts,
        "ranks_per_host": network.ranks_per_host,
        "device": network.device.name or None,
        "compute_on": trace.device or None,
        "margin": advice.weighing.margin,
        "steps": _finite(advice.weighing.total),
        "verdict": advice.verdict,
        "recommended": advice.recommended.name,
        "scheme": advice.recommended.text,
        "fastest": advice.fastest.name,
        "lossless": advice.lossless.name,
        "dense": advice.dense.name,
        "rules": [asdict(rule) for rule in advice.rules],
        "choices": [
            {
                "name": choice.name,
                "scheme": repr(choice.scheme),
                "kind": choice.kind,
                "refused": choice.refused or None,
                "prediction": asdict(choice.prediction),
                "break_even": _break_even(advice, choice),
                "cost": None if choice.refused else _told(advice.cost(choice)),
                "sooner": None if choice.refused else advice.sooner(choice),
                "warmup": choice.warmup
                and {"steps": choice.warmup[0], "step_seconds": choice.warmup[1]},
                "reasons": advice.reasons(choice),
            }
            for choice in advice.choices
        ],
    }
    return document.dumps(FORMAT, content)


def _told(cost: Cost) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in asdict(cost).items()}


def _finite(number: float) -> float | None:
    """None, which JSON has, of what has no end."""
    return number if math.isfinite(number) else None
