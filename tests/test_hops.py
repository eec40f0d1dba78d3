"""How many messages wait for each other: of each collective, and of a training step.

Numbers are exact, so whoever makes one larger has to say so here, or in the table of
docs/benchmarks.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtide
from gradtide.collectives import Dense
from gradtide.collectives.levels import TwoLevel
from gradtide.core.engine import Engine
from gradtide.core.ops import AllReduce, Flow, Group, Mean
from gradtide.core.payload import Collective, Payload
from gradtide.planner.clock.cost import hops
from gradtide.scheme.recipes import SPARSE
from gradtide.scheme.recommended import RECOMMENDED
from gradtide.testing import lockstep
from gradtide.transport import connect
from gradtide.wire import WIRES
from tests.hops import Clock, Stepped
from tests.ranks import run_ranks
from tests.transport.test_distance import be_far

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
SIZE = 4

# - Collectives ------------------------------------------------------------------------

ROW = 64  # elements in a row of a bucket's matrix
# Among four ranks, in steps that follow others. All-reduces are small here: those of
# more than 16 KB are Gloo's, and take six.
EXPECTED = {
    "topk": 2,
    "gtopk": 2,
    "topka2a": 2,
    "topkdsa": 3,
    "oktopk": 4,
    "micro": 3,
    "exdyna": 3,
    "deft": 3,
    "cltk": 2,
    "tiledtopk": 1,
    "arctopk": 3,
    "covap": 2,
    "demo": 1,
    "powersgd": 3,
    "acpsgd": 2,
}


def counted(flow: Flow, group: Group, seen: list[int]) -> Flow:
    """The flow, and the hops of each request."""
    answer: Any = None
    while True:
        try:
            asked = flow.send(answer)
        except StopIteration as stop:
            result: Tensor = stop.value
            return result
        several = asked if isinstance(asked, tuple) else (asked,)
        seen.append(max(hops(op, group) for op in several))
        answer = yield asked


def hops_of(collective: Collective, size: int, steps: int = 3) -> list[int]:
    """Hops of each step: of every request those of the rank that has most."""
    rng = torch.Generator().manual_seed(size)
    flats = [torch.zeros(128 * ROW * size) for _ in range(size)]
    loads = [Payload(flat, [flat.view(-1, ROW)]) for flat in flats]
    groups, found = [Group(rank, size) for rank in range(size)], []
    for _ in range(steps):
        for flat in flats:
            flat += torch.randn(len(flat), generator=rng).pow(3)
        seen: list[list[int]] = [[] for _ in groups]
        flows = list(map(collective.reduce, loads, groups))
        means = lockstep(list(map(counted, flows, groups, seen)))
        for flat, mean in zip(flats, means, strict=True):
            if flat.data_ptr() == mean.data_ptr():
                flat.zero_()
        found.append(sum(map(max, zip(*seen, strict=True))))
    return found


@pytest.mark.parametrize("name", SPARSE)
def test_hops_of_a_collective(name: str) -> None:
    *_, last = hops_of(SPARSE[name](), SIZE)
    assert last == EXPECTED[name]


@pytest.mark.parametrize("wire", [None, *WIRES])
def test_hops_of_dense_exchanges(wire: Any) -> None:
    assert hops_of(Dense(wire), SIZE) == [2, 2, 2]


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_lengths_that_depend_on_numbers_take_no_hop(wire: Any) -> None:
    assert hops_of(Dense(wire, lossless=True), SIZE) == [2, 2, 2]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["topka2a", "oktopk", "exdyna"])
def test_no_wire_takes_a_hop_more(name: str, wire: Any) -> None:
    collective: Any = SPARSE[name]()
    assert hops_of(replace(collective, wire=wire), SIZE)[-1] == EXPECTED[name]


@pytest.mark.parametrize("name", ["topka2a", "oktopk", "exdyna"])
def test_hosts_of_several_ranks_take_no_hop_more(name: str) -> None:
    levels = TwoLevel(SPARSE[name](), 2)
    assert hops_of(levels, 2 * SIZE)[-1] == EXPECTED[name]


# - The clock --------------------------------------------------------------------------


def clocked() -> list[Stepped]:
    engine = Engine(connect(None, torch.device("cpu")))
    clock = Clock(engine.transport)

    def flow(times: int) -> Flow:
        x = torch.ones(engine.group.size)
        for _ in range(times):
            yield Mean(x)
        return x

    def flag() -> None:
        engine.ask("finite", AllReduce(torch.ones(1)))()

    def launch(times: Sequence[int]) -> None:
        flights = [engine.launch(f"grad{i}", flow(n)) for i, n in enumerate(times)]
        for flight in flights:
            engine.finish(flight)

    def steps() -> Iterator[None]:
        yield launch([1, 3, 2])  # beside each other
        yield flag(), launch([1])  # one after the other
        told = engine.ask("finite", AllReduce(torch.ones(1)))
        yield launch([1]), told()  # beside
        held = engine.launch("grad0", flow(1), hold=True)
        yield engine.wait(held)
        engine.release(held)
        yield engine.finish(held)
        launched = engine.launch("grad0", flow(2))
        told = engine.ask("used", AllReduce(torch.ones(1)), settled=True)
        yield told(), engine.finish(launched)

    found = [clock.step() for _ in steps()]
    engine.transport.close()
    return found


def test_what_waits_is_added_up_and_what_travels_beside_is_not() -> None:
    for found in run_ranks(3, clocked):
        assert found == [
            Stepped(6, {}, ()),
            Stepped(3, {"finite": 1}, ()),
            Stepped(2, {}, ("finite",)),
            Stepped(1, {}, ()),
            Stepped(1, {}, ()),
            Stepped(5, {"used": 1}, ()),
        ]


# - Training ---------------------------------------------------------------------------

SHORT = {  # so that all happens in few steps
    r"warmup=\d+": "warmup=6",
    "factor_every=10, inverse_every=100": "factor_every=1, inverse_every=2",
}


class Case(NamedTuple):
    """A recipe, and what a training has besides."""

    recipe: str
    besides: str = ""


TOPKA2A = "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')"
CASES = [
    *(Case(row.recipe) for row in RECOMMENDED if row.recipe != "auto"),
    Case("dear", "clipping by norm"),
    *(Case(recipe, "buffers") for recipe in ("wfbp", "dear", TOPKA2A)),
    *(Case(recipe, "`join()`") for recipe in ("wfbp", TOPKA2A)),
]


def train(case: Case) -> list[Stepped]:
    torch.manual_seed(0)
    buffers = nn.BatchNorm1d(512) if case.besides == "buffers" else nn.Tanh()
    layers = nn.Linear(128, 512), buffers, nn.Linear(512, 512), nn.Tanh()
    model = nn.Sequential(*layers, nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    sgd = any(r.recipe == case.recipe and r.steps == "sgd" for r in RECOMMENDED)
    made = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer, text = made(model.parameters(), lr=1e-3), case.recipe
    for long, short in SHORT.items():
        text = re.sub(long, short, text)
    sync = gradtide.replicate(model, optimizer, text)
    clock, found = Clock(sync.engine.transport), []
    rng = torch.Generator().manual_seed(dist.get_rank())
    with sync.join() if case.besides == "`join()`" else nullcontext():
        for _ in range(10 if "warmup" in text else 6):
            model(torch.randn(8, 128, generator=rng)).square().mean().backward()
            if case.besides == "clipping by norm":
                sync.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(clock.step())
    sync.remove()
    return found


def all_trained() -> list[list[Stepped]]:
    be_far()
    return [train(case) for case in CASES]


def longest(steps: Sequence[Stepped]) -> Stepped:
    """The longest of some steps, and all that travels beside in any."""
    most = max(steps, key=lambda step: step.hops)
    beside = {name for step in steps for name in step.beside} - set(most.told)
    return replace(most, beside=tuple(sorted(beside)))


def markdown(found: Sequence[Sequence[Stepped]]) -> str:
    """The table as it stands in the docs; two steps find out orders."""
    lines = [
        "| recipe | besides | hops of a step | of these for a message of its own "
        "| beside these |",
        "|---|---|--:|---|---|",
    ]
    for case, steps in zip(CASES, found, strict=True):
        begun = "warmup" in case.recipe
        for when, some in {"in its warm-up": steps[2:4], "": steps[-4:]}.items():
            if when and (not begun or case.besides):
                continue
            step = longest(some)
            told = ", ".join(f"`{name}` {n}" for name, n in step.told.items())
            beside = ", ".join(f"`{name}`" for name in step.beside)
            besides = when or case.besides
            cells = f"`{case.recipe}`", besides, step.hops, told, beside
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_page_says_how_many_messages_wait_for_each_other_in_a_step() -> None:
    first, *others = run_ranks(SIZE, all_trained, limit=240.0)
    assert all(other == first for other in others)
    table = markdown(first)
    text = PAGE.read_text(encoding="utf-8")
    assert table in text, f"{PAGE.name} has to have this table:\n{table}"
