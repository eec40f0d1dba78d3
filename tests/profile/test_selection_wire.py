"""The arithmetic of messages and of the rate at which selection stops to pay."""

from __future__ import annotations

import pytest

from gradtide.profile.selection.run import (
    break_even,
    dense_bytes,
    dense_times,
    sparse_bytes,
)

N = 1 << 20


def test_dense_is_a_ring() -> None:
    assert dense_bytes(N, 2) == 4 * N
    assert dense_bytes(N, 8) == pytest.approx(7 * N)
    (time,) = dense_times([125_000_000], [1e9], 2)
    assert time.seconds == pytest.approx(4.0)


def test_sparse_is_a_value_and_an_index_for_every_other_rank() -> None:
    bits = 10 + N / 1000 / 2**9  # of an index: nine low ones, and a row of others
    assert sparse_bytes(N, 1000, 2) == pytest.approx(1000 * (4 + bits / 8), abs=8)
    assert sparse_bytes(N, 1000, 8) == 7 * sparse_bytes(N, 1000, 2)


@pytest.mark.parametrize("ranks", [2, 8])
def test_at_break_even_both_take_equally_long(ranks: int) -> None:
    rate = break_even(N, 1000, ranks, seconds=0.02)
    sparse = 0.02 + 8 * sparse_bytes(N, 1000, ranks) / rate
    (dense,) = dense_times([N], [rate], ranks)
    assert sparse == pytest.approx(dense.seconds)


def test_never_if_the_sparse_message_is_longer() -> None:
    assert break_even(N, 0.23 * N, 8, 1e-9) == 0
    assert break_even(N, 0.22 * N, 8, 1e-9) > 0
