"""A network is what was written, and a wrong file says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradtide.core import ops
from gradtide.core.ops import Group
from gradtide.planner.clock.cost import seconds
from gradtide.planner.network import (
    TYPICAL,
    Device,
    Line,
    Link,
    Network,
    Rate,
    imagine,
    load,
)
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import simulate
from gradtide.scheme import parse
from gradtide.transport import gloo

_TRACE = StepTrace(
    "one", (Unit("w", 1000, 4, 0.05, 0.1, 0.01),), 0.01, loss=0.04
)  # of a single layer


def measured() -> Network:
    inter = Link(
        Rate(1e-4, 8e-9, 0.02, Line(5e-5, 1e-9)),
        Rate(2e-4, 9e-9),
        Rate(3e-4, 7e-9),
        Rate(4e-4, 8e-9),
    )
    intra = Link.of(1e-5, 1e-10)
    more = {"processors": 0.25, "occupancy": 0.8, "rate": 1e9}
    return Network(4, 2, inter, intra, TYPICAL, 1.1, 1.7, **more)


@pytest.mark.parametrize(
    "network", [measured(), Network.ideal(4, 1, 1e10), Network(2, 1, Link.of(0, 0))]
)
def test_what_is_saved_is_loaded(network: Network, tmp_path: Path) -> None:
    network.save(tmp_path / "n.json")
    assert load(tmp_path / "n.json") == network


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, "gradtide profile network"),
        ({"version": 99}, "version 99"),
        ({"hosts": 0}, "1 or more"),
        ({"inter": {"ring": {}}}, "damaged"),
        ({"inter": None}, "damaged"),
        ({"surprise": 1}, "surprise"),
        ({"interference": 0.5}, "interference"),
        ({"sharing": 2.5}, "sharing"),
        ({"spread": 1.5}, "spread"),
        ({"delay": -1.0}, "delay"),
        ({"processors": 0}, "processors"),
        ({"occupancy": 1.5}, "occupancy"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(
    change: dict[str, object], match: str, tmp_path: Path
) -> None:
    path = tmp_path / "n.json"
    measured().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=match):
        load(path)


def test_a_file_from_before_processors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    Network.ideal(4, 1, 1e10).save(path)
    document = json.loads(path.read_text())
    del document["processors"], document["occupancy"]
    for rate in (*document["inter"].values(), *document["intra"].values()):
        del rate["processor"]
    path.write_text(json.dumps(document))
    assert load(path) == Network.ideal(4, 1, 1e10)


def test_what_ranks_work_takes_processors() -> None:
    network = measured()  # a quarter of a processor a rank, busy for 0.8 of the time
    assert network.share == 0.25
    assert network.occupied(0.1) == pytest.approx(0.5)
    assert network.charged().inter.ring == Rate(5e-5, 1e-9)
    plenty = replace(network, processors=4.0, occupancy=1.0)
    assert plenty.share == 1.0
    assert plenty.occupied(0.1) == pytest.approx(0.025)
    unknown = replace(network, processors=None)
    assert (unknown.share, unknown.occupied(0.1)) == (1.0, 0.0)


def test_a_missing_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        load(tmp_path / "none.json")
    (tmp_path / "n.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(tmp_path / "n.json")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), True])
def test_times_are_seconds(wrong: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Rate(wrong, 0)
    with pytest.raises(ValueError, match="seconds"):
        Line(0, wrong)


def test_what_if() -> None:
    there = measured().scaled(hosts=16, rate=1e8)
    assert (there.size, there.ranks_per_host, there.rate) == (32, 2, 1e8)
    assert there.inter.direct == Rate(2e-4, 9e-8)  # a tenth of the rate
    assert there.intra == measured().intra
    unknown = Network(2, 1, Link.of(1e-5, 2e-9)).scaled(rate=8e8)
    assert unknown.inter.ring.beta == pytest.approx(1e-8)
    with pytest.raises(ValueError, match="above 0"):
        measured().scaled(rate=0)


def test_a_selector_that_was_not_measured_is_taken_for_the_slowest() -> None:
    device = Device(select={"Fast": Line(0, 1e-9), "Slow": Line(0, 5e-9)})
    assert device.selecting("Fast")(10) == pytest.approx(1e-8)
    assert device.selecting("Else")(10) == pytest.approx(5e-8)
    assert Device().selecting("Else")(10) == 0


def test_a_collective_whose_overhead_was_not_measured_has_the_mean_one() -> None:
    device = Device(overhead={"TopK": 1.2, "OkTopk": 1.4})
    assert device.overhead_of("TopK") == 1.2
    assert device.overhead_of("PartitionedTopK") == pytest.approx(1.3)
    assert Device().overhead_of("TopK") == 1.0


def test_the_one_hop_is_the_transports() -> None:
    there = Network(2, 1, Link.of(0, 0))
    assert (there.one_hop_bytes, there.one_hop_ranks) == (gloo.HOP, gloo.FEW)
    assert there.small_bytes == gloo.SMALL


def test_where_hosts_are_far_each_message_is_on_its_way_for_half_a_round_trip() -> None:
    near = Network.ideal(4, 2, 1e9, alpha=0.001)
    far = near.delayed(0.04).inter
    for kind in (far.ring, far.swap, far.broadcast):
        assert kind.alpha == pytest.approx(0.021)
        assert kind.beta == near.inter.ring.beta
    assert 6 * far.direct.alpha == pytest.approx(6 * 0.001 + 0.02), "all at once"
    assert near.delayed(0.04).intra == near.intra
    assert near.delayed(0.0) == near
    alone = Network.ideal(1, 2, 1e9)
    assert alone.delayed(0.04) == alone
    assert imagine(None, 8, 2, 1e9, 0.04).inter.swap.alpha == pytest.approx(0.02005)
    with pytest.raises(ValueError, match="a delay"):
        near.delayed(-1.0)


def test_where_hosts_are_far_a_ring_is_left_as_training_leaves_it() -> None:
    far, group = Network.ideal(4, 1, 1e9, alpha=0.0).delayed(0.1), Group(0, 4)
    small, large = (ops.Mean(torch.empty(n, device="meta")) for n in (1 << 20, 1 << 24))
    assert far.distance.direct_pays(small.tensor.nbytes, 4)
    assert not far.distance.direct_pays(large.tensor.nbytes, 4)
    # Two messages in a row, or six; the rest is bytes.
    bits = 8 * 1.5 / 1e9
    for mean, hops in ((small, 2), (large, 6)):
        expected = hops * 0.05 + mean.tensor.nbytes * bits
        assert seconds(mean, group, far) == pytest.approx(expected, rel=0.02)


def test_what_is_lost_is_late_by_a_round_trip() -> None:
    """If it is among the last packets: of a long message one nearly always is."""
    whole, group = Network.ideal(4, 1, 2e8).delayed(0.04), Group(0, 4)
    lossy = whole.lossy(0.01)
    assert lossy.resent(100) == pytest.approx(0.04 * 0.01 * 100 / 1448, rel=0.01)
    assert 0.0399 < lossy.resent(1e8) < 0.04
    swap = ops.Swap(torch.empty(1 << 24, device="meta"), 1)
    bytes_, late = 8 * 4 * (1 << 24) / 2e8, lossy.resent(1 << 26)
    assert seconds(swap, group, lossy) == pytest.approx(
        0.02005 + bytes_ / 0.99 + late, rel=1e-6
    )
    slower = [
        seconds(op, group, lossy) / seconds(op, group, whole)
        for op in (
            ops.Mean(torch.empty(1 << 14, device="meta")),
            ops.Mean(torch.empty(1 << 21, device="meta")),
            ops.Mean(torch.empty(1 << 24, device="meta")),
        )
    ]
    assert slower[1] > slower[2] > 1.01, "of a long one it is a smaller share"
    assert whole.resent(1e8) == 0 == Network.ideal(4, 1, 2e8).lossy(0.01).resent(1e8)
    assert imagine(None, 4, 1, 2e8, 0.04, 0.01) == lossy
    large = replace(_TRACE, units=(replace(_TRACE.units[0], numel=1_000_000),))
    steps = [simulate(large, parse("wfbp"), n) for n in (whole, lossy)]
    assert steps[1].step > steps[0].step + 0.04
    assert steps[1].processor == steps[0].processor
    with pytest.raises(ValueError, match="loss"):
        whole.lossy(1.0)


def test_docs_say_what_a_loss_costs() -> None:
    """Of 25 MB among four hosts, in docs/plan.md."""
    whole, group = Network.ideal(4, 1, 2e8).delayed(0.04), Group(0, 4)
    mean = ops.AllReduce(torch.empty(6_250_000, device="meta"))
    told = [f"{seconds(mean, group, n):.2f}" for n in (whole.lossy(0.001), whole)]
    assert told == ["1.74", "1.62"]


@pytest.mark.parametrize(("hosts", "largest"), [(2, 0.564), (4, 1.029), (16, 1.766)])
def test_ranks_wait_for_the_last_of_them(hosts: int, largest: float) -> None:
    """By the expected largest of so many normal numbers, as tables have it."""
    there = replace(Network.ideal(hosts, 1, 1e9), stragglers=0.2)
    assert there.slowest() == pytest.approx(1 + 0.2 * largest, rel=0.01)
    assert there.slowest(25) - 1 == pytest.approx((there.slowest() - 1) / 5)
    assert Network.ideal(hosts, 1, 1e9).slowest() == 1
    assert there.words.endswith("whose steps vary by 20 %")


def test_steps_that_vary_cost_rounds_less() -> None:
    still = Network.ideal(4, 1, 1e12, alpha=0.0)
    vary = replace(still, stragglers=0.3)
    trace = _TRACE
    for text, factor in (
        ("wfbp", vary.slowest()),
        ("diloco(every=9)", vary.slowest(9)),
    ):
        steps = [simulate(trace, parse(text), n).step for n in (still, vary)]
        assert steps[1] / steps[0] == pytest.approx(factor, rel=1e-3)
