"""What goes wrong in a campaign, a row each, and what is drawn of a trial besides.

A fault happens in one rank when its own program reaches a point for a drawn time
(`campaign_rank`), so that a seed always hits the same moment of the program. Only rows
of a "random moment" leave that to the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Literal, TypeAlias

from gradtide.scheme import as_scheme

# What has to become of the ranks, other than of one that is killed or has left:
# all end with an error that says who and what; all refuse the state, and go on; all
# go on, with the bits of the run that nobody disturbs; or an error, or parameters that
# all ranks have in common.
End: TypeAlias = Literal["error", "refused", "same", "error or alike"]
# Schemes that a row is about; "": of all families.
Family: TypeAlias = Literal["", "dense", "dear", "sparse", "local", "rounds"]


@dataclass(frozen=True)
class Fault:
    """A row: what is done, at which point of a rank's program, and how that ends."""

    name: str
    act: str
    point: str
    end: End
    weight: float = 1.0
    family: Family = ""
    often: int = 6  # the point is met for a drawn time, below this
    tcp: bool = False  # the job's store is in rank 0, and no file


def _in_phases(
    does: str, act: str, end: End, weight: float, *phases: str
) -> list[Fault]:
    found = [PHASES[phase] for phase in phases]
    return [
        replace(phase, name=f"{does} {phase.name}", act=act, end=end, weight=weight)
        for phase in found
    ]


def _phase(point: str, name: str, often: int = 6, family: Family = "") -> Fault:
    return Fault(name, "", point, "error", often=often, family=family)


PHASES = {
    phase.point: phase
    for phase in (
        _phase("connect", "before the first exchange", 1),
        _phase("comparing", "while ranks compare what they train", 3),
        _phase("forward", "in a forward"),
        _phase("backward", "in a backward"),
        _phase("request", "before a request", 14),
        _phase("first half", "in a first half", 8),
        _phase("cut", "at a cut", 6, "dear"),
        _phase("second half", "in a second half", 6, "dear"),
        _phase("piece", "before a piece of a message", 40),
        _phase("step", "in a step of the optimizer"),
        _phase("between", "between backward and step"),
        _phase("saving", "while a state is made", 1),
        _phase("loading", "while a state is loaded", 1),
        _phase("end", "at the end, before remove()", 1),
        _phase("random", "at a random moment"),
    )
}
KILLED = _in_phases("SIGKILL", "kill", "error", 1.0, *PHASES)
STOPPED = _in_phases(
    "SIGSTOP past the timeout",
    "stop",
    "error",
    0.35,
    *("connect", "forward", "request", "first half", "cut", "step", "random"),
)
PAUSED = _in_phases(
    "SIGSTOP and SIGCONT",
    "pause",
    "same",
    0.7,
    *("connect", "comparing", "forward", "backward", "request", "first half", "cut"),
    *("second half", "piece", "step", "saving", "end", "random"),
)
RAISED = _in_phases(
    "an exception",
    "raise",
    "error",
    0.8,
    *("connect", "forward", "backward", "between", "step", "end"),
)
LEFT = [
    Fault(f"fewer batches, then {then}", f"leave: {then}", "loop", "error")
    for then in ("its end", "remove()", "a barrier")
]
SPOILT = [
    Fault(f"{name} {where}", f"spoil: {value}", point, "error or alike")
    for value, name in (("nan", "NaN"), ("inf", "infinity"), ("1e30", "1e30"))
    for point, where in (("backward", "in a gradient"), ("loop", "in a parameter"))
]
EDITED = [Fault("a parameter edited", "edit", "loop", "error or alike", 2.0)]
DIFFERENT = [
    Fault(f"another {what}", f"differ: {what}", "connect", "error", 0.8, often=1)
    for what in (
        "scheme",
        "shape",
        "frozen layer",
        "order",
        "missing layer",
        "dtype",
        "check_every",
        "buffers",
        "optimizer",
    )
]
DIFFERENT[-1] = replace(DIFFERENT[-1], end="error or alike")
DAMAGED = [
    Fault(f"a state that {what}", f"state: {what}", "restart", "refused", often=1)
    for what in (
        "has a changed bit in a tensor",
        "has a changed bit in a piece",
        "has a shorter piece",
        "lacks a piece",
        "is of another step",
        "is of another rank",
        "is of another number of ranks",
        "names another scheme",
        "is a text",
    )
]
SAVED = [
    Fault("a state that is whole", "state: whole", "restart", "same", 2.0, often=1),
    Fault("a full disk, which ends the program", "full disk", "file", "error", 1.0),
    Fault("a full disk, which it survives", "full disk, caught", "file", "same", 1.0),
    Fault(
        "a file that may not grow, which it survives",
        "short file, caught",
        "file",
        "same",
        tcp=True,
    ),
]
QUIET = [Fault("nothing", "nothing", "nowhere", "same", 1.0)]
# In the lab's networks: a row takes half a minute.
LINKS = [
    Fault("a link that is down", "link: down", "lab", "error", 0.03),
    Fault("a link that is down for 1.5 s", "link: down and up", "lab", "same", 0.03),
    Fault("a link at 1 %", "link: slow", "lab", "same", 0.03),
    Fault("1 % of packets lost", "link: loss", "lab", "same", 0.03),
]
FAULTS = {
    fault.name: fault
    for fault in (
        *KILLED,
        *STOPPED,
        *PAUSED,
        *RAISED,
        *LEFT,
        *SPOILT,
        *EDITED,
        *DIFFERENT,
        *DAMAGED,
        *SAVED,
        *QUIET,
        *LINKS,
    )
}


@dataclass(frozen=True)
class Trial:
    """All that a seed and a number stand for."""

    seed: int
    number: int
    fault: Fault
    ranks: int
    levels: int  # ranks of a host, which is a pretended one
    dead: int  # the rank to which it happens
    at: int  # the point is met for the time of this number
    step: int  # of the program, from 0 on
    scheme: str
    other: str  # another scheme
    optimizer: str
    model: int  # draws shapes and numbers
    buffers: str
    norm: bool  # a batch norm
    double: bool
    accumulate: int
    clip: str
    steps: int
    saves: int  # the step after which a state is saved
    check_every: int
    tcp: bool  # the store is in rank 0
    far: bool  # ranks exchange as those do that are far apart
    lets_go: bool  # of all that it has, after an error, before it ends
    pause: float  # seconds
    wait: float  # seconds, before a random moment


OPTIMIZERS = "sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop"
CLIPS = "", "torch's", "sync's"
WIRES = None, "bf16", "fp16", "int8", "e3m0", "2bit", "sign"
SPARSE = (
    *("topk", "oktopk", "topka2a", "gtopk", "deft", "micro", "exdyna", "topkdsa"),
    *("cltk", "tiledtopk"),
)
OTHERS = "powersgd", "acpsgd", "demo", "arctopk", "covap"  # which have no density
ROUNDS = (
    "diloco(every=3)",
    "local_sgd(every=2)",
    "diloco(every=2, delay=1)",
    "streaming_diloco(every=4, delay=1, fragments=2)",
    "sparseloco(every=3)",
    "oktopk(0.1, schedule='local', every=3)",
    "topka2a(0.1, schedule='local', every=2, wire='int8')",
)
FAMILIES: dict[Family, float] = {
    "dense": 2.0,
    "dear": 1.5,
    "sparse": 3.0,
    "local": 2.0,
    "rounds": 1.5,
}


def draw_scheme(draw: Random, family: Family, levels: int, optimizer: str) -> str:
    """A scheme's text, of which all parts go together."""
    chosen = family or draw.choices([*FAMILIES], [*FAMILIES.values()])[0]
    while True:
        text = _text(draw, chosen, levels, optimizer)
        try:
            as_scheme(text)
        except ValueError:  # parts that do not go together
            continue
        return text


def _text(draw: Random, family: Family, levels: int, optimizer: str) -> str:
    dense = family == "dense" or (family == "dear" and draw.random() < 0.5)
    schedule = {"local": "local", "dear": "dear"}.get(
        family, draw.choice(("wfbp", "dear", "sequential"))
    )
    options: dict[str, object] = {"levels": levels}
    wire = draw.choice(WIRES)
    if family == "rounds":
        name, _, rest = draw.choice(ROUNDS).rstrip(")").partition("(")
        inside = [rest]
    elif dense:
        name, inside = schedule, []
        options["wire"] = wire
    else:
        name = draw.choice((*SPARSE, *SPARSE, *OTHERS))
        inside = []
        options["schedule"] = schedule
        if name in SPARSE:
            options["density"] = draw.choice((0.02, 0.1, 0.3))
            options["warmup"] = draw.choice((0, 0, 4, 6))
            mine = "momentum" in optimizer or "nesterov" in optimizer
            if mine and schedule != "local" and draw.random() < 0.3:
                options["momentum_correction"] = True
        if name not in ("powersgd", "acpsgd"):
            options["wire"] = wire
    given = [f"{k}={v!r}" for k, v in options.items() if v not in (None, 0)]
    if draw.random() < 0.5:
        given.append("fusion=BySize(0.01, ends=0.01, pieces=1)")
    return f"{name}({', '.join([*inside, *given])})"


def draw_trial(seed: int, number: int, only: str = "") -> Trial:
    """The trial of a number; of the row `only`, if there is one."""
    draw = Random(f"{seed} {number}")
    rows = [FAULTS[only]] if only else [*FAULTS.values()]
    fault = draw.choices(rows, [row.weight for row in rows])[0]
    ranks = draw.choices((2, 3, 4, 5, 8), (30, 30, 25, 3, 2))[0]
    if fault.point == "lab":
        ranks = draw.choice((2, 3))
    locals_ = [n for n in (2, 4) if ranks % n == 0 and fault.point != "lab"]
    levels = draw.choice([1, *locals_])
    optimizer = draw.choice(OPTIMIZERS)
    scheme = draw_scheme(draw, fault.family, levels, optimizer)
    others = (draw_scheme(draw, "", levels, optimizer) for _ in count())
    steps = draw.randrange(6, 11)
    tcp = fault.tcp or draw.random() < 0.5
    dead = draw.randrange(ranks)
    spoils = fault.act.partition(":")[0] in ("spoil", "edit", "differ")
    return Trial(
        seed=seed,
        number=number,
        fault=fault,
        ranks=ranks,
        levels=levels,
        dead=dead,
        at=draw.randrange(fault.often),
        step=draw.randrange(1, steps - 2),
        scheme=scheme,
        other=next(o for o in others if as_scheme(o) != as_scheme(scheme)),
        optimizer=optimizer,
        model=draw.getrandbits(30),
        buffers=draw.choice(("broadcast", "local")),
        norm=draw.random() < 0.4,
        double=draw.random() < 0.2,
        accumulate=draw.choice((1, 1, 1, 2, 3)),
        clip=draw.choice(CLIPS),
        steps=steps,
        saves=draw.randrange(1, steps - 1),
        check_every=2 if spoils else draw.choice((1, 3, 100)),
        tcp=tcp,
        far=fault.point != "lab" and draw.random() < 0.25,
        lets_go=draw.random() < 0.5,
        pause=round(draw.uniform(0.2, 3.0), 2),
        wait=round(draw.uniform(0.0, 1.5), 3),
    )
