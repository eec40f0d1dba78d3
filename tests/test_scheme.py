"""A scheme's name is its constructor call."""

from __future__ import annotations

import re
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from gradtide.collectives import (
    Dense,
    MomentumCorrection,
    OkTopk,
    PowerSGD,
    TopK,
    TopKA2A,
    Warmup,
)
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload
from gradtide.core.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.fusion import BySize, PerTensor, Trace
from gradtide.kfac import KFAC
from gradtide.runtime.layout.placement import lay_out
from gradtide.scheme import RECIPES, Scheme, parse, recipe
from gradtide.scheme.table import Table
from gradtide.selectors import Exact


@pytest.mark.parametrize("name", RECIPES)
def test_names_and_reprs_parse_to_the_same(name: str) -> None:
    assert parse(name) == parse(repr(RECIPES[name])) == RECIPES[name]


def test_a_table_makes_what_is_asked_for_once() -> None:
    made: list[str] = []
    names = ("b", "a")
    table = Table({name: partial(made.append, name) for name in names})
    assert "a" in table
    assert "c" not in table
    assert (tuple(table), len(table), made) == (names, 2, [])
    assert [table["a"], table["a"], made] == [None, None, ["a"]]
    with pytest.raises(KeyError):
        table["c"]


def test_constructor_calls() -> None:
    assert parse("Dense('bf16')") == Scheme(Dense("bf16"))
    text = "Scheme(Dense(), fusion=PerTensor(), schedule=DEAR)"
    assert parse(text) == Scheme(Dense(), PerTensor(), DEAR)
    assert parse(
        "Scheme(gradtide.collectives.dense.Dense(wire='fp16'))"
    ).collective == (Dense("fp16"))


def test_recipes_take_other_hyper_parameters() -> None:
    assert parse("dear(wire='fp16')") == Scheme(Dense("fp16"), schedule=DEAR)
    assert parse("dear('fp16')") == parse("dear(wire='fp16')")
    mine = parse("topk(0.02, select=Exact(), wire='bf16')")
    assert mine.collective == TopK(0.02, Exact(), "bf16")


# - One grammar ------------------------------------------------------------------------


def test_schedules_are_said_by_name_or_as_they_are() -> None:
    schedules = {"sequential": SEQUENTIAL, "wfbp": WFBP, "dear": DEAR, "local": LOCAL}
    for name, schedule in schedules.items():
        said = parse(f"oktopk(0.1, schedule={name!r})")
        assert said == parse(f"oktopk(0.1, schedule={name.upper()})")
        assert said == replace(parse("oktopk(0.1)"), schedule=schedule)
    assert parse("oktopk(schedule='wfbp')") == parse("oktopk")
    own = parse("oktopk(schedule=Schedule('step', gain=1.2))")
    assert own.schedule == Schedule("step", gain=1.2)
    kfac = parse("spd_kfac(schedule='dear', damping=0.01)")
    assert kfac == Scheme(schedule=DEAR, preconditioner=KFAC("spd", damping=0.01))


def test_those_that_search_in_turns_take_longer_steps_under_local() -> None:
    for name in ("micro", "exdyna", "deft"):
        scheme = parse(f"{name}(0.01, schedule='local')")
        assert scheme.schedule == replace(LOCAL, gain=1.4)
        assert parse(f"{name}(0.01, schedule=LOCAL)").schedule == LOCAL  # as it is
    assert parse("exdyna(schedule='dear')").schedule == DEAR


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("dear(wire='bf16')", lambda: recipe("dear", wire="bf16")),
        ("oktopk(0.01)", lambda: recipe("oktopk", 0.01)),
        (
            "topka2a(0.02, schedule='local', wire='bf16', warmup=240)",
            lambda: recipe("topka2a", 0.02, schedule=LOCAL, wire="bf16", warmup=240),
        ),
        (
            "topk(density=0.1, select=Exact(), momentum_correction=True)",
            lambda: recipe("topk", 0.1, Exact(), momentum_correction=True),
        ),
        (
            "spd_kfac(schedule='dear', damping=0.01)",
            lambda: recipe("spd_kfac", schedule="dear", damping=0.01),
        ),
        (
            "auto(lossy=True, warmup=160)",
            lambda: recipe("auto", lossy=True, warmup=160),
        ),
    ],
)
def test_python_says_what_a_text_says(text: str, scheme: Callable[[], Scheme]) -> None:
    assert parse(text) == scheme()
    assert parse(repr(scheme())) == scheme()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dear-bf16", "dear(wire='bf16')"),
        ("sequential-fp16", "sequential(wire='fp16')"),
        ("dear-bf16(wire='fp16')", "dear(wire='fp16')"),
        ("oktopk-dear", "oktopk(schedule='dear')"),
        ("oktopk-dear()", "oktopk(schedule='dear')"),
        ("oktopk-dear(wire='bf16')", "oktopk(schedule='dear', wire='bf16')"),
        (
            "exdyna-local(0.01, warmup=240)",
            "exdyna(0.01, schedule='local', warmup=240)",
        ),
        (
            "topk-dear(0.1, Exact(), warmup=40)",
            "topk(0.1, Exact(), schedule='dear', warmup=40)",
        ),
        ("topk-dear(0.1)", "topk(0.1, schedule='dear')"),
        ("leader-dear(0.1)", "cltk(0.1, schedule='dear')"),
        (
            "topka2a(0.02, warmup=160, corrected=True)",
            "topka2a(0.02, warmup=160, momentum_correction=True)",
        ),
        (
            "auto(lossy=True, corrected=True)",
            "auto(lossy=True, momentum_correction=True)",
        ),
        (
            "Scheme(Agreed(0.1, Dynamic()), BySize(3.0), DEAR)",
            "Scheme(PartitionedTopK(0.1, Dynamic()), BySize(3.0), DEAR)",
        ),
        (
            "Scheme(Warmup(Corrected(Leader(0.1)), 4))",
            "Scheme(Warmup(MomentumCorrection(CLTk(0.1)), 4))",
        ),
        (
            "spd_kfac-dear(fusion=BySize(3.0), damping=0.1)",
            "spd_kfac(schedule='dear', fusion=BySize(3.0), damping=0.1)",
        ),
    ],
)
def test_old_spellings_are_refused_with_the_new_one(old: str, new: str) -> None:
    parse(new)
    with pytest.raises(ValueError, match=re.escape(f"is an old spelling: use {new}")):
        parse(old)


def test_what_else_is_wrong_with_an_old_spelling_is_said_of_the_new_one() -> None:
    with pytest.raises(ValueError, match=re.escape("oktopk(schedule='dear', colour=")):
        parse("oktopk-dear(colour=1)")
    with pytest.raises(ValueError, match="use oktopk\\(schedule='dear'\\)"):
        recipe("oktopk-dear", 0.1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: recipe("oktok"), "did you mean 'oktopk'?"),
        (lambda: recipe("nonsense"), "use one of auto, sequential, wfbp"),
        (lambda: recipe("wfbp", schedule="dear"), "wfbp is a schedule"),
        (lambda: recipe("topk", schedule="deer"), "did you mean 'dear'?"),
        (lambda: recipe("topk", schedule=3), "or a Schedule"),  # type: ignore[arg-type]
        (lambda: recipe("topk", 0.1, density=0.1), "'density' is given twice"),
        (lambda: recipe("topk", corrected=True), "levels, and not"),
        (lambda: recipe("spd_kfac", "mpd"), "given by name"),
        (lambda: recipe("spd_kfac", schedule="local"), "K-FAC is made of averaged"),
        (lambda: recipe("spd_kfac", warmup=10), "dense at all times"),
        (lambda: recipe("wfbp", warmup=10), "dense at all times"),
        (lambda: recipe("auto", schedule="dear"), "decides on the schedule itself"),
        (
            lambda: recipe("topk", schedule="local", momentum_correction=True),
            "leave out momentum_correction",
        ),
    ],
)
def test_a_recipe_refuses_in_python_as_in_text(
    wrong: Callable[[], Scheme], told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        wrong()


def test_warmup_goes_down_to_the_recipes_density() -> None:
    slow = parse("oktopk(0.1, schedule='dear', warmup=30)")
    assert slow.collective == Warmup(OkTopk(0.1), 15, (1.0, 0.25))
    assert slow.fusion == parse("oktopk(schedule='dear')").fusion
    assert parse("topka2a(warmup=40)").collective == Warmup(
        TopKA2A(), 10, (1.0, 0.25, 0.1, 0.05)
    )
    assert parse("powersgd(warmup=5)").collective == Warmup(PowerSGD(), 5)
    assert parse(repr(slow)) == slow


def test_before_steps_travel_two_thirds_of_a_warmup_are_dense() -> None:
    scheme = parse("oktopk(0.01, schedule='local', warmup=60)")
    densities = (1.0, 1.0, 1.0, 1.0, 0.04, 0.02)
    assert scheme.collective == Warmup(OkTopk(0.01), 10, densities)
    few = parse("topk(0.3, schedule='local', warmup=60)")
    assert few.collective == Warmup(TopK(0.3), 20, (1.0, 1.0, 0.6))
    assert parse("topk(0.5, schedule='local', warmup=60)").collective == Warmup(
        TopK(0.5), 60
    )


def test_momentum_correction_uses_the_optimizers_momentum_after_dense_steps() -> None:
    scheme = parse("exdyna(0.02, schedule='dear', warmup=40, momentum_correction=True)")
    inner = parse("exdyna(schedule='dear')").collective
    inner = MomentumCorrection(replace(inner, density=0.02))  # type: ignore[type-var]
    assert scheme.collective == Warmup(inner, 40, (1.0,))
    assert scheme.fusion == parse("exdyna(schedule='dear')").fusion
    assert parse(repr(scheme)) == scheme
    assert parse("topk(momentum_correction=True)").collective == MomentumCorrection(
        TopK()
    )
    assert parse("topk(momentum_correction=False)") == parse("topk")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "wfbp(1, 2, 3)",
            "wfbp takes wire, lossless, fusion, levels, and not 3 values",
        ),
        ("dear(colour=1)", "colour"),
        ("oktopk(warmup=3)", "number of steps, 4"),
        ("oktopk(warmup=0.5)", "number of steps"),
        ("wfbp(momentum_correction=True)", "selects nothing"),
        ("powersgd(momentum_correction=True)", "selects nothing"),
        ("nonsense", "wfbp"),
        ("Dense(wire='int3')", "bf16"),
        ("Dense(colour=1)", "colour"),
        ("BySize(3)", "not a scheme"),
        ("Scheme(BySize(3))", "reduce"),
        ("Scheme(Dense(), schedule='dear')", "a Schedule such as WFBP or DEAR"),
        ("Scheme(Dense", "comma or '\\)'"),
        ("__import__('os').system('true')", "not allowed"),
        ("os.system('true')", "frozen dataclass"),
        ("Scheme(Dense(), fusion=BySize(-1))", "positive"),
        ("[x for x in ()]", "'x' is not known"),
        ("topk(select=Bisect())", "'Bisect' is not known: use .*Threshold"),
        ("1 + 1", "'\\+' is not allowed"),
        ("Dense(wire='bf16', wire='fp16')", "given twice"),
        ("Schedule(gain=1.0, 'step')", "without a name"),
        ("Cuts((ends=3))", "names no argument"),
        ("BySize()(1)", "behind its end"),
        ("Scheme(, )", "value should be"),
        ("DEAR()", "not callable"),
        ("topk(warmup=())", "number of steps"),
        ("topk(momentum_correction='no')", "True or False"),
        ("MomentumCorrection(TopK(), momentum=0.9)", "give it to the optimizer"),
        ("MomentumCorrection(TopK(), 0.9)", "give it to the optimizer"),
        ("Scheme", "reduce|not a scheme"),
        ("wfbp(wire=bf16)", "lost its quotes: write wire='bf16'"),
        ("", "the text ends where a value should be"),
        ("exdyna(0.01", "the text ends where a comma"),
        ("ddp", "a contestant: use wfbp"),
        ("exdyna(0.01, shedule='local')", "did you mean 'schedule'"),
        ("wfbp(fuson=BySize(5.0))", "did you mean 'fusion'"),
        ("adam", "use one of auto, sequential"),
    ],
)
def test_what_cannot_be_parsed_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


@dataclass(frozen=True)
class Mine:
    def reduce(self, payload: Payload, group: Group) -> Flow:
        return Dense().reduce(payload, group)


def test_text_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_part.py").write_text("from tests.test_scheme import Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="imports nothing"):
        parse("own_part.Mine()")
    assert "own_part" not in sys.modules
    monkeypatch.setitem(sys.modules, "own_part", sys.modules[__name__])
    assert parse("Scheme(own_part.Mine())").collective == Mine()


@pytest.mark.parametrize(
    "text",
    [
        "a" * 40_000,
        "a" * 19_999,
        "a-" * 9_999 + "(",
        "Warmup(" * 2_000 + "TopK()" + ")" * 2_000,
        "a." * 250 + "b",
        "a." * 9_999 + "b",
        "-" * 19_999 + "1",
        "-" * 100_000 + "1",
        "(" * 19_999,
        "not " * 4_999,
        "1," * 9_999,
        "Cuts((" + "9" * 4_400 + ",))",
        f"Cuts(({'1, ' * 6_000}))",
        "topk(\0)",
    ],
    ids=lambda text: f"{text[:8]!r} {len(text)}",
)
def test_any_text_is_refused_in_no_time_and_few_words(text: str) -> None:
    begin = time.thread_time()
    with pytest.raises(ValueError, match="scheme") as refused:
        parse(text)
    assert time.thread_time() - begin < 0.1
    assert len(str(refused.value)) < 3_000


def test_wrappers_within_each_other_are_checked_once() -> None:
    begin = time.thread_time()
    parse("Warmup(" * 25 + "TopK()" + ")" * 25)
    assert time.thread_time() - begin < 0.1


def test_schedules_are_checked() -> None:
    with pytest.raises(ValueError, match="'backward' or 'step'"):
        Schedule(launch="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'step' or 'forward'"):
        Schedule(update="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only with launch='step'"):
        Schedule(gain=2.0)
    with pytest.raises(ValueError, match="above 0"):
        Schedule("step", gain=0.0)
    with pytest.raises(ValueError, match="finite"):
        Schedule("step", gain="noise")  # type: ignore[arg-type]


def test_by_size_covers_everything_within_its_limits() -> None:
    def cut(sizes: list[int], fusion: BySize) -> list[list[int]]:
        return [sizes[piece] for piece in fusion(Trace(sizes))]

    M = 1_000_000
    sizes = [100, 100, 8 * M, 100, 9 * M, 60 * M, 5]
    assert cut(sizes, BySize()) == [[100, 100], [8 * M, 100], [9 * M], [60 * M], [5]]
    sizes = [M, M, 4 * M, 30 * M, M // 2, M // 2]
    assert cut(sizes, BySize()) == [[M], [M, 4 * M], [30 * M], [M // 2, M // 2]]
    sizes = [100, 4 * M, 100, 4 * M, 100, 4 * M, 3 * M]
    small = BySize(pieces=6)
    assert cut(sizes, small) == [[100], [4 * M], [100, 4 * M], [100, 4 * M], [3 * M]]
    assert cut([M, M], BySize()) == [[M, M]]  # small models travel whole
    assert len(cut([M // 10] * 60, small)) == 6  # and others in several pieces
    assert len(cut([M // 10] * 60, BySize())) == 4
    assert BySize()(Trace([])) == []
    assert len(PerTensor()(Trace(sizes))) == len(sizes)


def test_a_fusion_that_loses_tensors_is_refused() -> None:
    import torch

    class Loses:
        def __call__(self, trace: Trace, cost: object) -> list[slice]:
            return [slice(0, 1)]

    params = [(str(i), torch.nn.Parameter(torch.ones(2))) for i in range(2)]
    with pytest.raises(ValueError, match="cover all"):
        lay_out(params, Loses(), Dense(), 2)


def test_any_text_is_a_scheme_or_refused_at_once_and_imports_nothing() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "mutations.py"
    found = runpy.run_path(str(path))["survey"](6000, seed=1)
    assert not found["wrong"]
    assert not found["imported"]
    assert set(found["outcomes"]) == {"scheme", "ValueError"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("topk(select=5)", "TopK(select=5): it has to be a Selector"),
        ("topk(True)", "TopK(density=True): it has to be a finite number"),
        (
            "Schedule('step', gain=1e400)",
            "Schedule(gain=inf): it has to be a finite number",
        ),
        (
            "MomentumCorrection(1)",
            "MomentumCorrection(collective=1): it has to be a Collective",
        ),
        ("MomentumCorrection(TopK)", "it has to be a Collective"),
        ("ACPSGD(1e400)", "ACPSGD(rank=inf): it has to be a whole number"),
        ("Warmup(TopK(), steps=1.5)", "Warmup(steps=1.5): it has to be a whole"),
        ("exdyna(partition=4)", "PartitionedTopK(partition=4): use Even()"),
        ("BySize(pieces=1.5)", "not a scheme"),
        (
            "Scheme(Dense(), BySize(pieces=1.5))",
            "BySize(pieces=1.5): it has to be",
        ),
        ("spd_kfac(factor_every=True)", "KFAC(factor_every=True): it has to be a wh"),
        ("oktopk-dera", "did you mean 'oktopk'?"),
    ],
)
def test_hyper_parameters_of_the_wrong_kind_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        parse(text)
