"""`auto` begins as wfbp, decides once, and changes nothing that it need not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtide
from gradtide.collectives import Warmup
from gradtide.planner.auto import decision, drift, selector
from gradtide.planner.auto.decision import Present, Seen
from gradtide.planner.auto.inspector import LoopInspector
from gradtide.planner.network import Network
from gradtide.planner.search import DENSE, Choice, in_order
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import Prediction
from gradtide.runtime import checkpoint
from gradtide.scheme import RECIPES, Auto, Scheme, parse
from tests.ranks import run_ranks
from tests.test_replica import data, plain

STEPS = 5  # until it decides
AUTO = f"auto(steps={STEPS})"
SMALL = "fusion=BySize(0.004, 0.001, 1)"
Plan = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks measure no network."""
    ideal = Network.ideal(2, 1, 1e9)
    monkeypatch.setattr(decision, "measure", lambda transport, budget, device: ideal)


def decide_for(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    text = repr(parse(scheme))
    monkeypatch.setattr(decision, "plan", lambda *_: (text, f"{scheme} is best"))


class Log(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("gradtide").addHandler(self)
        logging.getLogger("gradtide").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if "is replicated" not in record.getMessage():  # of every replica
            self.lines.append(f"{record.levelname} {record.getMessage()}")


def train(
    scheme: str,
    steps: int = 2 * STEPS,
    between: Callable[[gradtide.Replica], object] = lambda _: None,
    saved: Any = None,
) -> tuple[list[Tensor], gradtide.Replica, list[str]]:
    """Weights after some steps, the replica, and what was logged."""
    torch.manual_seed(7)
    log, model = Log(), plain()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = gradtide.replicate(model, opt, scheme)
    if saved is not None:
        sync.load_state_dict(saved)
    for step in range(steps):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        between(sync)
        opt.step()
        opt.zero_grad()
    sync.flush()
    return [p.detach().clone() for p in model.parameters()], sync, log.lines


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@pytest.mark.product
@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (2, "wfbp"),
        (4, "wfbp"),
        (3, "dear"),
        (2, f"Scheme(Dense(), {SMALL}, schedule=DEAR)"),
    ],
)
def test_the_same_numbers_as_wfbp(
    size: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_for(monkeypatch, chosen)

    def work() -> list[str]:
        expected, _, _ = train("wfbp")
        got, sync, lines = train(AUTO)
        assert same(got, expected)
        assert sync.scheme == parse(chosen)
        return lines

    first, *others = run_ranks(size, work)
    assert [line for line in first if "best" in line] == [
        f"INFO auto: {chosen} is best"
    ]
    assert not any(others)


def test_one_rank_has_nothing_to_decide() -> None:
    def work() -> list[str]:
        _, sync, lines = train(AUTO)
        assert sync.scheme == RECIPES["wfbp"]
        return lines

    assert "nobody to average with" in run_ranks(1, work)[0][0]


def raising(rank: int, name: str) -> Callable[..., Any]:
    """`decision.<name>`, which raises on one rank."""
    whole = getattr(decision, name)

    def work(*args: Any) -> Any:
        if torch.distributed.get_rank() == rank:
            raise ZeroDivisionError("of all things")
        return whole(*args)

    return work


@pytest.mark.product
@pytest.mark.parametrize(
    ("rank", "name"), [(1, "measure"), (0, "measure"), (0, "plan"), (2, "Seen")]
)
def test_whatever_is_raised_on_a_rank_all_stay(
    rank: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_for(monkeypatch, "dear")
    where = selector if name == "Seen" else decision
    monkeypatch.setattr(where, name, raising(rank, name))

    def work() -> list[str]:
        expected, _, _ = train("wfbp")
        got, sync, lines = train(AUTO)
        assert same(got, expected)
        assert sync.scheme == RECIPES["wfbp"]
        return lines

    first, *others = run_ranks(3, work)
    assert len(first) == 1
    assert first[0].startswith("WARNING auto: stays with wfbp")
    assert f"rank {rank} raised ZeroDivisionError: of all things" in first[0]
    assert not any(others)


def test_what_cannot_be_adopted_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_for(monkeypatch, "Scheme(Dense(), Cuts((1, 2)))")

    def work() -> list[str]:
        _, sync, lines = train(AUTO)
        assert sync.scheme == RECIPES["wfbp"]
        return lines

    assert "plan for this model" in run_ranks(2, work)[0][0]


def test_lossy_schemes_are_adopted_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_for(monkeypatch, "topk(0.1)")
    lossy = f"auto(lossy=True, steps={STEPS})"

    def work() -> None:
        straight, _, _ = train(lossy)
        _, sync, _ = train(lossy, STEPS + 2)
        state = sync.state_dict()
        assert sync.scheme == parse("topk(0.1)")
        _, again, lines = train(lossy, 0, saved=state)
        assert again.scheme == sync.scheme
        assert again.state_dict().keys() == state.keys()
        for name, left in sync.state_dict()[key()]["remainders"].items():
            assert torch.equal(again.state_dict()[key()]["remainders"][name], left)
        assert len(lines) == (torch.distributed.get_rank() == 0)
        assert all("as it was saved" in line for line in lines)
        assert straight

    run_ranks(2, work)


def key() -> str:
    return f"rank{torch.distributed.get_rank()}"


def test_what_was_saved_undecided_is_decided_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide_for(monkeypatch, "dear")

    def work() -> None:
        _, sync, _ = train(AUTO, STEPS - 1)
        assert sync.scheme == parse(AUTO)
        _, again, _ = train(AUTO, STEPS, saved=sync.state_dict())
        assert again.scheme == RECIPES["dear"]
        monkeypatch.setattr(checkpoint, "_compare", lambda *_: None)  # it was of 2
        other = {**again.state_dict(), "world_size": 1}
        other["rank0"] = other[key()]
        _, fresh, _ = train(AUTO, 0, saved=other)
        assert fresh.scheme == parse(AUTO)  # for another number of ranks

    run_ranks(2, work)


def test_a_user_may_decide_first(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_for(monkeypatch, "dear")

    def work() -> list[str]:
        torch.manual_seed(7)
        model, log = plain(), Log()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradtide.replicate(model, opt, AUTO)
        sync.adopt("wfbp(wire='bf16')")
        for step in range(STEPS + 1):
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        assert sync.scheme == parse("wfbp(wire='bf16')")
        with pytest.raises(ValueError, match="decided scheme"):
            sync.adopt("auto")
        return log.lines

    assert run_ranks(2, work) == [[], []]


def hooks(sync: gradtide.Replica) -> list[int]:
    model, opt = sync.model, sync.optimizer
    return [
        len(opt._optimizer_step_pre_hooks),
        len(opt._optimizer_step_post_hooks),
        *(len(m._forward_pre_hooks) for m in model.modules()),
        *(len(m._forward_hooks) for m in model.modules()),
        *(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
    ]


def test_no_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_for(monkeypatch, "wfbp")

    def work() -> None:
        _, plain_sync, _ = train("wfbp")
        _, sync, _ = train(AUTO)
        assert hooks(sync) == hooks(plain_sync)
        _, early, _ = train(AUTO, 2)
        early.remove()
        assert set(hooks(early)) == {0}

    run_ranks(2, work)


# - What a training loop allows --------------------------------------------------------


def scale(sync: gradtide.Replica) -> None:
    nn.utils.clip_grad_norm_(sync.model.parameters(), 0.1)


def clip(sync: gradtide.Replica) -> None:
    sync.clip_grad_norm_(0.1)


def swap(sync: gradtide.Replica) -> None:
    for p in sync.model.parameters():
        p.grad = None if p.grad is None else p.grad * 2


def cut(sync: gradtide.Replica) -> None:
    nn.utils.clip_grad_value_(sync.model.parameters(), 1e-3)


def drop(sync: gradtide.Replica) -> None:
    next(sync.model.parameters()).grad = None


@pytest.mark.product
@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda _: None, ""),
        (clip, ""),
        (scale, ""),
        (drop, ""),
        (swap, "edited between"),
        (cut, "edited between"),
    ],
)
def test_deferred_updates_bear_that_gradients_are_scaled_alone(
    between: Callable[[gradtide.Replica], object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Sequence[Seen]] = []

    def plan(auto: Auto, seen: Sequence[Seen], *_: object) -> tuple[str, str]:
        heard.append(seen)
        return "wfbp", "because"

    monkeypatch.setattr(decision, "plan", plan)

    def work() -> list[str]:
        train(AUTO, between=between)
        return [seen.obstacle for seen in heard[0]] if heard else []

    obstacles = run_ranks(2, work)[0]
    assert len(obstacles) == 2
    assert all(
        words in obstacle and bool(words) == bool(obstacle) for obstacle in obstacles
    )


def test_a_closure_is_no_obstacle() -> None:
    model = plain()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector = LoopInspector(model, opt)
    opt.step(lambda: torch.zeros(()))
    assert not inspector.obstacle
    opt.step()
    assert "without a backward" in inspector.obstacle


# - The plan ---------------------------------------------------------------------------


def trace(name: str, seconds: float) -> StepTrace:
    return StepTrace(name, (Unit("w", 1000, 4, seconds, seconds, 0.0),), 0.0)


def predicted(step: float) -> Prediction:
    return Prediction(
        step=step,
        forward=step / 4,
        backward=step / 4,
        select=0.0,
        exchange=step,
        apply=0.0,
        exposed=step / 2,
        sent_bytes=1e6,
        limit=step,
        buckets=1,
    )


def ranked(steps: dict[str, float]) -> Callable[..., list[Choice]]:
    """As `rank`, with these seconds of a step; half of each exposed."""

    def rank(
        trace: StepTrace,
        network: Network,
        schemes: dict[str, Scheme],
        *,
        refuse: Callable[[Scheme], str],
    ) -> list[Choice]:
        assert trace.name == "slow"
        choices = []
        for name in DENSE.keys() | schemes:
            step = steps.get(name, 1.0)
            scheme = parse(name)
            choices.append(Choice(name, scheme, predicted(step), refuse(scheme)))
        return in_order(choices)

    return rank


SLOW = replace(trace("slow", 0.2), steps="sgd")
SEEN = (Seen(trace("fast", 0.1), ""), Seen(SLOW, ""))
ADAM = (SEEN[0], Seen(replace(SLOW, steps="adam"), ""))
UNTRIED = (replace(ADAM[0], alone="it cannot be tried out"), ADAM[1])
SPARSE = "exdyna(0.01, warmup=160)"
STEPWISE = "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')"
TIMES = {"dear": 0.8, "wfbp(wire='bf16')": 0.75, SPARSE: 0.25, STEPWISE: 0.3}


@pytest.mark.parametrize(
    ("auto", "seen", "expected"),
    [
        (Auto(), SEEN, "wfbp(wire='bf16')"),
        (Auto(lossy=True), SEEN, SPARSE),
        (Auto(lossy=True), ADAM, STEPWISE),
        (Auto(lossy=True), UNTRIED, "wfbp(wire='bf16')"),
        (Auto(lossy=True, margin=3.0), SEEN, "wfbp(wire='bf16')"),
    ],
)
def test_what_is_chosen(
    auto: Auto, seen: Sequence[Seen], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "rank", ranked(TIMES))
    text, words = decision.plan(auto, seen, Network.ideal(4, 2, 1e9))
    assert parse(text) == parse(expected)
    assert words.startswith(f"{expected}, ")
    assert "4 hosts x 2 ranks" in words


def test_the_log_names_what_would_win_and_its_break_even(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "rank", ranked(TIMES))
    _, words = decision.plan(Auto(), SEEN, Network.ideal(4, 2, 1e9))
    assert f"{SPARSE} would take 250 ms" in words
    assert "less than 3 times the steps" in words
    assert "auto(lossy=True)" in words
    assert "\n" not in words
    _, words = decision.plan(Auto(), ADAM, Network.ideal(4, 2, 1e9))
    assert f"{STEPWISE} would take 300 ms" in words


@pytest.mark.parametrize(
    ("present", "times", "expected"),
    [
        # Nothing has changed, or hardly anything: it stays.
        ("dear", TIMES, "wfbp(wire='bf16')"),
        ("wfbp", {"wfbp": 0.52, "dear": 0.5}, "wfbp"),
        ("dear(wire='bf16')", {"wfbp": 0.52, "dear": 0.5}, "dear"),
        (STEPWISE, TIMES, STEPWISE),
        # Nobody comes back from steps.
        (STEPWISE, {"wfbp": 0.1}, STEPWISE),
    ],
)
def test_what_is_chosen_in_training_follows_what_is_there(
    present: str,
    times: dict[str, float],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "rank", ranked(times))
    told = {parse(name): step for name, step in times.items()}
    monkeypatch.setattr(
        decision, "simulate", lambda _, own, __: predicted(told.get(own, 1.0))
    )
    auto = Auto(lossy=present == STEPWISE)
    now = Present(parse(present), 1000, chosen=True)
    text, words = decision.plan(auto, ADAM, Network.ideal(4, 2, 1e9), now)
    assert parse(text) == parse(expected)
    assert words.startswith("stays") == (present == expected)
    assert ("state of its own" in words) == ("wfbp" in times and present == STEPWISE)


def test_no_warm_up_follows_as_many_exact_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "rank", ranked(TIMES))
    for steps, expected in ((59, STEPWISE), (60, STEPWISE.replace("60", "0"))):
        now = Present(parse("wfbp"), steps, chosen=True)
        text, _ = decision.plan(Auto(lossy=True), ADAM, Network.ideal(4, 2, 1e9), now)
        assert parse(text) == parse(expected)


def test_an_obstacle_to_deferred_updates_is_none_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "rank", ranked({"dear": 0.2, "wfbp": 0.5}))
    network = Network.ideal(4, 2, 1e9)
    assert parse(decision.plan(Auto(), SEEN, network)[0]) == parse("dear")
    seen = (replace(SEEN[0], obstacle="no"), SEEN[1])
    assert parse(decision.plan(Auto(), seen, network)[0]) == parse("wfbp")


def test_lossy_schemes_are_warmed_up_if_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "rank", ranked(TIMES))
    auto = Auto(lossy=True, warmup=400)
    text, _ = decision.plan(auto, SEEN, Network.ideal(4, 2, 1e9))
    chosen = parse(text)
    assert isinstance(chosen.collective, Warmup)
    assert chosen == parse("exdyna(0.01, warmup=400)")
    both = replace(auto, momentum_correction=True)
    # With it Adam bears what is for SGD otherwise.
    for seen in (SEEN, ADAM):
        text, _ = decision.plan(both, seen, Network.ideal(4, 2, 1e9))
        asked = parse("exdyna(0.01, warmup=400, momentum_correction=True)")
        assert parse(text) == asked


# - Its name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "auto"),
    [
        ("auto", Auto()),
        ("auto(lossy=True)", Auto(lossy=True)),
        ("auto(lossy=True, warmup=160)", Auto(lossy=True, warmup=160)),
        (
            "auto(lossy=True, momentum_correction=True)",
            Auto(lossy=True, momentum_correction=True),
        ),
        ("auto(deferred=False, steps=30)", Auto(deferred=False, steps=30)),
    ],
)
def test_it_is_a_scheme_like_others(text: str, auto: Auto) -> None:
    scheme = parse(text)
    assert scheme == Scheme(auto)
    assert parse(repr(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auto(steps=1)", "at least 4 steps"),
        ("auto(warmup=100)", "lossy=True"),
        ("auto(momentum_correction=True)", "lossy=True"),
        ("auto(margin=-1)", "0 or more"),
        ("auto(colour=1)", "colour"),
        ("Warmup(Auto(), 10)", "cannot be wrapped"),
        ("Scheme(Auto(), schedule=DEAR)", "decides on the schedule"),
        ("Scheme(Auto(), preconditioner=KFAC())", "K-FAC"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


# - Later on ---------------------------------------------------------------------------


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("wfbp", "dear"),
        ("dear", "wfbp(wire='bf16')"),
        ("wfbp", "topka2a(0.1, schedule='local', wire='e3m0')"),
        ("topka2a(0.1, schedule='local')", "oktopk(0.1, schedule='local')"),
        ("wfbp", "Scheme(Dense(), schedule=Schedule('step', every=3))"),
    ],
)
def test_all_decide_anew_after_the_same_step(
    first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone finds its steps slow: by a clock of its own."""
    monkeypatch.setattr(drift, "STEPS", 4)
    slow = 2 * STEPS + 6

    def work() -> tuple[list[int], list[str]]:
        rank, plans = torch.distributed.get_rank(), iter((first, then, then))
        told = lambda *_: (repr(parse(name := next(plans))), f"{name} is best")  # noqa: E731
        monkeypatch.setattr(decision, "plan", told)
        log, now = Log(), [0.0]
        monkeypatch.setattr(selector.time, "perf_counter", lambda: now[0])
        torch.manual_seed(7)
        model = plain()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, f"auto(steps={STEPS})")
        changed, known = [], sync.scheme
        for step in range(slow + 24):
            now[0] += 9.0 if rank == 1 and step >= slow else 1.0
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if sync.scheme is not known:
                known = sync.scheme
                changed.append(step)
        sync.end_round()
        sync.flush()
        assert sync.scheme == parse(then)
        sync.remove()
        return changed, log.lines

    (changed, lines), *others = run_ranks(3, work)
    assert [steps for steps, _ in others] == [changed] * 2
    assert len(changed) == 2
    assert changed[0] == STEPS - 1
    assert slow < changed[1] < slow + 10
    assert [line.split(": ")[1] for line in lines] == [
        f"{n} is best" for n in (first, then)
    ]


@pytest.mark.parametrize("more", [0, 8])
def test_it_decides_behind_join(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank may run out of batches, it cannot measure with the others."""
    monkeypatch.setattr(drift, "STEPS", 4)

    def work() -> tuple[str, str, list[Any]]:
        plans, now = iter(("wfbp", "dear")), [0.0]
        told = lambda *_: (repr(parse(name := next(plans))), f"{name} is best")  # noqa: E731
        monkeypatch.setattr(decision, "plan", told)
        monkeypatch.setattr(selector.time, "perf_counter", lambda: now[0])
        torch.manual_seed(7)
        model = plain()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, AUTO)

        def run(*steps: int) -> None:
            for step in range(*steps):
                now[0] += 1.0 if step < 2 * STEPS + 6 else 9.0
                x, y = data(step)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()

        run(3 * STEPS)
        with sync.join():
            run(3 * STEPS, 40 + more * torch.distributed.get_rank())
        inside = repr(sync.scheme)
        run(50, 60)
        sync.flush()
        found = [p.tolist() for p in model.parameters()]
        scheme = repr(sync.scheme)
        sync.remove()
        return inside, scheme, found

    for inside, scheme, found in (ranks := run_ranks(2, work)):
        assert (inside, scheme) == (repr(parse("wfbp")), repr(parse("dear")))
        assert found == ranks[0][2]


def test_who_adopts_another_scheme_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "STEPS", 4)
    decide_for(monkeypatch, "dear")

    def work() -> list[str]:
        log, now = Log(), [0.0]
        monkeypatch.setattr(selector.time, "perf_counter", lambda: now[0])
        model = plain()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = gradtide.replicate(model, opt, f"auto(steps={STEPS})")
        for step in range(60):
            now[0] += 1.0 if step < 30 else 9.0
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if step == 20:
                sync.adopt("wfbp")
        assert sync.scheme == RECIPES["wfbp"]
        sync.remove()
        return log.lines

    assert len(run_ranks(2, work)[0]) == 1
