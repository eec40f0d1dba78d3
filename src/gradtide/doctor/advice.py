"""What would be gained by which scheme here: one line, by the planner."""

from __future__ import annotations

from dataclasses import dataclass

from gradtide.planner import advice, search
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace
from gradtide.planner.training import with_optimizer
from gradtide.scheme import parse

# Of the sparse recipes those that the README recommends, at one choice of each.
SPARSE = (
    "topka2a(0.02, schedule='local', wire='bf16')",
    "exdyna(0.01, schedule='local')",
)
MILLION = 4e6  # bytes of a million parameters' gradients


@dataclass(frozen=True)
class Gain:
    """What to train with, and in one sentence why; seconds of a step of each."""

    words: str
    recommended: str
    steps: dict[str, float]


def gain(trace: StepTrace, network: Network) -> Gain:
    """The planner's verdict for a step on a network, beside the plainest scheme."""
    step = with_optimizer(trace, network.device)
    asked = {text: parse(text) for text in SPARSE}
    found = advice.advise(search.rank(step, network, asked, tune=False), network.size)
    steps = {c.name: c.step for c in found.choices if not c.refused}
    plain, best = steps["wfbp"], found.recommended
    words = f"for {trace.name}: {found.verdict}"
    if best.name != "wfbp":
        times = plain / best.step
        words += f"; wfbp, which exchanges as DDP does, takes {advice.ms(plain)}"
        words += f" ({times:.2f} times as long)"
    return Gain(words, best.name, steps)


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
