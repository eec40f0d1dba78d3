"""The default process group of a job that ends when its answer is there.

[Note: Pinned] `torch.distributed.nn.functional` has the default group among the default
arguments of its functions, as it is when the module is imported; building an optimizer
imports it. A group made before that outlives its end, and so do its threads: one that
lets go of a tensor while the interpreter ends aborts the process. (Guard:
tests/lab/test_group.py.)
"""

from __future__ import annotations

import importlib

import torch.distributed as dist


def begin(backend: str | None = "gloo") -> None:
    """Make the group, so that `destroy_process_group` ends its threads, too."""
    importlib.import_module("torch.distributed.nn.functional")  # see [Note: Pinned]
    dist.init_process_group(backend)
