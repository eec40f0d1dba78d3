"""Which of the ranked schemes to train with, which rules say so, and in words why.

All words are derived from predictions: what of the exchange is exposed, how far a step
is from its limit, what selection costs and what it saves.

[Note: Kinds] What counts is the time to the same loss. A scheme that rounds on the wire
(bf16) counts as nearly lossless and has to be faster by NEARLY. One that delivers part
of the gradient later may need more steps; how many, is known from a race of the user's
(`pilot`) or from other tasks alone (`prior`), and its break-even is always stated. It
is recommended only if it would be there sooner even if it needed as many steps as in
the worst run of those (or `margin` more, if that is given). The same holds between
lossy ones: what is further down the ladder (`scheme.recommended`) has to be sooner, at
its worst, than what comes before. Others than those are in the order of their steps.
Steps of a warm-up, which send more, count in a run of `total` steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradtide.core.grouped import grouped
from gradtide.planner.prior import NONE, Cost, cost_of, find
from gradtide.planner.search import DENSE, Choice
from gradtide.planner.virtual import Prediction
from gradtide.scheme.recommended import RECOMMENDED, Steps, made_for

HIDDEN = 0.05  # of a step: what is exposed of the exchange, where it counts as hidden
SAME = 1.02  # by this factor and less, two steps of a kind take equally long
NEARLY = 0.05  # more steps that a rounded scheme has to be worth
CLOSE = 0.1  # shares that are too small to be named
MOST = 1e6  # of a share of steps that is told as a number: more is for ever
STEPS = 2000  # of a run, where nothing is said of it


@dataclass(frozen=True)
class Rule:
    """A rule that holds here, in words, and the numbers that it was judged by."""

    name: str
    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighing:
    """How steps are weighed: by a margin that is asked for, or by what is known.

    `total`: steps of a run that is exact; `known`: by a race, of some schemes.
    """

    margin: float | None = None
    total: float = STEPS
    known: Mapping[str, Cost] = field(default_factory=dict)

    def cost(self, choice: Choice) -> Cost:
        if choice.kind != "lossy":
            return NONE
        if self.margin is not None:
            return Cost(0.0, 0.0, self.margin)
        return find(self.known, choice.scheme) or cost_of(choice.scheme)

    def mean(self, choice: Choice, share: float) -> float:
        """Seconds to the loss of `total` exact steps, for each of these.

        `share`: how many more steps the choice takes.
        """
        steps = self.total * (1 + share)
        if choice.warmup is None or math.isinf(steps):
            return choice.step * (1 + share)
        most, seconds = choice.warmup
        first = min(most, steps)
        return (first * seconds + (steps - first) * choice.step) / self.total


@dataclass(frozen=True)
class Advice:
    """What to train with.

    `choices` as `rank` returns them. `lossless` is the best of the lossless schemes,
    the plainest of equals; `dense` the better of that and of the rounded ones;
    `recommended` is `dense` or a lossy one; `fastest` is the fastest of all, whatever
    it loses. `rules` say what speaks against compression (empty: nothing does).
    """

    choices: Sequence[Choice]
    lossless: Choice
    dense: Choice
    recommended: Choice
    fastest: Choice
    rules: Sequence[Rule]
    weighing: Weighing
    instead: Choice | None = None  # of `recommended`, where the optimizer is another

    def break_even(self, choice: Choice) -> float:
        """How many more steps than `dense` the choice may need before it loses.

        A share: 0.2 is 20 % more. Negative where its steps alone take longer.
        """
        return self.dense.step / choice.step - 1

    def cost(self, choice: Choice) -> Cost:
        """How many more steps it may need to the same loss."""
        return self.weighing.cost(choice)

    def sooner(self, choice: Choice) -> tuple[float, float, float]:
        """How many times as soon as `dense` it is at the same loss.

        Typically, at the worst, and at the best, of what is known of its steps.
        """
        cost, base = self.cost(choice), self.dense.step
        shares = cost.typical, cost.most, cost.least
        typical, worst, best = (self.weighing.mean(choice, x) for x in shares)
        return base / typical, base / worst, base / best

    @property
    def verdict(self) -> str:
        """One sentence: what to use, and why nothing else."""
        best = self.recommended
        words = f"use {best.name}: {ms(best.step)} a step"
        if best.kind == "lossy":
            needed = needing(self.break_even(best), self.dense.name)
            worth = f"worth it if it needs {needed} ({ms(self.dense.step)} a step)"
            if self.weighing.margin is not None:
                return f"{words}, {worth}"
            return (
                f"use {best.name}: {self._gain(best)}; {ms(best.step)} a step, {worth}"
            )
        if best.kind == "rounded":
            gain = percent(self.lossless.step / best.step - 1)
            words += f", {gain} faster than {self.lossless.name}, which is exact"
        against = [rule.words for rule in self.rules if rule.name != "two ranks"]
        return f"{words}. Don't compress: {'; '.join(against)}" if against else words

    def _gain(self, choice: Choice) -> str:
        typical, worst, best = (f"{x:.2g}" for x in self.sooner(choice))
        return (
            f"about {typical} times as soon at the same loss as {self.dense.name} "
            f"({worst} to {best})"
        )

    @property
    def needs(self) -> list[str]:
        """What the recommended one asks for, and what suits another optimizer."""
        name, other = self.recommended.name, self.instead
        told = [f"needs {row.needs}" for row in RECOMMENDED if row.recipe == name]
        if other is not None:
            told.append(f"with SGD use {other.name}: {ms(other.step)} a step")
        return told if self.recommended.kind == "lossy" else []

    def reasons(self, choice: Choice) -> list[str]:
        """Why a step of the choice takes as long as it does, and what it is worth."""
        if choice.refused:
            return [choice.refused]
        told = choice.prediction
        words = [_waits(told)] if _hidden(choice) else [_waits(told), _distance(told)]
        if choice.warmup is not None:
            steps, mean = choice.warmup
            words.append(f"its {steps} steps of warm-up take {ms(mean)} each")
        return words + (self._price(choice) if choice.kind == "lossy" else [])

    def _price(self, choice: Choice) -> list[str]:
        """What selection costs and saves, and how many more steps that is worth."""
        told, dense, name = choice.prediction, self.dense.prediction, self.dense.name
        saved = dense.exposed - told.exposed
        paid = (told.step - told.exposed) - (dense.step - dense.exposed)
        gain = self.break_even(choice)
        share = told.sent_bytes / self.lossless.prediction.sent_bytes
        words = [f"sends {percent(share)} of what {self.lossless.name} sends"]
        if self.weighing.margin is None:
            words.append(f"steps to the same loss: {self.cost(choice).words}")
        if saved <= 0:
            words.append(f"exposes no less than {name}")
        elif paid > CLOSE * saved:
            words.append(f"selection and scatter take {ms(paid)} to save {ms(saved)}")
        if gain > 0:
            words.append(f"worth it only if it needs less than {more(gain)}")
        else:
            slower = percent(choice.step / self.dense.step - 1)
            words.append(f"a step takes {slower} longer than {name}'s")
        return words


def advise(
    choices: Sequence[Choice],
    size: int,
    margin: float | None = None,
    steps: Steps = "any",
    total: float = STEPS,
    known: Mapping[str, Cost] | None = None,
) -> Advice:
    """What to train with among `size` ranks; `choices` as `rank` returns them.

    A lossy scheme has to be at the same loss sooner even with as many more steps as
    are known of it; with `margin` (a share), of each of its steps with so many more.
    `steps`: the kind of the optimizer; where that is not known it is taken for Adam,
    and what is for SGD is named beside. `total`: steps of a run that is exact; `known`:
    what a race has found of some schemes, by their names.
    """
    weighing = Weighing(margin, total if margin is None else math.inf, known or {})
    usable = [choice for choice in choices if not choice.refused]
    kinds = grouped(usable, lambda choice: choice.kind)
    lossless, rounded = (_plainest(kinds[kind]) for kind in ("lossless", "rounded"))
    rules = []
    if _hidden(lossless):
        rules.append(_overlap("overlap suffices", lossless))
    elif _hidden(rounded):
        rules.append(_overlap("bf16 suffices", rounded))
    hidden = bool(rules)
    if size == 2:
        words = "between 2 ranks a dense exchange sends each gradient only once"
        rules.append(Rule("two ranks", words, {"ranks": 2}))
    worth = lossless.step > (1 + NEARLY) * rounded.step
    recommended = dense = rounded if worth and not _hidden(lossless) else lossless
    lossy, instead = kinds.get("lossy", []), None
    if own := _made_for("adam" if steps == "any" else steps, lossy):
        found = _down(dense, own, weighing)
        # Whatever lies below the margin is for these rules to explain, too.
        if found is dense:
            rules.append(_margin(_plainest(own), dense, weighing))
        elif not hidden or weighing.cost(found).most < 0:
            # Fewer steps pay even where nothing is waited for.
            recommended, rules = found, [r for r in rules if r.name == "two ranks"]
            other = _down(dense, _made_for("sgd", lossy), weighing)
            instead = None if other is found or steps != "any" else other
    told = (usable[0], rules, weighing, instead)
    return Advice(choices, lossless, dense, recommended, *told)


_PLACES = {name: i for i, name in enumerate(DENSE)}
_PLACES |= {row.recipe: i for i, row in enumerate(RECOMMENDED, len(DENSE))}


def _place(choice: Choice) -> int:
    """On the ladder; of dense schemes, the plainest first."""
    return _PLACES.get(choice.name, len(_PLACES))


def _made_for(steps: Steps, choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in choices if made_for(choice.name) in ("any", steps)]


def _down(dense: Choice, lossy: Sequence[Choice], weighing: Weighing) -> Choice:
    """How far down the ladder it is worth to go."""
    found = dense
    for choice in sorted(lossy, key=lambda c: (_place(c), c.step)):
        before = weighing.mean(found, weighing.cost(found).typical)
        if weighing.mean(choice, weighing.cost(choice).most) <= before:
            found = choice
    return found


def _plainest(choices: Sequence[Choice]) -> Choice:
    """The fastest of a kind, but of about equals the one that is listed first."""
    best = min(choice.step for choice in choices)
    return min((c for c in choices if c.step <= SAME * best), key=_place)


# - Rules (when compression does not help) ---------------------------------------------


def _hidden(choice: Choice) -> bool:
    return choice.prediction.exposed <= HIDDEN * choice.step


def _overlap(name: str, choice: Choice) -> Rule:
    told = choice.prediction
    most = told.step / (told.step - told.exposed) - 1
    return Rule(
        name,
        f"{choice.name} {_waits(told)}: no scheme can gain more than {percent(most)}",
        {
            "exchange_seconds": told.exchange,
            "exposed_seconds": told.exposed,
            "exposed_share": told.exposed / told.step,
            "threshold": HIDDEN,
            "most_gain": most,
        },
    )


def _margin(lossy: Choice, dense: Choice, weighing: Weighing) -> Rule:
    gain, cost = dense.step / lossy.step - 1, weighing.cost(lossy)
    if gain <= 0:
        taken = f"{lossy.name} takes {ms(lossy.step)} a step"
        words = f"no lossy scheme is clearly faster: {taken}"
    else:
        words = (
            f"the fastest lossy scheme, {lossy.name}, loses to {dense.name} if it "
            f"needs {more(gain)}, and "
        )
        if weighing.margin is not None:
            words += f"has to be worth {percent(weighing.margin)} more"
        else:
            words += f"may need {percent(cost.most)} more"
            if lossy.warmup is not None:
                words += f", its warm-up of {lossy.warmup[0]} steps aside"
    return Rule(
        "no margin", words, {"break_even": gain, "margin": min(cost.most, MOST)}
    )


# - Words ------------------------------------------------------------------------------


def _waits(told: Prediction) -> str:
    """What of the exchange is exposed, and what of it is hidden.

    What a step waits for is more than its exchange where ranks wait for processors.
    """
    words = f"waits {ms(told.exposed)}, {percent(told.exposed / told.step)} of the step"
    hidden = told.exchange - told.exposed
    return f"{words}, with {ms(hidden)} of exchange hidden" if hidden > 0 else words


def _distance(told: Prediction) -> str:
    """What makes the step longer than its limit."""
    gap = told.step - told.limit
    if gap <= CLOSE * told.limit:
        return f"{percent(gap / told.limit)} above its limit: only fewer bytes help"
    parts = {"updating": told.apply, "selecting": told.select}
    parts["waiting for processors that ranks share"] = told.crowded
    parts["start-ups and what nothing hides"] = gap - sum(parts.values())
    named = [f"{ms(t)} of {name}" for name, t in parts.items() if t > CLOSE * gap]
    return f"{ms(gap)} above its limit: {', '.join(named)}"


def ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def needing(share: float, than: str) -> str:
    """How many steps pay where steps take as long as that many more of another's."""
    if share < 0:
        return f"at least {percent(-share)} fewer steps than {than}"
    return f"less than {more(share, than)}"


def more(share: float, than: str = "") -> str:
    """A share of more steps, `than` another scheme's."""
    if share < 2:
        return f"{percent(share)} more steps" + (f" than {than}" if than else "")
    return f"{1 + share:.2g} times the steps" + (f" of {than}" if than else "")


def percent(share: float) -> str:
    """Per cent, to two digits."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10 else f"{value:.2g} %"
