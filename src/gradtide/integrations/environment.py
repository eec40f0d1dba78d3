"""The scheme that a run is told from outside, where its program names none."""

from __future__ import annotations

import os

from gradtide.scheme import Scheme

SCHEME = "GRADTIDE_SCHEME"


def scheme_or_default(scheme: str | Scheme | None) -> str | Scheme:
    """The scheme itself; for None that of the environment, or "wfbp"."""
    return os.environ.get(SCHEME, "wfbp") if scheme is None else scheme
