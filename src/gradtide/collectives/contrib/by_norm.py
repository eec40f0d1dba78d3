"""A partition by tensors: each gives entries in proportion to its norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt

import torch
from torch import Tensor

from gradtide.collectives._balance import longest_first
from gradtide.collectives.partitions import Partition, Plan, Report
from gradtide.core.payload import Payload

ENTRY = 32  # elements whose scan takes as long as the work on one entry


@dataclass(frozen=True)
class ByNorm(Partition):
    """Have every tensor of a bucket give entries in proportion to its norm.

    This is DEFT's partition (Yoon and Oh, ICPP 2023). The tensors are dealt out into P
    bins of about equal work; one longer than n/P is cut into P pieces. Norms are those
    of the last step, told by the rank that searched the tensor, so no rank reads the
    whole bucket for them.
    """

    def plan(self, payload: Payload, k: int, size: int, turn: int) -> Plan:
        edges = _edges_of_parts(payload, size)
        lengths = [end - begin for begin, end in pairwise(edges)]
        norms = payload.state.get(
            "norms", torch.empty(0, dtype=torch.float32, device="cpu")
        ).tolist()
        quotas = shares(k, lengths, norms if len(norms) == len(lengths) else [])
        work = [n + ENTRY * q for n, q in zip(lengths, quotas, strict=True)]
        return Plan(edges, quotas, deal(work, size))

    def measure(self, segment: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(segment)
        return norm

    def learn(self, payload: Payload, plan: Plan, reports: Sequence[Report]) -> None:
        norms = [r.norm if isfinite(r.norm) else 0.0 for r in reports]
        payload.state["norms"] = torch.tensor(norms, dtype=torch.float64, device="cpu")


def _edges_of_parts(payload: Payload, size: int) -> list[int]:
    """Where the tensors of a bucket begin, and the pieces of too long ones."""
    n, origin = len(payload.flat), int(payload.flat.storage_offset())
    begins = {int(part.storage_offset() - origin) for part in payload.parts}
    edges = sorted({0, *begins} - {n})
    fine = []
    for begin, end in pairwise([*edges, n]):
        pieces = min(size, end - begin) if (end - begin) * size > n else 1
        fine += [begin + (end - begin) * i // pieces for i in range(pieces)]
    return [*fine, n]


def shares(k: int, lengths: Sequence[int], norms: Sequence[float]) -> list[int]:
    """Exactly k (at most all) entries, dealt out in proportion to norms, to none more
    than it is long: those that are filled up are served first. Without norms, or if all
    are zero, as if all elements were alike."""
    if not sum(norms) > 0:
        norms = [sqrt(n) for n in lengths]
    quotas = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda s: (-norms[s] / lengths[s], s))
    left, weight = k, sum(norms)
    for place, s in enumerate(order):
        last = place == len(order) - 1
        share = 1.0 if last or weight <= 0 else min(norms[s] / weight, 1.0)
        quotas[s] = min(round(left * share), lengths[s])
        left -= quotas[s]
        weight -= norms[s]
    return quotas


def deal(work: Sequence[int], size: int) -> list[list[int]]:
    """Segments in `size` bins of about equal work."""
    _, bins = longest_first(work, [1] * size)
    return [[s for s, at in enumerate(bins) if at == i] for i in range(size)]
