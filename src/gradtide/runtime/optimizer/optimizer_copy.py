"""A small copy of an optimizer, whose steps can be tried out.

[Note: twin] The copy has all the attributes and groups of the optimizer, but small
tensors of its own in the place of parameters: one or two of every kind, where a kind is
what an optimizer can tell apart. So it is known by what it does and not by name, an
optimizer of any class can be copied whatever its constructor asks for, and neither its
parameters nor what it remembers are touched.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtide.core.torch_internals import TorchDispatchMode
from gradtide.runtime.optimizer.deferred_step import Divides, holds, own_step

SIDE = 3  # of the tensors that are tried out
BLOCK = 4096  # elements: optimizers that quantise leave smaller tensors as they are
COUNT = 2  # tensors of each kind: one may depend on another
# LR schedulers and our hooks bind these to the original.
BOUND = ("step", "train", "eval")
LR = 1e-3  # where a scheduler begins at zero


class OptimizerCopy:
    """A small copy of an optimizer and of those it holds, see [Note: twin].

    Its tensors, all zero, have the parameters' own dtype unless another is given. It is
    to be made and used inside `aside()`.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._own: dict[Tensor, Tensor] = {}  # of each small tensor, where it is from
        # What each parameter is in the copy: its own small tensor, or one of its kind.
        self.stands_for: dict[Tensor, Tensor] = {}
        self._choose(optimizer)
        memo: dict[int, Any] = {id(p): own for p, own in self.stands_for.items()}
        self.optimizer: Optimizer = self._copied(optimizer, memo)
        self.params = list(self._own.values())
        # Schedule-free ones do not step in the mode in which they are made.
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.train()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            if "lr" in group and group["lr"] is not None and not group["lr"]:
                group["lr"] = group["lr"] + LR

    @property
    def trainable(self) -> list[Tensor]:
        return [p for p in self.params if p.requires_grad]

    def give(self, grads: Sequence[Tensor]) -> None:
        """Put gradients into `.grad` of the trainable ones."""
        for p, grad in zip(self.trainable, grads, strict=True):
            p.grad = grad.to(p.dtype)

    def step(self) -> None:
        """Step; RuntimeError for a step that exchanges anything with other ranks."""
        with _Alone():  # type: ignore[no-untyped-call]
            own_step(type(self.optimizer))(self.optimizer)

    def scale_lr(self, factor: float) -> None:
        """Change the learning rate, as a scheduler does."""
        for group in self.optimizer.param_groups:
            if isinstance(group.get("lr"), int | float | Tensor):
                group["lr"] = group["lr"] * factor

    def _choose(self, optimizer: Optimizer) -> None:
        for inner in holds(optimizer):  # first: they know more kinds
            self._choose(inner)
        kinds: dict[tuple[object, ...], list[Tensor]] = {}
        for group in optimizer.param_groups:
            # Groups often differ in nothing but the learning rate.
            own = {k: v for k, v in group.items() if k not in ("lr", "initial_lr")}
            text = repr({k: v for k, v in own.items() if not k.startswith("param")})
            for p in group["params"]:
                if p in self.stands_for:
                    continue
                large = p.numel() >= BLOCK
                kind = text, p.dim(), large, p.dtype, p.device, p.requires_grad
                alike = kinds.setdefault(kind, [])
                if len(alike) < COUNT:
                    self._own[p] = _small(p, large, self._dtype or p.dtype)
                    alike.append(self._own[p])
                self.stands_for[p] = self._own.get(p, alike[0])

    def _copied(self, optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
        """The copy of an optimizer; `memo` is deepcopy's."""
        if id(optimizer) in memo:
            return memo[id(optimizer)]  # type: ignore[no-any-return]
        # One that exchanges something in its step is tried out as it is without.
        plain = optimizer.alone() if isinstance(optimizer, Divides) else optimizer
        memo[id(optimizer)] = twin = object.__new__(type(plain))
        for inner in holds(optimizer):
            self._copied(inner, memo)
        groups, state = optimizer.param_groups, optimizer.state
        # For an id to stay what it is, there must be what it is of.
        memo.setdefault(id(memo), []).extend([groups, state])
        for group in groups:
            chosen = [i for i, p in enumerate(group["params"]) if p in self._own]
            for name in group.keys() & {"params", "param_names"}:
                few = [copy.deepcopy(group[name][i], memo) for i in chosen]
                memo.setdefault(id(group[name]), few)
        copies = copy.deepcopy([*groups], memo)
        memo[id(groups)] = [group for group in copies if group["params"]]
        memo[id(state)] = self._memory(state, memo)
        attributes = {
            name: {} if re.fullmatch("_optimizer_.*_hooks", name) else value
            for name, value in vars(plain).items()
            if name not in BOUND
        }
        twin.__dict__ = copy.deepcopy(attributes, memo)
        # Those it holds are to step without torch's global hooks, too.
        twin.__dict__["step"] = MethodType(own_step(type(plain)), twin)
        return twin

    def _memory(self, state: Any, memo: dict[int, Any]) -> Any:
        """What the optimizer remembers, where that can be made smaller."""
        smaller = copy.copy(state)
        smaller.clear()
        for key, entries in state.items():
            if not isinstance(key, Tensor):
                smaller[key] = copy.deepcopy(entries, memo)
            elif key in self._own:
                found = _shrunk(entries, key, self._own[key])
                if found is not None:
                    smaller[self._own[key]] = found
        return smaller


@contextmanager
def aside(optimizer: Optimizer) -> Iterator[None]:
    """Try something out: random numbers stay as they are, and nothing is compiled."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    devices = {p.device for p in params if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the optimizer itself says it again
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for small tensors, more only wait for each other
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what is sent to other ranks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"its step exchanges tensors with other ranks: {func}")
        return func(*args, **(kwargs or {}))


def _small(p: Tensor, large: bool, dtype: torch.dtype) -> Tensor:
    """A small tensor of as many dimensions as `p`."""
    side = math.ceil(BLOCK ** (1 / p.dim()) - 1e-9) if large else SIDE
    zeros = torch.zeros((side,) * p.dim(), dtype=dtype, device=p.device)
    return torch.nn.Parameter(zeros, requires_grad=p.requires_grad)


def _shrunk(entries: Any, p: Tensor, small: Tensor) -> dict[str, Any] | None:
    """What is remembered of `p` for a `small` one; None: it is to begin anew."""
    if not p.numel() or not isinstance(entries, Mapping):  # or it has no first entry
        return None
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):
            found[name] = copy.copy(entry)
        elif type(entry) is not Tensor or entry.shape not in (p.shape, ()):
            return None
        elif entry.shape == p.shape:
            dtype = small.dtype if entry.dtype == p.dtype else entry.dtype
            first = entry.detach().flatten()[:1].to(dtype)
            found[name] = first.expand(small.numel()).reshape(small.shape).clone()
        else:
            found[name] = entry.detach().clone()
    return found
