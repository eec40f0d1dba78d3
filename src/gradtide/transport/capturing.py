"""What is recorded into a CUDA graph exchanges nothing when it is replayed."""

from __future__ import annotations

import torch


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is recorded on the current stream.

    Those of torch.compile (`mode="reduce-overhead"`) are not meant: they hold what is
    between two hooks, and hooks run outside of them.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a backward pass, or a step, is recorded into a CUDA graph, whose replays "
            "would exchange nothing: leave backward and optimizer.step() out of "
            "torch.cuda.graph(), or use torch.compile(mode='reduce-overhead')"
        )
