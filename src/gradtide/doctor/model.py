"""A user's model in a few words: how many parameters, and how long a step computes."""

from __future__ import annotations

import math
import re

from gradtide.planner.trace import StepTrace, Unit

NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)"
PARAMETERS = re.compile(NUMBER + r"([kmb]?)", re.IGNORECASE)
STEP = re.compile(NUMBER + r"(ms|s)")
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
        wrong = "params" if params is None else "step"
        raise ValueError(f"--model: {wrong}={given[wrong]!r} is no number: {EXAMPLE}")
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
