"""Who waits for how long; test_router.py has the delays as the kernel's."""

from __future__ import annotations

import random

from gradtide.lab.delayer import Held


def test_a_packet_is_held_for_the_delay() -> None:
    held = Held(0.02, 0.0)
    for number in range(3):
        held.take(number, now=number * 0.01)
    assert held.release(0.0199) is None
    assert held.release(0.0301) == 1
    assert held.release(0.0301) is None
    assert held.release(0.05) == 2
    assert not held.waiting


def test_packets_do_not_overtake_each_other_however_the_delay_varies() -> None:
    random.seed(0)
    held = Held(0.02, 0.01)
    for number in range(1000):
        held.take(number, now=number * 1e-3)
    dues = [due for due, _ in held.waiting]
    assert dues == sorted(dues)
    late = [due - number * 1e-3 for due, number in held.waiting]
    assert min(late) >= 0.01
    assert max(late) <= 0.03


def test_a_lone_packet_is_as_often_early_as_late() -> None:
    random.seed(0)
    held = Held(0.02, 0.01)
    late = []
    for number in range(1000):
        held.take(number, now=float(number))
        late.append(held.waiting[-1][0] - number)
        held.release(number + 0.5)
    assert abs(sum(late) / 1000 - 0.02) < 0.001
