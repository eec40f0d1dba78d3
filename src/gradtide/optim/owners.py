"""Who orthogonalises which matrix, and what travels together: pure functions.

Equal arguments give equal results, so ranks with the same matrices agree without a
word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gradtide.collectives._balance import longest_first


def cost(rows: int, columns: int, steps: int) -> float:
    """Multiplications of Newton-Schulz steps for one matrix.

    With m rows and n columns, m <= n after a transposition, a step is X X^T (m m n),
    its square (m m m), and a product with X (m m n).
    """
    m, n = sorted((rows, columns))
    return float(steps * m * m * (2 * n + m))


def assign(costs: Sequence[float], size: int) -> list[int]:
    """The owner of each matrix: the most expensive goes to the least loaded rank."""
    return longest_first(costs, [1.0] * size)[1]


def together(
    owners: Sequence[int], costs: Sequence[float], numels: Sequence[int], most: int
) -> list[list[int]]:
    """Which matrices travel in one message, at most `most` elements where that can be.

    A message has as many matrices of every owner as there are: the first of each, the
    second, and so on, from the most expensive. So all ranks are done with a message's
    at about the same time, and its parts are about as long.
    """
    turns: dict[int, list[int]] = {}
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        turns.setdefault(owners[i], []).append(i)
    messages: list[list[int]] = []
    filled = most + 1
    for turn in zip_longest(*turns.values()):
        members = [i for i in turn if i is not None]
        numel = sum(numels[i] for i in members)
        if filled + numel > most:
            messages.append([])
            filled = 0
        messages[-1] += members
        filled += numel
    return messages
