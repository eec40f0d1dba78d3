"""A plan as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradtide.plan.advice import Advice, percent
from gradtide.plan.network import Network
from gradtide.plan.search import Choice
from gradtide.plan.stages import Stages
from gradtide.plan.trace import StepTrace
from gradtide.plan.virtual import Prediction

FORMAT, VERSION = "gradtide plan", 1
MOST = 6  # lossy schemes in a table
_NUMBERS = ("step ms", "exposed", "limit", "MB sent", "buckets", "break-even")


def show(
    advice: Advice, trace: StepTrace, network: Network, most: int | None = MOST
) -> Group:
    """The verdict, the rules that hold, and the schemes, the fastest first.

    At most `most` lossy ones (None: all); below, what is refused.
    """
    grid = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    grid.add_column("scheme", overflow="fold", max_width=28)
    for heading in _NUMBERS:
        grid.add_column(heading, justify="right", no_wrap=True)
    # Below the table: in 80 columns they would get one of a word's width.
    why = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    why.add_column(overflow="fold", max_width=28)
    why.add_column(overflow="fold")
    for choice in _shown(advice.choices, most):
        style = "bold" if choice is advice.recommended else ""
        grid.add_row(choice.name, *_numbers(advice, choice), style=style)
        why.add_row(choice.name, "; ".join(advice.reasons(choice)), style=style)
    lines = [
        Text(preface(trace, network)),
        Text(advice.verdict, style="bold"),
        *(Text(f"rule: {rule.name}: {rule.words}") for rule in advice.rules),
        Text(f"as a scheme: {advice.recommended.scheme!r}"),
    ]
    curved = [c for c in advice.choices if c.prediction.breakdown is not None]
    if curved:
        told = {choice.name: choice.prediction for choice in curved}
        lines.append(Text("K-FAC: below, what a step consists of; not ranked"))
    refused = [
        Text(f"of no use here: {', '.join(names)}: {why}", style="dim")
        for why, names in _refused(advice.choices).items()
    ]
    tables = [stages(told)] if curved else []
    return Group(*lines, grid, why, *tables, *refused)


def stages(told: Mapping[str, Prediction]) -> Table:
    """What steps with K-FAC consist of, ms: shares, and busy in brackets."""
    grid = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    grid.add_column("ms of a step (busy)", overflow="fold", max_width=28)
    for name in told:
        grid.add_column(name, justify="right")
    grid.add_row("whole", *(f"{1e3 * p.step:.4g}" for p in told.values()), style="bold")
    for field in fields(Stages):
        grid.add_row(
            field.name,
            *(_stage(prediction, field.name) for prediction in told.values()),
        )
    return grid


def _stage(prediction: Prediction, name: str) -> str:
    if prediction.breakdown is None or prediction.busy is None:
        return "-"
    own, busy = (
        getattr(part, name) for part in (prediction.breakdown, prediction.busy)
    )
    return f"{1e3 * own:.4g} ({1e3 * busy:.4g})"


def _shown(choices: Sequence[Choice], most: int | None) -> list[Choice]:
    usable = [choice for choice in choices if not choice.refused]
    lossy = [choice for choice in usable if choice.kind == "lossy"][:most]
    return [c for c in usable if c.kind != "lossy" or any(c is one for one in lossy)]


def _refused(choices: Sequence[Choice]) -> dict[str, list[str]]:
    """Names by the reason."""
    reasons: dict[str, list[str]] = {}
    for choice in choices:
        if choice.refused:
            reasons.setdefault(choice.refused, []).append(choice.name)
    return reasons


def preface(trace: StepTrace, network: Network) -> str:
    """What was planned for."""
    return (
        f"{trace.name}: {trace.nbytes / 1e6:.4g} MB of gradients, "
        f"{1e3 * trace.compute:.4g} ms of compute a step; {network.hosts} hosts x "
        f"{network.ranks_per_host} ranks; predicted on the virtual clock"
    )


def _numbers(advice: Advice, choice: Choice) -> list[str]:
    told = choice.prediction
    seconds = (told.step, told.exposed, told.limit)
    lossy = choice.kind == "lossy" and not choice.refused
    return [
        *(f"{1e3 * value:.4g}" for value in seconds),
        f"{told.sent_bytes / 1e6:.3g}",
        str(told.buckets),
        percent(advice.break_even(choice)) if lossy else "-",
    ]


def dumps(advice: Advice, trace: StepTrace, network: Network) -> str:
    """The plan as JSON; seconds, bytes, and shares.

    `scheme` is what `gradtide.replicate` takes. `break_even` is null where a scheme
    loses nothing or is refused.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "trace": trace.name,
        "hosts": network.hosts,
        "ranks_per_host": network.ranks_per_host,
        "margin": advice.margin,
        "verdict": advice.verdict,
        "recommended": advice.recommended.name,
        "scheme": repr(advice.recommended.scheme),
        "fastest": advice.fastest.name,
        "lossless": advice.lossless.name,
        "dense": advice.dense.name,
        "rules": [asdict(rule) for rule in advice.rules],
        "choices": [_row(advice, choice) for choice in advice.choices],
    }
    return json.dumps(document, indent=1) + "\n"


def _row(advice: Advice, choice: Choice) -> dict[str, Any]:
    lossy = choice.kind == "lossy" and not choice.refused
    return {
        "name": choice.name,
        "scheme": repr(choice.scheme),
        "kind": choice.kind,
        "refused": choice.refused or None,
        "prediction": asdict(choice.prediction),
        "break_even": advice.break_even(choice) if lossy else None,
        "reasons": advice.reasons(choice),
    }
