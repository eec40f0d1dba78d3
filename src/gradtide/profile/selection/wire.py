"""What exchanging a gradient costs on the wire, dense and sparse: arithmetic.

Bytes are those that a rank sends; rates are in bits/s, of each rank's link each way.
Latency is not counted, and neither is anything that overlaps.
"""

from __future__ import annotations

import torch

from gradtide.collectives._entries import length


def dense_bytes(n: int, ranks: int) -> float:
    """Of a ring all-reduce of `n` float32 elements."""
    return 2 * (ranks - 1) / ranks * 4 * n


def sparse_bytes(n: int, count: float, ranks: int) -> float:
    """Of an all-gather of about `count` entries of `n` from each rank.

    The plainest of the sparse exchanges, and with many ranks the longest.
    """
    return (ranks - 1) * length(round(count), n, torch.float32)


def dense_seconds(n: int, ranks: int, rate: float) -> float:
    """How long the dense exchange takes at `rate`."""
    return 8 * dense_bytes(n, ranks) / rate


def break_even(n: int, count: float, ranks: int, seconds: float) -> float:
    """The rate below which `seconds` of selection and the sparse exchange are faster.

    Zero if the sparse exchange is the longer one at any rate. All of `seconds` counts
    against selection, although a dense exchange needs its gradients copied, too.
    """
    saved = dense_bytes(n, ranks) - sparse_bytes(n, count, ranks)
    return max(0.0, 8 * saved / seconds)
