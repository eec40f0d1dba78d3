"""A word of warning where code begins that has hardly been run on its hardware."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def warn_unproven(what: str, unproven: str) -> None:
    """Warn once in a process that `what` hardly ran; `unproven` is what that means.

    Both are parts of a sentence, as they are shown.
    """
    warnings.warn(
        f"{what} has run for minutes, on one H200 that several ranks shared. Unproven "
        f"are {unproven}. Compare some steps with DistributedDataParallel before you "
        "rely on it, and please report what you find, good or bad, in an issue with "
        "the output of `python -m torch.utils.collect_env`",
        stacklevel=3,
    )
