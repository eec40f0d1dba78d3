"""The advice in few words: whether it pays, which recipe, and what to write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from gradtide.advise.notes import Told
from gradtide.planner.advice import Advice, ms, needing
from gradtide.planner.network import Network
from gradtide.planner.report import line, not_its_own
from gradtide.planner.search import Choice
from gradtide.planner.trace import StepTrace

DDP = "DistributedDataParallel"
PLAIN = "wfbp"  # what that does
WORTH_TELLING = 0.1  # of a step, of what is in no trace


def answer(
    advice: Advice,
    trace: StepTrace,
    network: Network,
    told: Told,
    command: Sequence[str],
) -> str:
    """The advice, the line to paste, and what it was made from."""
    return "\n".join(
        [
            headline(advice),
            *advice.needs,
            "",
            *_paste(advice.recommended, told, command),
            "",
            *_from(advice, trace, network, told),
        ]
    )


def headline(advice: Advice) -> str:
    """Whether it pays, by how much, and why."""
    best, plain = advice.recommended, _plain(advice)
    why = advice.reasons(plain)[0]
    if best.name == PLAIN:
        return f"nothing to gain here over {DDP}: {advice.verdict}"
    gain, with_it = times(plain.step / best.step), f"with {PLAIN} or {DDP}"
    told = f"({ms(best.step)}, not {ms(plain.step)})"
    words = f"use {best.name}: a step about {gain} sooner than {with_it} {told}"
    if best.step > plain.step:  # and fewer of them
        words = f"use {best.name}: a step takes longer than {with_it} {told}"
    words += f", which {why}"
    if best.kind == "lossy":
        dense = advice.dense
        needed = needing(advice.break_even(best), dense.name)
        words += f"; worth it if it needs {needed} ({ms(dense.step)} a step)"
        if advice.weighing.margin is None:
            typical, worst, most = map(times, advice.sooner(best))
            words += f"; at the same loss {typical} as soon ({worst} to {most})"
    return words


def _plain(advice: Advice) -> Choice:
    return next(choice for choice in advice.choices if choice.name == PLAIN)


def _paste(best: Choice, told: Told, command: Sequence[str]) -> Iterator[str]:
    yield line(best)
    if told.wrapped:
        yield "or, with the script as it is:"
        yield f'gradtide run --scheme "{best.text}" -- {shlex.join(command)}'


def _from(
    advice: Advice, trace: StepTrace, network: Network, told: Told
) -> Iterator[str]:
    """What was seen, and what the prediction leaves out."""
    model = " and ".join(told.models)
    yield (
        f"Seen in {told.script}: {model}, {trace.numel:,} parameters "
        f"({trace.nbytes / 1e6:.3g} MB of gradients), {told.optimizer}, "
        f"{ms(trace.compute)} a step on {trace.device}. Predicted for "
        f"{network.words}."
    )
    for words in not_its_own(network, trace):
        yield f"{words}."
    yield (
        "The script was ended when that was seen, as nothing else of it was asked for; "
        "what it prints goes to stderr."
    )
    if told.others:
        yield (
            f"{', '.join(told.others)} steps, too; {told.optimizer} steps most "
            "parameters, and the plan is for its step."
        )
    if told.passes > 1 and told.closes:
        yield (
            f"A step calls its closure {told.passes} times, and each time gradients are"
            " exchanged: the plan counts one of these exchanges."
        )
    elif told.passes > 1:
        yield (
            f"A step has {told.passes} backward passes, of which the last one's "
            "gradients are exchanged."
        )
    if told.between > WORTH_TELLING * trace.compute:
        both = times(
            (_plain(advice).step + told.between)
            / (advice.recommended.step + told.between)
        )
        yield (
            f"Besides, a step of the script takes {ms(told.between)} that no recipe "
            f"shortens, such as loading data: with it, a step is {both} sooner."
        )


def times(factor: float) -> str:
    """So many times, to two digits."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"
