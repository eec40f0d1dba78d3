"""Where the time of steps with K-FAC goes, in the stages of the papers.

Shi et al. (ICDCS 2021) split a step into forward and backward, communication of
gradients, computation and communication of factors, and of inverses. Here stages
overlap: these are the seconds that each was busy, and their sum is more than a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gradtide.core.telemetry import Record

# By the beginning of a bucket's name.
_COMMUNICATION = {
    "grad": "gradient_comm",
    "kfac.A": "factor_comm",
    "kfac.G": "factor_comm",
    "kfac.inverse": "inverse_comm",
    "kfac.gradient": "inverse_comm",  # what is sent in place of inverses
}


class Stages(NamedTuple):
    """Busy seconds of one rank."""

    gradient_comm: float = 0.0
    factor_comp: float = 0.0
    factor_comm: float = 0.0
    inverse_comp: float = 0.0
    inverse_comm: float = 0.0


def stages(
    records: Iterable[Record], factor_seconds: float, inverse_seconds: float
) -> Stages:
    """From an engine's records, and the seconds of computing that were counted."""
    busy = dict.fromkeys(_COMMUNICATION.values(), 0.0)
    for record in records:
        stage = stage_of(record.bucket)
        if stage is not None:
            busy[stage] += record.end - record.start
    return Stages(**busy, factor_comp=factor_seconds, inverse_comp=inverse_seconds)


def stage_of(bucket: str) -> str | None:
    """The stage that a bucket's requests belong to; None where it is no stage's."""
    found = (to for name, to in _COMMUNICATION.items() if bucket.startswith(name))
    return next(found, None)
