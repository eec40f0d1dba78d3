"""Steps on the virtual clock keep the laws that real ones keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.programs import imported

from gradtide.collectives import Dense
from gradtide.core.schedule import DEAR, SEQUENTIAL, WFBP
from gradtide.fusion import BySize, Fusion, PerTensor
from gradtide.planner.network import Device, Line, Link, Network, Rate
from gradtide.planner.trace import StepTrace, Unit
from gradtide.planner.virtual import exchange_seconds, simulate
from gradtide.scheme import Scheme, parse

UNITS = 12


def step(forward: float = 0.1, backward: float = 0.2, mb: float = 40.0) -> StepTrace:
    numel = int(mb * 1e6 / 4 / UNITS)
    unit = Unit("", numel, 4, forward / UNITS, backward / UNITS, 0.0)
    units = tuple(replace(unit, name=f"w{i}") for i in range(UNITS))
    return StepTrace("even", units, optimizer=0.0)


def ideal(size: int, share: float, alpha: float = 0.0) -> Network:
    """A network on which the exchange of `step()` takes `share` of its backward."""
    rate = 2 * (size - 1) / size * step().nbytes * 8 / (share * 0.2)
    return Network.ideal(size, 1, rate, alpha=alpha, device=Device())


@pytest.mark.product
@pytest.mark.parametrize("fusion", [BySize(), BySize(2.0, ends=1.0), PerTensor()])
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("forward", [0.02, 0.1, 0.2])
def test_dear_gains_no_more_than_can_be_derived(
    fusion: Fusion, size: int, forward: float
) -> None:
    """At most 1 + t_ff / (2 t_bp) over WFBP, at equal fusion."""
    trace, gains = step(forward), []
    for share in (0.5, 0.9, 1.2, 2.0, 5.0):
        for alpha in (0.0, 5e-5):
            there = ideal(size, share, alpha)
            wfbp, dear = (
                simulate(trace, Scheme(Dense(), fusion, schedule), there).step
                for schedule in (WFBP, DEAR)
            )
            gains.append(wfbp / dear)
    assert max(gains) <= 1 + forward / (2 * 0.2) + 1e-9
    if forward >= 0.1:  # long enough to hide a second half
        assert max(gains) > 1 + forward / (8 * 0.2)
        assert min(gains) > 0.99


@pytest.mark.parametrize("schedule", [SEQUENTIAL, WFBP, DEAR])
@pytest.mark.parametrize("share", [0.1, 1.0, 4.0])
def test_no_step_is_shorter_than_its_limit_and_parts_add_up(
    schedule: object, share: float
) -> None:
    scheme = replace(Scheme(Dense(), PerTensor()), schedule=schedule)  # type: ignore[arg-type]
    found = simulate(step(), scheme, ideal(8, share))
    assert found.limit * (1 - 1e-9) <= found.step < 1.35 * found.limit
    whole = found.forward + found.backward + found.apply + found.exposed
    assert found.step == pytest.approx(whole)
    assert found.sent_bytes == pytest.approx(2 * 7 / 8 * step().nbytes, rel=1e-3)
    assert found.buckets == UNITS


def test_without_overlap_a_step_is_compute_and_exchange() -> None:
    whole = Scheme(Dense(), BySize(1e6, ends=1e6, pieces=1), SEQUENTIAL)
    found = simulate(step(), whole, ideal(8, 2.0))
    assert found.step == pytest.approx(0.1 + 0.2 + 0.4, rel=1e-3)
    assert found.exposed == pytest.approx(0.4, rel=1e-3)


def test_it_is_deterministic_and_steady() -> None:
    scheme, there = parse("oktopk(schedule='dear')"), Network.ideal(4, 2, 1e9)
    few = simulate(step(), scheme, there)
    assert simulate(step(), scheme, there) == few
    assert simulate(step(), scheme, there, steps=6).step == pytest.approx(few.step)
    with pytest.raises(ValueError, match="2 or more"):
        simulate(step(), scheme, there, steps=1)


def test_the_processor_takes_its_time() -> None:
    free = ideal(4, 0.1)
    numel = step().numel
    slow = replace(
        free,
        device=Device(
            take_in=Line(0, 1e-9),
            select={"Threshold": Line(0, 2e-9)},
            scatter=Line(0, 1e-7),
        ),
    )
    whole = replace(parse("topk"), fusion=BySize(1e6, ends=1e6, pieces=1))
    fast, taken = (simulate(step(), whole, net) for net in (free, slow))
    assert fast.select == 0
    kept = 0.01 * numel  # entries: each is read, erased and put into a message
    assert 2e-9 * numel + 1.9e-7 * kept < taken.select < 2e-9 * numel + 4e-7 * kept
    assert taken.backward - fast.backward == pytest.approx(1e-9 * numel, rel=1e-3)
    entries = 4 * 0.01 * numel
    assert taken.exposed > fast.exposed + 0.9 * (1e-7 * entries + 2e-9 * numel)


def test_no_step_is_shorter_than_its_processors_need() -> None:
    """Gradients of 40 MB: their bytes and their taking in, on shared processors."""
    costly = Rate(0.0, ideal(8, 1.0).inter.ring.beta, 0.0, Line(0.0, 1e-9))
    link = Link(costly, costly, costly, costly)
    alone = replace(ideal(8, 1.0), inter=link, device=Device(take_in=Line(0.0, 2e-9)))
    trace = replace(step(), processor=0.05)
    enough = simulate(trace, parse("wfbp"), alone)
    sent = 2 * 7 / 8 * trace.nbytes
    worked = 2e-9 * trace.numel * (1 + 1 / 8)  # taken in; and means of a rank's part
    assert enough.processor == pytest.approx(0.05 + 1e-9 * sent + worked, rel=1e-3)
    assert enough.crowded == 0
    half = simulate(trace, parse("wfbp"), replace(alone, processors=0.5))
    assert half.processor == pytest.approx(enough.processor - worked / 2)
    assert half.step == enough.step  # there is time enough
    few = replace(alone, processors=0.25, occupancy=0.8)
    bound = simulate(trace, parse("wfbp"), few)
    assert bound.step == pytest.approx(bound.processor / 0.25 / 0.8)
    assert bound.step == pytest.approx(enough.step + bound.crowded)
    whole = bound.forward + bound.backward + bound.apply + bound.exposed
    assert bound.step == pytest.approx(whole)


def test_ranks_rest_at_the_same_time() -> None:
    """A replay's processors have nothing to do before its first bucket is full."""
    costly = Rate(0.0, ideal(8, 1.0).inter.ring.beta, 0.0, Line(0.0, 1e-9))
    link = Link(costly, costly, costly, costly)
    few = replace(ideal(8, 1.0), inter=link, processors=0.25, occupancy=0.8)
    trace = replace(step(), processor=0.05, replayed=True)
    dense = Scheme(Dense(), PerTensor(), WFBP)
    bound = simulate(trace, dense, few)
    resting = 0.1 + 0.2 / UNITS
    assert bound.step == pytest.approx(resting + bound.processor / 0.25 / 0.8)
    # Computing keeps them busy, and so do second halves.
    computed = simulate(replace(trace, replayed=False), dense, few)
    assert computed.step == pytest.approx(computed.processor / 0.25 / 0.8)
    deferred = simulate(trace, replace(dense, schedule=DEAR), few)
    assert deferred.step == pytest.approx(deferred.processor / 0.25 / 0.8)


def test_overhead_multiplies_the_lanes_work_in_sparse_exchanges() -> None:
    network, trace = Network.ideal(4, 1, 1e9), replace(step(), processor=0.05)
    more = replace(network, device=replace(network.device, overhead={"TopK": 1.5}))
    counted, whole = (simulate(trace, parse("topk"), n) for n in (network, more))
    taken_in = network.device.take_in(trace.numel, UNITS)  # by the training thread
    own = 0.05 + taken_in
    more_of_it = pytest.approx(1.5 * (counted.processor - own), rel=1e-3)
    assert whole.processor - own == more_of_it
    assert whole.select == pytest.approx(1.5 * counted.select)
    dense = (simulate(trace, parse("wfbp"), n) for n in (network, more))
    assert next(dense) == next(dense)


def test_compute_slows_while_the_lane_is_busy_but_waits_do_not() -> None:
    disturbed = replace(ideal(4, 1.0), interference=1.5)
    calm = simulate(step(), parse("wfbp"), ideal(4, 1.0))
    found = simulate(step(), parse("wfbp"), disturbed)
    assert found.backward > 1.2 * calm.backward
    assert found.forward == pytest.approx(calm.forward)
    waiting = replace(step(), replayed=True)
    same = simulate(waiting, parse("wfbp"), disturbed)
    assert same.step == pytest.approx(calm.step)


def test_what_is_done_to_gradients_slows_in_replays_too() -> None:
    busy = replace(ideal(4, 1.0), device=Device(take_in=Line(0, 1e-9)))
    waiting = replace(step(), replayed=True)
    calm = simulate(waiting, parse("wfbp"), busy).backward
    disturbed = replace(busy, interference=2.0)
    slower = simulate(waiting, parse("wfbp"), disturbed).backward
    assert 0.3e-9 < (slower - calm) / step().numel <= 1.01e-9


def test_one_processor_for_both_threads_does_one_thing_at_a_time() -> None:
    select = {"Threshold": Line(0, 2e-9)}
    device = Device(take_in=Line(0, 1e-9), select=select)
    own = replace(ideal(4, 1e-6), device=device)
    shared = replace(own, sharing=2.0)
    tight = step(forward=1e-6, backward=1e-6)  # nothing but work
    scheme = replace(parse("topk"), fusion=BySize(4.0, ends=4.0, pieces=1))
    both = 3e-9 * tight.numel
    assert simulate(tight, scheme, shared).step > 0.99 * both
    assert simulate(tight, scheme, own).step < 0.8 * both


def test_an_unknown_optimizer_is_the_devices() -> None:
    there = replace(ideal(4, 0.1), device=Device(optimizer=Line(1e-3, 1e-9)))
    seconds = 1e-3 + 1e-9 * step().numel
    for name in ("wfbp", "dear"):
        found = simulate(step(), parse(name), there)
        assert found.apply == pytest.approx(seconds)
    known = replace(step(), optimizer=0.5)
    assert simulate(known, parse("wfbp"), there).apply == pytest.approx(0.5)


def test_a_fusion_is_told_times_and_costs() -> None:
    heard = []

    class Curious:
        def __call__(self, trace, cost):  # type: ignore[no-untyped-def]
            heard.append((sum(trace.backward), cost(1000), cost(10**7)))
            return [slice(0, len(trace.nbytes))]

    there = Network.ideal(4, 1, 1e9)
    simulate(step(), Scheme(Dense(), Curious()), there)
    backward, small, large = heard[0]
    assert backward == pytest.approx(0.2)
    assert large == exchange_seconds(10**7, Scheme(), there)
    assert 0 < small < 0.01 < large


def test_inside_hosts_all_goes_on_beside_what_is_between() -> None:
    """All buckets take their time between hosts, and one of them inside besides."""
    slow, quick = Link.of(0.0, 2e-9), Link.of(0.0, 1e-9)
    network = Network(4, 2, slow, quick, device=Device())
    trace = step(1e-6, 1e-6)
    found = simulate(trace, Scheme(Dense(), PerTensor(), WFBP), network).step
    between = 2 * 3 / 4 * trace.nbytes * slow.ring.beta
    inside = 2 * 1 / 2 * trace.nbytes * quick.ring.beta
    assert found == pytest.approx(between + inside / UNITS, rel=0.03)


def test_ranks_behind_one_card_pay_for_direct_messages_only() -> None:
    one, four = Network.ideal(8, 1, 1e9), Network.ideal(2, 4, 1e9)

    def seconds(text: str, network: Network) -> float:
        return simulate(step(), parse(text), network).step

    ring, direct = "wfbp(levels=1)", "wfbp(wire='bf16', levels=1)"
    assert seconds(ring, four) < 1.2 * seconds(ring, one)
    assert seconds(direct, four) > 1.3 * seconds(direct, one)
    # By two levels, as replicas have them by default, neither does.
    for text in ("wfbp", "wfbp(wire='bf16')"):
        assert seconds(text, four) < 1.02 * seconds(text, one)


@pytest.mark.product
@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("pair", range(4))
def test_crossover_densities_come_out_of_the_clock(size: int, pair: int) -> None:
    with imported("crossovers", "as_published") as module:
        pass
    asked = module.PAIRS[pair]
    derived = module.derived(asked, size)
    first, second = asked
    for density, faster in ((0.95 * derived, True), (1.05 * derived, False)):
        times = [module.seconds(name, density, size) for name in (first, second)]
        assert (times[0] < module.SURE * times[1]) is faster
    table = {"dense": (0.25, 0.0625, 0.0156), "topk": (0.1667, 0.0333, 0.0079)}
    if first == "topk":
        published = table["dense" if second == "dense" else "topk"]
        assert derived == pytest.approx(published[(4, 16, 64).index(size)], rel=0.01)
