"""A user's model in a few words, and what would be gained with it by which scheme."""

from __future__ import annotations

import math
import re

from gradtide.planner import advice, search
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace, Unit

MILLION = 4e6  # bytes of a million parameters' gradients
NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)"
PARAMETERS = re.compile(NUMBER + r"([kmb]?)", re.IGNORECASE | re.ASCII)
STEP = re.compile(NUMBER + r"(ms|s)", re.ASCII)
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
EXAMPLE = "write it as params=25M,step=300ms"
TENSORS = 50  # alike, which is near enough for advice
FORWARD = 1 / 3  # of a step
LARGEST, LONGEST = 1e12, 86400.0  # parameters, and seconds of a step


def parse_model(text: str) -> StepTrace:
    """The step that `params=25M,step=300ms` stands for, in float32.

    Raises ValueError for a text that says anything else.
    """
    given = dict(word.strip().partition("=")[::2] for word in text.split(","))
    if set(given) != {"params", "step"}:
        raise ValueError(f"--model {text!r}: {EXAMPLE}")
    params = PARAMETERS.fullmatch(given["params"])
    step = STEP.fullmatch(given["step"])
    if params is None or step is None:
        wrong, kind = ("params", "number") if params is None else ("step", "time")
        raise ValueError(f"--model: {wrong}={given[wrong]!r} is no {kind}: {EXAMPLE}")
    numel = float(params[1]) * FACTORS[params[2].lower()]
    seconds = float(step[1]) * (1e-3 if step[2] == "ms" else 1.0)
    if not TENSORS <= numel <= LARGEST or not 0 < seconds <= LONGEST:
        raise ValueError(
            f"--model {text!r}: a model of {TENSORS} to 1e12 parameters, and a step "
            "of a day at most"
        )
    each, time = math.ceil(numel / TENSORS), seconds / TENSORS
    units = tuple(
        Unit(f"tensor{i}", each, 4, FORWARD * time, (1 - FORWARD) * time, 0.0)
        for i in range(TENSORS)
    )
    return StepTrace(f"a model of {text}", units, optimizer=0.0, replayed=True)


def gain(trace: StepTrace, network: Network) -> tuple[str, dict[str, float]]:
    """The planner's verdict for a step on a network, beside the plainest scheme.

    In one sentence what to train with, and why; and seconds of a step of each scheme.
    """
    found = advice.advise(search.rank(trace, network), network.size)
    steps = {c.name: c.step for c in found.choices if not c.refused}
    plain, best = steps["wfbp"], found.recommended
    words = f"for {trace.name}: {'; '.join([found.verdict, *found.needs])}"
    if best.name != "wfbp":
        words += f"; wfbp, which exchanges as DDP does, takes {advice.ms(plain)}"
        words += f" ({plain / best.step:.2f} times as long)"
    return words, steps


def rule(network: Network) -> str:
    """What can be said without a model: what a million parameters take."""
    ring, size = network.inter.ring, network.hosts
    seconds = 2 * ring.beta * MILLION * (size - 1) / size if size > 1 else 0.0
    if not seconds:
        return "say which model, for advice: --model params=25M,step=300ms"
    return (
        f"averaging a million parameters takes {advice.ms(seconds)} here, dense and in "
        "float32: if yours take less than the backward, DDP hides them; if not, say "
        "--model params=25M,step=300ms to see what is gained by which scheme"
    )
