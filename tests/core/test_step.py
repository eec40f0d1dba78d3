"""The order of a step, driven by events alone: no tensors, no processes, no clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from gradtide.core.schedule import DEAR, LOCAL, SEQUENTIAL, WFBP, Schedule
from gradtide.core.step import MOVES, Bucket, Driver, Stage, Step


class Gradients(Bucket):
    keeps = True


class Logged:
    """Writes down what it is told to do, and needs nothing for it."""

    def __init__(
        self, num_buckets: int, pieces: int = 1, factors: bool = False
    ) -> None:
        self.buckets = [Gradients(f"g{i}", pieces) for i in range(num_buckets)]
        self.factors = [Bucket("f", 1)] if factors else []
        self.recording, self.eager = False, True
        self.arrived = set[str]()  # the buckets whose means are here
        self.log: list[str] = []

    def plan(self) -> Sequence[Any]:
        return [*self.factors, *self.buckets]

    def launch(self, bucket: Any, hold: bool) -> None:
        self.log.append(f"launch {bucket.name}" + (" to its cut" if hold else ""))

    def receive(self, bucket: Any) -> None:
        assert bucket.stage is not Stage.HELD
        self.log.append(f"receive {bucket.name}")

    def needs(self, bucket: Any) -> Sequence[Any]:
        return ()

    def here(self, bucket: Any) -> bool:
        return bucket.name in self.arrived

    def apply(self, buckets: Sequence[Any]) -> None:
        self.log.append(" ".join(["apply", *(bucket.name for bucket in buckets)]))

    def conclude(self, hold: bool) -> None:
        self.log.append("hold" if hold else "conclude")
        for factor in self.factors:  # taken delivery of beside the step
            if factor.stage is Stage.SENT:
                factor.move("deliver")
            factor.rearm()

    def refuse(self, bucket: Any) -> None:
        if bucket.missing < bucket.pieces:
            raise RuntimeError(f"{bucket.name} was used before its update")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def note(*args: Any, **kwargs: Any) -> None:
            values = [getattr(a, "name", a) for a in (*args, *kwargs.values())]
            self.log.append(" ".join(map(str, (name, *values))))

        return note

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return [line for line in log if line.split()[0] not in QUIET]


QUIET = {"prepare", "fill", "collect"}


def start(schedule: Schedule, num_buckets: int = 3, **more: Any) -> tuple[Step, Logged]:
    driver = Logged(num_buckets, **more)
    typed: Driver = driver  # all that a step asks for is there
    return Step(typed, schedule), driver


def backward(step: Step, driver: Logged, quiet: bool = False) -> None:
    if step.begin(quiet):
        for bucket in driver.buckets:
            for _ in range(bucket.pieces):
                bucket.missing -= 1
                if not bucket.missing:
                    step.full()
        step.end(arrived=True)


def stages(driver: Logged) -> set[Stage]:
    return {bucket.stage for bucket in driver.buckets}


def test_buckets_leave_as_they_get_full_and_means_are_gradients_after_backward() -> (
    None
):
    step, driver = start(WFBP)
    backward(step, driver)
    received = [f"receive g{i}" for i in range(3)]
    launched = [f"launch g{i}" for i in range(3)]
    assert driver.take() == [*launched, "conclude", *received, "deliver"]
    assert step.fresh
    step.step()
    assert driver.take() == ["update True"]
    step.step()
    assert driver.take() == ["update False"]


def test_a_full_bucket_waits_for_those_before_it() -> None:
    step, driver = start(WFBP)
    step.begin()
    for i in (1, 0, 2):
        driver.buckets[i].missing = 0
        step.full()
        driver.log.append(f"{i}")
    assert driver.take() == ["1", "launch g0", "launch g1", "0", "launch g2", "2"]


def test_what_gets_no_gradient_leaves_at_the_end_and_nothing_without_any() -> None:
    step, driver = start(WFBP)
    step.begin()
    step.end(arrived=False)
    assert driver.take() == []
    step.begin()
    step.end(arrived=True)
    assert [line for line in driver.take() if "launch" in line] == [
        f"launch g{i}" for i in range(3)
    ]


def test_sequential_leaves_after_backward() -> None:
    step, driver = start(SEQUENTIAL)
    step.begin()
    for bucket in driver.buckets:
        bucket.missing = 0
        step.full()
    assert driver.take() == []
    step.end(arrived=True)
    assert driver.take()[0] == "launch g0"


def test_deferred_updates_are_held_released_last_first_and_applied_when_read() -> None:
    step, driver = start(DEAR)
    backward(step, driver)
    cut = [f"launch g{i} to its cut" for i in range(2)]
    assert driver.take() == [*cut, "launch g2", "hold"]
    assert stages(driver) == {Stage.HELD}
    assert step.step()
    released = [f"release g{i}" for i in (2, 1, 0)]
    assert driver.take() == ["defer", *released]
    step.apply([driver.buckets[1]])
    step.apply([driver.buckets[1]])
    assert driver.take() == ["receive g1", "apply g1"]
    step.flush()
    assert driver.take() == ["receive g2", "apply g2", "receive g0", "apply g0"]
    assert stages(driver) == {Stage.IDLE}


def test_updates_go_along_with_one_that_is_needed_as_far_as_means_are_here() -> None:
    step, driver = start(DEAR, 4)
    backward(step, driver)
    step.step()
    driver.take()
    driver.arrived = {"g2", "g0"}
    step.apply([driver.buckets[3]], driver.buckets[::-1])
    assert driver.take() == ["receive g3", "receive g2", "apply g3 g2"]
    step.apply([driver.buckets[3]], driver.buckets[::-1])
    assert driver.take() == []
    step.apply(driver.buckets[1::-1], driver.buckets[::-1])
    assert driver.take() == ["receive g1", "receive g0", "apply g1 g0"]
    assert stages(driver) == {Stage.IDLE}


def test_a_step_that_finds_out_the_order_is_not_deferred() -> None:
    step, driver = start(DEAR)
    driver.recording = True
    backward(step, driver)
    assert "deliver" in driver.take()
    driver.recording = False
    step.step()
    backward(step, driver)
    assert "hold" in driver.take()


def test_what_nobody_read_is_applied_before_its_bucket_leaves_again() -> None:
    step, driver = start(DEAR)
    backward(step, driver)
    step.step()
    driver.take()
    step.begin()
    step.end(arrived=True)
    cut = "launch g0 to its cut"
    assert driver.take()[:3] == ["receive g0", "apply g0", cut]
    step, driver = start(DEAR)
    backward(step, driver)
    step.step()
    with pytest.raises(RuntimeError, match="g0 was used before its update"):
        backward(step, driver)


def test_held_means_can_be_gathered_before_step() -> None:
    step, driver = start(DEAR)
    backward(step, driver)
    driver.take()
    step.gather()
    released, received = (
        [f"{what} g{i}" for i in range(3)] for what in ("release", "receive")
    )
    gathered = [*reversed(released), *received, "deliver"]
    assert driver.take() == gathered
    assert not step.step()
    assert driver.take() == ["update True"]
    step.gather()
    assert driver.take() == []
    backward(step, driver)
    driver.take()
    backward(step, driver)  # without a step between: the first ones are waited for
    assert driver.take()[: len(gathered)] == gathered
    assert stages(driver) == {Stage.HELD}


def test_a_local_step_exchanges_after_the_optimizer() -> None:
    step, driver = start(LOCAL)
    driver.eager = False
    backward(step, driver)
    assert driver.log == ["prepare False", "collect"]
    driver.take()
    step.step()
    assert driver.take() == ["update False"]
    step.stepped()
    sent = [f"launch g{i}" for i in range(3)]
    settled = [f"{what} g{i}" for i in range(3) for what in ("receive", "apply")]
    assert driver.take() == [*sent, *settled]
    driver.eager = True  # a dense step of a warm-up
    backward(step, driver)
    assert "deliver" in driver.take()
    step.step()
    step.stepped()
    assert driver.take() == ["update True"]


def test_factors_leave_in_the_first_of_several_forwards() -> None:
    step, driver = start(WFBP, factors=True)
    step.forward()
    backward(step, driver)
    driver.take()
    step.step()
    step.forward()
    assert driver.take() == ["update True"]
    step.forward()
    assert driver.take() == ["launch f"]


def test_a_quiet_backward_waits_for_what_was_held_and_launches_nothing() -> None:
    step, driver = start(DEAR)
    backward(step, driver)
    driver.take()
    backward(step, driver, quiet=True)
    assert driver.log[-2:] == ["deliver", "prepare True"]
    assert not any("launch" in line for line in driver.log)
    assert not step.open


@pytest.mark.parametrize("stage", list(Stage))
def test_a_bucket_goes_only_where_it_can(stage: Stage) -> None:
    for event in {event for event, _ in MOVES}:
        bucket = Bucket("b", 2)
        bucket.stage = stage
        if (event, stage) in MOVES:
            bucket.move(event)
            assert bucket.stage is MOVES[event, stage]
        else:
            with pytest.raises(RuntimeError, match=f"b is {stage.value} and cannot"):
                bucket.move(event)


@pytest.mark.parametrize("schedule", [WFBP, SEQUENTIAL, DEAR, LOCAL])
@pytest.mark.parametrize("seed", range(8))
def test_any_program_ends_with_nothing_under_way(schedule: Schedule, seed: int) -> None:
    """What is sent is received once, whatever a program does."""
    rng = random.Random(seed)
    step, driver = start(schedule, num_buckets=rng.randrange(1, 5), pieces=2)
    sent: dict[str, int] = {}
    for _ in range(60):
        driver.eager = not (schedule is LOCAL and rng.random() < 0.7)
        driver.recording = rng.random() < 0.1 and not step.held
        event = rng.choice(("step", "backward", "quiet", "flush", "gather"))
        if event == "step":
            step.step()
            step.stepped()
        elif event in ("backward", "quiet"):
            step.flush()
            backward(step, driver, event == "quiet")
        else:
            getattr(step, event)()
        for line in driver.take():
            name = line.split()[1] if " " in line else ""
            if line.startswith("launch"):
                sent[name] = sent.get(name, 0) + 1
            elif line.startswith("receive"):
                sent[name] -= 1
        assert not step.open
        waiting = sum(b.stage is not Stage.IDLE for b in driver.buckets)
        assert sum(sent.values()) == waiting
    step.gather()
    step.flush()
    assert stages(driver) == {Stage.IDLE}


# - Rounds -----------------------------------------------------------------------------


def rounds(schedule: Schedule, num_buckets: int = 3) -> tuple[Step, Logged]:
    step, driver = start(schedule, num_buckets)
    driver.eager = False
    for i, bucket in enumerate(driver.buckets):
        bucket.fragment = i % schedule.fragments
    return step, driver


def one_step(step: Step, driver: Logged) -> list[str]:
    backward(step, driver)
    step.step()
    step.stepped()
    return [line for line in driver.take() if not line.startswith("update")]


def test_in_a_round_nothing_is_done_but_in_its_last_step() -> None:
    step, driver = rounds(Schedule("step", every=3), 2)
    for _ in range(2):
        silent = [step.silent]
        assert one_step(step, driver) == []
        silent.append(step.silent)
        assert one_step(step, driver) == []
        assert silent == [True, True]
        assert not step.silent
        assert one_step(step, driver) == [
            *("launch g0", "launch g1"),
            *("receive g0", "apply g0", "receive g1", "apply g1"),
        ]
        assert step.position == 0


def test_fragments_leave_in_turn_and_are_applied_later() -> None:
    step, driver = rounds(Schedule("step", every=4, delay=3, fragments=2), 2)
    seen = [one_step(step, driver) for _ in range(8)]
    assert seen[:4] == [[], ["launch g0"], [], ["launch g1"]]
    first, second = ["receive g0", "apply g0"], ["receive g1", "apply g1"]
    assert seen[4:] == [first, ["launch g0"], second, ["launch g1"]]


def test_what_is_late_is_applied_before_it_leaves_again() -> None:
    step, driver = rounds(Schedule("step", every=2, delay=1), 1)
    one_step(step, driver)
    assert one_step(step, driver) == ["launch g0"]
    backward(step, driver)
    assert step.skipped()  # as a GradScaler has it, where it would have come in
    assert not step.skipped()  # all ranks skip, or none
    driver.take()
    assert one_step(step, driver) == ["receive g0", "apply g0", "launch g0"]


def test_steps_that_are_left_out_end_where_something_leaves() -> None:
    step, driver = rounds(Schedule("step", every=8, fragments=2), 2)
    one_step(step, driver)
    assert step.begin()
    assert step.silent
    assert step.leave_out(4) == 2
    assert not step.silent
    step.end(arrived=True)
    step.step()
    step.stepped()
    assert "launch g0" in driver.take()
    assert step.position == 4
    assert step.leave_out(8) == 3
    assert step.leave_out(8) == 0
    one_step(step, driver)
    assert step.position == 0


def test_no_step_is_left_out_after_which_something_leaves() -> None:
    step, _ = rounds(Schedule("step", every=12, fragments=3), 3)
    assert step.leave_out(12) == 3
    assert step.leave_out(12) == 0


def test_others_may_wait_before_something_leaves() -> None:
    step, driver = rounds(Schedule("step", every=8), 1)
    assert step.leave_out(5) == 4
    assert step.silent
    one_step(step, driver)
    assert step.position == 5
    assert step.leave_out(3) == 0


def test_in_a_warm_up_no_step_is_left_out() -> None:
    step, driver = rounds(Schedule("step", every=8), 1)
    driver.eager = True
    assert step.leave_out(8) == 0
    assert step.position == 0


@pytest.mark.parametrize("mix", [None, 0.5])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_left_out_exchanges_are_those_of_a_rank_that_is_not_slow(
    seed: int, mix: float | None
) -> None:
    """What leaves, and what comes in, has one order on all ranks."""
    draw = random.Random(seed)
    fragments = draw.choice([1, 2, 3])
    every = fragments * draw.randint(2, 5)
    delay = draw.randrange(0 if mix is None else 1, every)
    schedule = Schedule("step", every=every, delay=delay, fragments=fragments, mix=mix)
    fast, own = rounds(schedule, 3)
    slow, other = rounds(schedule, 3)
    left, expected = list[str](), list[str]()
    while len(left) < 40:
        assert slow.begin()
        if draw.random() < 0.4:
            slow.leave_out(draw.randint(1, every))
        slow.end(arrived=True)
        slow.step()
        slow.stepped()
        left += [line for line in other.take() if line.startswith("launch")]
    while len(expected) < len(left):
        one = one_step(fast, own)
        expected += [line for line in one if line.startswith("launch")]
    assert left == expected


def test_what_comes_in_late_does_so_before_it_leaves_again() -> None:
    step, driver = rounds(Schedule("step", every=8, delay=3), 1)
    for _ in range(8):
        log = one_step(step, driver)
    assert log == ["launch g0"]
    one_step(step, driver)
    assert step.leave_out(8) == 6
    assert one_step(step, driver) == ["receive g0", "apply g0", "launch g0"]
    step, driver = rounds(Schedule("step", every=8, delay=3, fragments=2), 2)
    for _ in range(5):
        one_step(step, driver)
    assert step.leave_out(8) == 2
    assert one_step(step, driver) == ["receive g0", "apply g0", "launch g1"]


def test_a_round_may_end_before_its_time() -> None:
    step, driver = rounds(Schedule("step", every=4, delay=1, fragments=2), 2)
    for _ in range(2):
        one_step(step, driver)
    step.close()
    assert driver.take() == [
        *("receive g0", "apply g0", "launch g0", "launch g1"),
        *("receive g0", "apply g0", "receive g1", "apply g1"),
    ]
    assert step.position == 0
    step.close()  # what was done since is nothing, but the ranks agree to send it
    assert len(driver.take()) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 4, "delay": 4}, "delay=4"),
        ({"every": 4, "fragments": 3}, "divisor"),
        ({"every": 4, "mix": 0.5}, "only with a delay"),
        ({"every": 4, "delay": 1, "mix": 1.0}, "below 1"),
        ({"decay": 1.5}, "from 0 to 1"),
        ({"every": 2, "ahead": 0.25}, "only with every=1"),
        ({"every": 2, "against": 0.1}, "only with every=1"),
    ],
)
def test_fields_that_do_not_go_together(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule("step", **fields)
    with pytest.raises(ValueError, match="only with launch='step'"):
        Schedule(**fields)
