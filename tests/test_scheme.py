"""A scheme's name is its constructor call."""

from __future__ import annotations

import re
import runpy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gradtide.collectives import (
    Corrected,
    Dense,
    OkTopk,
    PowerSGD,
    TopK,
    TopKA2A,
    Warmup,
)
from gradtide.core.ops import Flow, Group
from gradtide.core.payload import Payload
from gradtide.core.schedule import DEAR, Schedule
from gradtide.fusion import BySize, PerTensor, Trace
from gradtide.runtime.placement import lay_out
from gradtide.scheme import RECIPES, Scheme, parse


@pytest.mark.parametrize("name", RECIPES)
def test_names_and_reprs_parse_to_the_same(name: str) -> None:
    assert parse(name) == parse(repr(RECIPES[name])) == RECIPES[name]


def test_constructor_calls() -> None:
    assert parse("Dense('bf16')") == Scheme(Dense("bf16"))
    text = "Scheme(Dense(), fusion=PerTensor(), schedule=DEAR)"
    assert parse(text) == Scheme(Dense(), PerTensor(), DEAR)
    assert parse(
        "Scheme(gradtide.collectives.dense.Dense(wire='fp16'))"
    ).collective == (Dense("fp16"))


def test_recipes_take_other_hyper_parameters() -> None:
    assert parse("dear('fp16')") == parse("dear-fp16")
    assert parse("dear-bf16(wire='fp16')") == parse("dear-fp16")


def test_warmup_goes_down_to_the_recipes_density() -> None:
    slow = parse("oktopk-dear(0.1, warmup=30)")
    assert slow.collective == Warmup(OkTopk(0.1), 15, (1.0, 0.25))
    assert slow.fusion == RECIPES["oktopk-dear"].fusion
    assert parse("topka2a(warmup=40)").collective == Warmup(
        TopKA2A(), 10, (1.0, 0.25, 0.1, 0.05)
    )
    assert parse("powersgd(warmup=5)").collective == Warmup(PowerSGD(), 5)
    assert parse(repr(slow)) == slow


def test_before_steps_travel_two_thirds_of_a_warmup_are_dense() -> None:
    scheme = parse("oktopk-local(0.01, warmup=60)")
    densities = (1.0, 1.0, 1.0, 1.0, 0.04, 0.02)
    assert scheme.collective == Warmup(OkTopk(0.01), 10, densities)
    few = parse("topk-local(0.3, warmup=60)")
    assert few.collective == Warmup(TopK(0.3), 20, (1.0, 1.0, 0.6))
    assert parse("topk-local(0.5, warmup=60)").collective == Warmup(TopK(0.5), 60)


def test_corrected_takes_the_optimizers_momentum_after_dense_steps() -> None:
    scheme = parse("exdyna-dear(0.02, warmup=40, corrected=True)")
    inner = RECIPES["exdyna-dear"].collective
    inner = Corrected(replace(inner, density=0.02))  # type: ignore[type-var]
    assert scheme.collective == Warmup(inner, 40, (1.0,))
    assert scheme.fusion == RECIPES["exdyna-dear"].fusion
    assert parse(repr(scheme)) == scheme
    assert parse("topk(corrected=True)").collective == Corrected(TopK())
    assert parse("topk(corrected=False)") == parse("topk")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wfbp(1, 2)", "1 hyper-parameters"),
        ("dear-bf16(colour=1)", "colour"),
        ("oktopk(warmup=3)", "number of steps, 4"),
        ("oktopk(warmup=0.5)", "number of steps"),
        ("wfbp(corrected=True)", "selects nothing"),
        ("powersgd(corrected=True)", "selects nothing"),
        ("nonsense", "wfbp"),
        ("Dense(wire='int3')", "bf16"),
        ("Dense(colour=1)", "colour"),
        ("BySize(3)", "not a scheme"),
        ("Scheme(BySize(3))", "reduce"),
        ("Scheme(Dense(), schedule='dear')", "Schedule"),
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
        ("topk(corrected='no')", "True or False"),
        ("Corrected(TopK(), momentum=0.9)", "give it to the optimizer"),
        ("Corrected(TopK(), 0.9)", "give it to the optimizer"),
        ("Scheme", "reduce|not a scheme"),
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
        ("Corrected(1)", "Corrected(collective=1): it has to be a Collective"),
        ("Corrected(TopK)", "it has to be a Collective"),
        ("ACPSGD(1e400)", "ACPSGD(rank=inf): it has to be a whole number"),
        ("Warmup(TopK(), steps=1.5)", "Warmup(steps=1.5): it has to be a whole"),
        ("exdyna(partition=4)", "Agreed(partition=4): use Even()"),
        ("BySize(pieces=1.5)", "not a scheme"),
        (
            "Scheme(Dense(), BySize(pieces=1.5))",
            "BySize(pieces=1.5): it has to be",
        ),
        ("spd_kfac(factor_every=True)", "KFAC(factor_every=True): it has to be a wh"),
        ("oktopk-dera", "did you mean 'oktopk-dear'?"),
    ],
)
def test_hyper_parameters_of_the_wrong_kind_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        parse(text)
