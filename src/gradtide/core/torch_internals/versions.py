"""What differs between the versions of torch that gradtide runs on, 2.11 to 2.14."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

OLDEST = 2, 11


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_version(text: str) -> None:
    """ImportError for a torch that is too old."""
    if version_of(text) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"gradtide needs torch {oldest} or newer, and this is torch {text}: "
            f"install a newer one, pip install 'torch>={oldest}'"
        )


def put_first(hooks: OrderedDict[int, Any], key: int, hook: Any) -> None:
    """Have a module call `hook` before its other ones; it may be among them already."""
    hooks[key] = hook
    if len(hooks) == 1:
        return
    hooks.move_to_end(key, last=False)
    # Dynamo numbered hooks in the order of dict.keys() then, which move_to_end() leaves
    # as it is: compiled code asked for one and found another. So they are put in anew;
    # not everywhere, since a forward in another thread may miss one at that moment.
    if version_of(torch.__version__) < (2, 13):
        for other in [*hooks][1:]:
            hooks[other] = hooks.pop(other)
