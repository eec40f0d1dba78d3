"""What the tests of frameworks have in common: ranks that look as torchrun's do."""

from __future__ import annotations

import gc
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_ranks(work: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks` with two ranks, and with the environment that launchers set."""
    return run_ranks(2, _launched, work, args)


def _launched(work: Callable[..., Any], args: Any) -> Any:
    gc.freeze()  # frameworks collect often, and what was forked is large
    os.environ.update(
        LOCAL_RANK=os.environ["RANK"],
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # never used: the ranks are joined already
        NODE_RANK="0",
    )
    return work(*args)


def run_example(name: str, folder: Path, options: dict[str, Any]) -> None:
    """Run the `main` of an example on this rank, in a folder, in the group there is."""
    os.chdir(folder)
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: group and destroy(group)
    runpy.run_path(str(EXAMPLES / name))["main"](**options)
