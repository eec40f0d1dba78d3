"""How many samples a model's loss is a mean over, from what its forward is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradtide.core.torch_internals import tree_leaves


def batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Samples that the loss is a mean over: rows of the model's first tensor."""
    return _first(args, kwargs).shape[0]


def tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a loss that is a mean over the positions of all sequences (language models).

    The first tensor given to the model is [batch, length] of integers, or of floats
    [batch, length, features].
    """
    x = _first(args, kwargs)
    return x.numel() // x.shape[-1] if x.is_floating_point() else x.numel()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf
    raise ValueError(
        "the model's forward was given no tensor to count samples by: give it the "
        "batch as a tensor among its arguments"
    )


SAMPLES = {"batch": batch, "tokens": tokens}
