"""Records a program that trains, from inside, and ends it when enough is seen.

Knows what torch calls around every module and every step; nothing of planners. A
process that steps no optimizer is left alone.

[Note: Nothing exchanged] A trace has to be of a step alone. So while steps are timed,
DistributedDataParallel is told before each forward that no gradients are exchanged, as
by `no_sync`. Ranks come apart by that; they end here. Gradtide's replicas, which look
for that, go on as `wfbp`: what they do while a gradient arrives is in the trace.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradtide.advise.notes import Notes, Told
from gradtide.advise.subject import Called, numel, outermost, whole, wrappers
from gradtide.core.torch_internals import disable_dynamo
from gradtide.planner.trace import StepTrace
from gradtide.planner.watch import Watch
from gradtide.runtime.guards.validation import refuse_sparse
from gradtide.runtime.optimizer.deferred_step import closes, holds
from gradtide.runtime.optimizer.finder import existing

PLAIN = "wfbp"
SOON = 12  # steps of all optimizers, by when each has made one
PATIENCE = 10.0  # seconds that a rank waits for the others' last steps
FAILED = 70  # the exit code where this failed, and not the program


def begin(folder: str, module: nn.Module) -> None:
    """Record this process, whose first call is that of a module.

    `folder` has what is wanted.
    """
    Recorder(Notes(folder)).forward(module)


class Recorder:
    """Looks on until an optimizer steps again, watches the next steps, and leaves.

    By then all optimizers and modules of a round have been seen, unless one that is
    there steps more rarely: it is waited for, for some steps. The optimizer that steps
    most parameters is chosen.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._called, self._steps = Called(), 0
        self._stepped: list[weakref.ref[Optimizer]] = []
        self._outer: weakref.ref[Optimizer] | None = None  # whose step is under way
        self._watched: _Watched | None = None
        self._forwards = register_module_forward_pre_hook(self.forward)
        # Plain functions: torch marks what it is to leave alone.
        before, after = partial(self._before), partial(self._after)
        register_optimizer_step_pre_hook(disable_dynamo(before))
        register_optimizer_step_post_hook(disable_dynamo(after))

    def forward(self, module: nn.Module, inputs: Any = ()) -> None:
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return
        if self._called.add(module) == 1:
            self._notes.note("forward", type(module).__name__)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outer is None or self._outer() is None:
            self._outer = weakref.ref(optimizer)
            if self._watched is not None:
                self._watched.closes |= closes(args, kwargs)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        """Of a step inside another's step nothing is made."""
        if self._outer is None or self._outer() is not optimizer:
            return
        self._outer = None
        self._steps += 1
        self._notes.note("steps", str(self._steps))
        try:
            self._stepped_by(optimizer)
        except Exception as error:  # the program must not answer it
            told = isinstance(error, ValueError)
            self._notes.note("failed", str(error) if told else traceback.format_exc())
            leave(FAILED)

    def _stepped_by(self, optimizer: Optimizer) -> None:
        if self._watched is not None:
            self._watched.stepped_by(optimizer)
        elif any(known() is optimizer for known in self._stepped):
            if self._steps < SOON and self._others_are_to_come():
                return
            self._forwards.remove()
            self._watched = _Watched(self._notes, self._called, self._optimizers())
        else:
            self._stepped.append(weakref.ref(optimizer))

    def _others_are_to_come(self) -> bool:
        """Whether an optimizer is there that has yet to step, as a GAN's second one."""
        known = self._optimizers()
        inside = {id(held) for one in known for held in holds(one)}
        inside |= {id(one) for one in known}
        return any(
            p.requires_grad
            for found in existing()
            if id(found) not in inside
            for group in found.param_groups
            for p in group["params"]
        )

    def _optimizers(self) -> list[Optimizer]:
        found = [known() for known in self._stepped]
        return [optimizer for optimizer in found if optimizer is not None]


class _Watched:
    """What is trained, while its steps are timed."""

    def __init__(
        self, notes: Notes, called: Called, optimizers: list[Optimizer]
    ) -> None:
        """Raises ValueError where there is nothing to watch."""
        self._notes, self._wanted = notes, notes.wanted()
        self._optimizer = max(optimizers, key=numel)
        self._others = [each for each in optimizers if each is not self._optimizer]
        self._tops = outermost(called, self._optimizer)
        if not self._tops:
            name = type(self._optimizer).__name__
            raise ValueError(
                f"{name} steps parameters of no module that was called with gradients: "
                "forwards have to be calls, model(x)"
            )
        torchs = [w for w in wrappers(called) if not hasattr(w, "replica")]
        self._wrapped, self._ends = bool(torchs), list[float]()
        exchange_nothing(torchs)
        self.closes = False  # its step is given what computes gradients
        model = whole(self._tops, self._optimizer)
        for name, module in model.named_modules():
            refuse_sparse(name or _name(model), module)
        effort = self._wanted.steps, self._wanted.warmup
        self._watch = Watch(model, self._optimizer, *effort, self._tops)

    def stepped_by(self, optimizer: Optimizer) -> None:
        if optimizer is not self._optimizer:
            return
        self._ends.append(time.perf_counter())
        if self._watch.done:
            self._finish()

    def _finish(self) -> None:
        self._watch.remove()
        there = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        self._notes.note(f"rank-{rank}")
        if rank == 0:
            trace = self._trace()
            self._notes.finish(trace, self._told(trace, size))
            _wait(lambda: self._notes.count("rank-") >= size)
        else:
            _wait(lambda: self._notes.finished)
        leave(0)

    def _trace(self) -> StepTrace:
        """What passes before a step's last one take is no time of any parameter's."""
        found = self._watch.trace(_script())
        return replace(found, loss=found.loss + median(self._watch.earlier()))

    def _told(self, trace: StepTrace, ranks: int) -> Told:
        last = [end - begin for begin, end in pairwise(self._ends)]
        seconds = median(last[-self._wanted.steps :] or [0.0])
        return Told(
            script=_script(),
            models=tuple(_name(top) for top in self._tops),
            optimizer=type(self._optimizer).__name__,
            others=tuple(type(each).__name__ for each in self._others),
            wrapped=self._wrapped,
            ranks=ranks,
            passes=round(median(self._watch.passes())),
            closes=self.closes,
            between=max(seconds - trace.compute, 0.0),
        )


def exchange_nothing(torchs: Iterable[nn.Module]) -> None:
    """From now on; see [Note: Nothing exchanged]. ValueError where that cannot be.

    `torchs` are the wrappers that are not gradtide's.
    """
    for wrapper in torchs:
        wrapper.register_forward_pre_hook(_no_sync)
    ours: Any = sys.modules.get("gradtide.replica")  # where the program has it
    found = [] if ours is None else gc.get_objects()
    for replica in [each for each in found if issubclass(type(each), ours.Replica)]:
        try:
            replica.adopt(PLAIN)
        except (RuntimeError, ValueError):
            raise ValueError(
                "the program trains by a scheme of gradtide's already that hides what "
                f"a step takes alone: have it train by {PLAIN} here, or without"
            ) from None


def _no_sync(wrapper: nn.Module, inputs: Any) -> None:
    """Before each forward: a program may set it, too, for each."""
    vars(wrapper)["require_backward_grad_sync"] = False


def leave(code: int) -> None:
    """End this process at once: no clause of the program's can answer that."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not until() and time.monotonic() < end:
        time.sleep(0.02)


def _script() -> str:
    return Path(sys.argv[0]).name or "python"


def _name(module: nn.Module) -> str:
    """The class, of what was compiled, too."""
    return type(getattr(module, "_orig_mod", module)).__name__
