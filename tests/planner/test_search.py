"""What is tried, in which order it is ranked, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradtide.collectives import Dense
from gradtide.fusion import BySize, Cuts, PerTensor
from gradtide.planner import search
from gradtide.planner.advice import advise
from gradtide.planner.data.presets import preset
from gradtide.planner.network import Network
from gradtide.planner.search import DENSE, Choice, fusions, kind, rank
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import Prediction
from gradtide.scheme import RECIPES, Scheme, parse
from gradtide.scheme.recommended import Steps, candidates

MB = 1e6


def trace(units: int = 4, numel: int = 250_000) -> StepTrace:
    made = tuple(Unit(f"w{i}", numel, 4, 0.01, 0.02, 0.001) for i in range(units))
    return StepTrace("made", made, 0.001 * units)


NETWORK = Network.ideal(8, 1, 1e9)


class Fake:
    """Predictions by name of the collective; counts what it is asked."""

    def __init__(self, sent: dict[str, float] | None = None) -> None:
        self.asked: list[Scheme] = []
        self.sent = sent or {}

    def __call__(self, trace: StepTrace, scheme: Scheme, net: Network) -> Prediction:
        self.asked.append(scheme)
        name = type(scheme.collective).__name__
        sent = self.sent.get(name, 1.0 if name != "Dense" else 4.0)
        if getattr(scheme.collective, "wire", None):
            sent /= 2
        # The middle size is the best.
        size = getattr(scheme.fusion, "megabytes", 10.0)
        step = 0.1 + sent / 10 + abs(size - 5.0) / 1000
        return Prediction(
            step=step,
            forward=0.04,
            backward=0.05,
            select=0.0,
            exchange=step,
            apply=0.01,
            exposed=step - 0.1,
            sent_bytes=sent * MB,
            limit=step - 0.01,
            buckets=1,
        )


def ranked_by(fake: Fake, *asked: Any, **options: Any) -> list[Choice]:
    """What `rank` says, with fake predictions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "simulate", fake)
        return rank(*asked, **options)


def test_dense_schemes_are_always_there_and_the_order_is_stable() -> None:
    for _ in range(2):
        ranked = ranked_by(Fake(), trace(), NETWORK, {}, tune=False)
        names = [choice.name for choice in ranked]
        assert names == ["wfbp(wire='bf16')", "dear(wire='bf16')", "wfbp", "dear"]


def test_what_is_recommended_is_tried_but_not_what_decides_itself() -> None:
    ranked = ranked_by(Fake(), trace(), NETWORK, tune=False)
    assert {choice.name for choice in ranked} == {*DENSE, *candidates()}
    assert "auto" not in candidates()


@pytest.mark.parametrize(("rate", "pays"), [(5e7, True), (2e8, True), (2e10, False)])
def test_a_wire_without_loss_pays_where_links_are_slow(rate: float, pays: bool) -> None:
    network = Network.ideal(4, 1, rate).on(preset("cpu"))
    found = {c.name: c.step for c in rank(trace(), network, tune=False)}
    for name in ("wfbp", "dear"):
        plain = found[f"{name}(wire='bf16')"]
        shorter = found[f"{name}(wire='bf16', lossless=True)"]
        assert (shorter < plain) is pays
    best = advise(rank(trace(), network), 4).dense.scheme.collective
    assert getattr(best, "lossless", False) is pays


def test_a_wire_without_loss_is_left_out_where_nobody_has_timed_it() -> None:
    ranked = rank(trace(), Network.ideal(4, 1, 5e7).on(preset("h100")), tune=False)
    refused = {c.name for c in ranked if "on an accelerator" in c.refused}
    assert refused == {f"{n}(wire='bf16', lossless=True)" for n in ("wfbp", "dear")}


@pytest.mark.slow
@pytest.mark.timeout(300)  # a minute of one core that has nothing else to do
def test_thousands_of_ranks_are_planned_for() -> None:
    ranked = rank(trace(), Network.ideal(1024, 1, 1e10), tune=False)
    assert {choice.name for choice in ranked} == {*DENSE, *candidates()}
    assert all(choice.prediction.step > 0 for choice in ranked)


@pytest.mark.parametrize(("steps", "sgd"), [("adam", False), ("sgd", True)])
def test_what_is_for_another_optimizer_is_refused(steps: Steps, sgd: bool) -> None:
    ranked = ranked_by(Fake(), replace(trace(), steps=steps), NETWORK, tune=False)
    refused = {choice.name for choice in ranked if choice.refused}
    assert ("exdyna(0.01, warmup=160)" in refused) is not sgd
    assert ("oktopk(0.01, schedule='local', warmup=240)" in refused) is sgd


def test_a_choice_says_what_its_warm_up_takes() -> None:
    asked = {"oktopk(0.01, warmup=160)": parse("oktopk(0.01, warmup=160)")}
    fake = Fake({"Dense": 4.0, "OkTopk": 1.0, "Warmup": 1.0})
    ranked = {c.name: c for c in ranked_by(fake, trace(), NETWORK, asked, tune=False)}
    dense = Scheme(Dense(), asked["oktopk(0.01, warmup=160)"].fusion)
    steps = [fake(trace(), s, NETWORK).step for s in (dense, parse("oktopk(0.25)"))]
    mean = (steps[0] + 3 * steps[1]) / 4
    found = ranked["oktopk(0.01, warmup=160)"].warmup
    assert found is not None
    assert found[0] == 160
    assert found[1] == pytest.approx(mean)
    assert ranked["wfbp"].warmup is None


def test_steps_of_a_warm_up_exchange_gradients_also_before_rounds() -> None:
    asked = {"diloco(every=20, warmup=100)": parse("diloco(every=20, warmup=100)")}
    (found,) = (c for c in rank(trace(), NETWORK, asked, tune=False) if c.name in asked)
    dense = Scheme(Dense(), found.scheme.fusion)
    assert found.warmup is not None
    assert found.warmup[0] == 100
    taken = search.simulate(trace(), dense, NETWORK).step
    assert found.warmup[1] == pytest.approx(taken)
    assert found.step < taken


@pytest.mark.parametrize(
    "name",
    [
        "wfbp",
        "dear(wire='bf16')",
        "topka2a(0.02, schedule='local', warmup=60, wire='e3m0')",
        "Scheme(OkTopk(), BySize(25.0))",
    ],
)
def test_what_is_written_for_a_choice_is_its_scheme(name: str) -> None:
    scheme, told = parse(name), Fake()(trace(), parse("wfbp"), NETWORK)
    assert Choice(name, scheme, told).text == name
    tuned = Choice(name, replace(scheme, fusion=BySize(5.0)), told)
    assert parse(tuned.text) == tuned.scheme
    assert tuned.text.startswith(name.rstrip(")") if "Scheme" not in name else "Scheme")


def test_a_scheme_that_saves_no_bytes_is_refused_with_its_condition() -> None:
    fake = Fake({"TopK": 3.99, "OkTopk": 3.0})
    schemes = {name: parse(name) for name in ("topk(0.3)", "oktopk")}
    ranked = ranked_by(fake, trace(), NETWORK, schemes, tune=False)
    assert [choice.name for choice in ranked if choice.refused] == ["topk(0.3)"]
    assert ranked[-1].name == "topk(0.3)"
    assert "dense exchange 4 MB" in ranked[-1].refused
    assert "below a density of 0.22" in ranked[-1].refused  # 1.13 words an entry


def test_a_narrow_wire_is_held_against_a_narrow_wire() -> None:
    schemes = {"a": parse("topk(wire='bf16')"), "b": parse("topk")}
    ranked = ranked_by(Fake({"TopK": 3.95}), trace(), NETWORK, schemes, tune=False)
    refused = {choice.name: choice.refused for choice in ranked if choice.refused}
    assert "dense exchange 2 MB" in refused["a"]
    assert "dense exchange 4 MB" in refused["b"]


def test_factors_need_shapes() -> None:
    ranked = ranked_by(Fake(), trace(), NETWORK, {"powersgd": parse("powersgd")})
    assert "no shapes" in ranked[-1].refused


def test_fusions_of_recipes_are_tuned_and_those_of_users_are_not() -> None:
    mine = Scheme(RECIPES["topk"].collective, PerTensor())
    ranked = ranked_by(Fake(), trace(), NETWORK, {"mine": mine, "topk": parse("topk")})
    tuned = {choice.name: choice.scheme.fusion for choice in ranked}
    assert tuned["mine"] == PerTensor()
    assert tuned["topk"] == BySize(5.0, ends=5.0, pieces=1)  # 20 ms better
    assert tuned["wfbp"] == BySize()  # 5 ms of 500 are not worth another fusion
    assert fusions(Scheme(fusion=BySize(3.0)), trace(), NETWORK) == []
    tried = fusions(RECIPES["dear"], trace(), NETWORK)
    assert BySize(25.0) in tried
    assert BySize() not in tried


@pytest.mark.parametrize(("alpha", "ends"), [(1e-6, (1, 2, 3, 4)), (1.0, (4,))])
def test_merged_buckets_are_cut_in_advance(alpha: float, ends: tuple[int, ...]) -> None:
    network = Network.ideal(8, 1, 1e9, alpha=alpha)
    assert Cuts(ends) in fusions(RECIPES["wfbp"], trace(), network)


def test_what_is_far_behind_is_not_tuned() -> None:
    fake = Fake({"TopK": 0.1, "OkTopk": 3.0})
    schemes = {"topk": parse("topk"), "oktopk": parse("oktopk")}
    ranked_by(fake, trace(), NETWORK, schemes)
    assert fake.asked.count(parse("oktopk")) == 1
    assert (
        len([s for s in fake.asked if s.collective == parse("oktopk").collective]) == 1
    )


def test_one_rank_has_nothing_to_plan() -> None:
    with pytest.raises(ValueError, match="nobody to average with"):
        ranked_by(Fake(), trace(), Network.ideal(1, 1, 1e9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dear", "lossless"),
        ("dear(wire='fp16')", "rounded"),
        ("wfbp(wire='int8')", "lossy"),  # what rounding takes off comes later
        ("oktopk", "lossy"),
        ("oktopk(warmup=40)", "lossy"),
    ],
)
def test_kinds(text: str, expected: str) -> None:
    assert kind(parse(text)) == expected
    assert kind(replace(parse(text), fusion=PerTensor())) == expected


def test_rounds_are_lossy_and_take_part_with_a_warm_up() -> None:
    asked = {"diloco": parse("diloco"), "wfbp": parse("wfbp")}
    choices = {c.name: c for c in rank(trace(), NETWORK, asked)}
    assert choices["diloco"].kind == "lossy"
    assert choices["diloco"].step < choices["wfbp"].step
    assert choices["diloco"].prediction.sent_bytes == pytest.approx(
        choices["wfbp"].prediction.sent_bytes / 30, rel=0.05
    )
    rounds = [name for name, own in candidates().items() if own.schedule.rounds]
    assert rounds == ["diloco(warmup=240)"]
    assert not fusions(parse("streaming_diloco"), trace(), NETWORK)
