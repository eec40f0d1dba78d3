"""Operations on tensors are counted by what they do to memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradtide.planner.rehearsal.op_counts import Counter, Work

N, K = 1000, 40
X, WHERE = torch.arange(N, dtype=torch.float32), torch.arange(K)
LIKE = torch.zeros(N)


@pytest.mark.parametrize(
    ("work", "counted"),
    [
        (lambda: X.view(10, -1)[3].narrow(0, 5, 7), Work()),
        (lambda: torch.empty(N), Work()),
        (lambda: LIKE.copy_(X), Work(moved=N, calls=1)),
        (lambda: X.to(torch.bfloat16), Work(moved=N, calls=1)),
        (lambda: torch.cat([X, X]), Work(moved=2 * N, calls=1)),
        (lambda: X.index_select(0, WHERE), Work(entries=K, calls=1)),
        (lambda: X[WHERE], Work(entries=K, calls=1)),
        (lambda: X[: 3 * K].index_select(0, WHERE), Work(nearby=K, calls=1)),
        (lambda: X[: 8 * K].index_select(0, WHERE), Work(entries=K, calls=1)),
        (lambda: LIKE.index_fill_(0, WHERE, 0), Work(entries=K, calls=1)),
        (lambda: LIKE.index_add_(0, WHERE, X[:K]), Work(entries=K, calls=1)),
        (lambda: torch.unique(X, return_inverse=True), Work(ordered=N, calls=1)),
        (lambda: X.sort(), Work(ordered=N, calls=1)),
    ],
)
def test_an_operation_counts_once(work: Callable[[], object], counted: Work) -> None:
    counter = Counter()
    with counter:
        work()
    assert counter.read() == counted
    assert counter.read() == Work()


def test_tensors_without_memory_count_alike() -> None:
    counter = Counter()
    with counter:
        torch.empty(N, device="meta").div_(3)
    assert counter.read(ranks=4) == Work(moved=N / 4, calls=1 / 4)


def test_multiples() -> None:
    assert Work(1, 2, 3, 4, 5, 6).times(3) == Work(3, 6, 9, 12, 15, 6)
