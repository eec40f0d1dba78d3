"""Watches the steps of a training, by hooks alone, and tells where their time goes.

Knows moments; nothing of who trains, nor of other ranks. The model is not wrapped, and
nothing waits for a device before `Watch.trace`.

[Note: Two hooks a parameter] A gradient's moment is taken before it is accumulated, and
the next interval begins after all hooks that were registered earlier: what an exchange
that is running already does with a gradient is no part of the backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.core.torch_internals.autograd import Hook, before_backward, in_backward
from gradtide.planner.measuring.medians import Seconds, typical
from gradtide.planner.trace import StepTrace
from gradtide.runtime.layout.parameters import paths
from gradtide.runtime.optimizer.probing import probe
from gradtide.scheme.recommended import Steps


class Clock:
    """Takes moments without waiting; what they mean is asked when all is over.

    This thread's time on a CPU; else events on the device's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, device.type == "cpu"

    def now(self) -> Any:
        if self._host:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        if self._host:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end) / 1e3)


@dataclass
class _Pass:
    """The moments of one forward and backward, and of the step behind it."""

    called: dict[nn.Module, Any] = field(default_factory=dict)  # in order
    arrived: dict[nn.Parameter, Any] = field(default_factory=dict)  # in order
    left: dict[nn.Parameter, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)  # its begin and end
    forward_end: Any = None  # of the last module with parameters
    backward_begin: Any = None
    begun: Any = None  # the first pass of the same step, where this is another one
    number: int = 1

    def another(self) -> _Pass:
        """The next pass of the same step, which may be under way: a closure's."""
        begun = self.begun
        if begun is None:
            begun = next(iter(self.called.values()), None)
        return _Pass(step=self.step, begun=begun, number=self.number + 1)


class Watch:
    """Records `steps` optimizer steps after the first `warmup`; `remove()` it then.

    A step is what one forward, its backward and `optimizer.step()` take; of several
    backward passes before a step, or in its closure, the last counts. What is done
    between them, such as loading data, is in no trace; nor are forwards without
    gradients. Under `replicate` the schedule has to update parameters in `step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: int = 5,
        warmup: int = 2,
        tops: Iterable[nn.Module] = (),
    ) -> None:
        """`tops` are the modules that forwards call, where `model` is never called.

        Raises ValueError where there is nothing to watch.
        """
        if steps < 1 or warmup < 0:
            raise ValueError(f"{steps} steps after {warmup}: watch 1 or more after 0")
        self._model, self._optimizer = model, optimizer
        self._tops = set(tops) or {model}
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not self._named:
            raise ValueError("no parameter of the model requires a gradient")
        self._clock = Clock(self._named[0][1].device)
        self._warmup, self._most = warmup, warmup + steps
        self._passes: list[_Pass] = []
        self._pass = _Pass()
        self._handles: list[Any] = []
        self._hook(optimizer)

    @property
    def done(self) -> bool:
        """Whether all steps are recorded; nothing is any more."""
        return len(self._passes) >= self._most

    def remove(self) -> None:
        """Take the hooks away; what was recorded is kept."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def trace(self, name: str) -> StepTrace:
        """The medians of the steps recorded so far; waits for the device.

        Parameters that got no gradient come last. Raises ValueError where no step was
        complete.
        """
        if not self._recorded:
            raise ValueError(
                "no step was recorded: call backward() and then step() of the optimizer"
                " that is watched, at least once more than there are warm-up steps"
            )
        seconds = [self._seconds(p) for p in self._recorded]
        found = typical(name, self._named, seconds)
        device = name_of(self._named[0][1].device)
        return replace(found, steps=kind_of(self._optimizer), device=device)

    def updates(self) -> list[float]:
        """Seconds of the optimizer in each recorded step; waits for the device."""
        return [self._update(done) for done in self._recorded]

    def passes(self) -> list[int]:
        """How many backward passes each recorded step had."""
        return [done.number for done in self._recorded]

    def earlier(self) -> list[float]:
        """Seconds of each recorded step before its last pass; waits for the device."""
        return [self._earlier(done) for done in self._recorded]

    @property
    def _recorded(self) -> list[_Pass]:
        return self._passes[self._warmup :]

    def _hook(self, optimizer: Optimizer) -> None:
        keep, trained = self._handles.append, {p for _, p in self._named}

        def training() -> bool:
            return torch.is_grad_enabled() and not self.done

        def before(module: nn.Module, inputs: Any) -> None:
            if not training():
                return
            # Invariant: a checkpoint's second forward, in backward, changes nothing.
            if self._pass.arrived and module in self._tops and not in_backward():
                self._pass = self._pass.another()
            self._pass.called.setdefault(module, self._clock.now())

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if training() and not self._pass.arrived:
                self._pass.forward_end = self._clock.now()

        def result(module: nn.Module, inputs: Any, output: Any) -> None:
            current = self._pass

            def begin() -> None:
                if current.backward_begin is None:
                    current.backward_begin = self._clock.now()

            if training():
                before_backward(output, begin)

        def note(moments: dict[Any, Any], what: Any) -> None:
            if not self.done:
                moments[what] = self._clock.now()

        def leave(p: nn.Parameter) -> None:
            note(self._pass.left, p)

        for module in self._model.modules():
            keep(module.register_forward_pre_hook(Hook(before)))
            if any(p in trained for p in module.parameters(recurse=False)):
                keep(module.register_forward_hook(Hook(after)))
        for top in self._tops:
            keep(top.register_forward_hook(Hook(result)))
        for p in trained:
            keep(p.register_hook(lambda _, p=p: note(self._pass.arrived, p)))  # type: ignore[no-untyped-call]
            keep(p.register_post_accumulate_grad_hook(leave))  # type: ignore[no-untyped-call]
        keep(
            optimizer.register_step_pre_hook(lambda *_: note(self._pass.step, "begin"))
        )
        keep(optimizer.register_step_post_hook(lambda *_: self._end_step()))

    def _end_step(self) -> None:
        if self.done:
            return
        done, self._pass = self._pass, _Pass()
        if done.arrived and done.step:
            done.step["end"] = self._clock.now()
            self._passes.append(done)

    def _seconds(self, done: _Pass) -> Seconds:
        between = self._clock.between
        first = next(iter(done.called.values()), None)
        calls = {m: between(first, moment) for m, moment in done.called.items()}
        end, begin = done.forward_end, done.backward_begin
        forward = 0.0 if end is None else between(first, end)
        begin = end if begin is None else begin
        loss = 0.0 if None in (begin, first) else between(first, begin) - forward
        ready, passed, last = {}, 0.0, begin
        for p, moment in done.arrived.items():
            passed += 0.0 if last is None else max(between(last, moment), 0.0)
            ready[p] = passed
            last = done.left.get(p, moment)
        read = self._reads(calls)
        return Seconds(read, ready, forward, max(loss, 0.0), self._update(done))

    def _update(self, done: _Pass) -> float:
        """Seconds of the optimizer; a closure's backward is no part of them."""
        begin, end = done.step.values()
        last = next(reversed(done.left.values()), begin)
        between = self._clock.between
        return max(min(between(begin, end), between(last, end)), 0.0)

    def _earlier(self, done: _Pass) -> float:
        last = next(iter(done.called.values()), None)
        if None in (done.begun, last):
            return 0.0
        return self._clock.between(done.begun, last)

    def _reads(self, calls: Mapping[nn.Module, float]) -> dict[nn.Parameter, float]:
        """When parameters are first read: by their modules, or by those above."""
        modules = paths(self._model)
        reads: dict[nn.Parameter, float] = {}
        for name, module in modules.items():
            caller = name
            while modules[caller] not in calls and caller:
                caller = caller.rpartition(".")[0]
            moment = calls.get(modules[caller])
            if moment is None:
                continue
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    reads[p] = min(moment, reads.get(p, moment))
        return reads


def name_of(device: torch.device) -> str:
    """What a device calls itself; "cpu" for a CPU."""
    if device.type in ("cpu", "mps"):
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))


def kind_of(optimizer: Optimizer) -> Steps:
    """By what a small copy of it does; "any" where that does not tell."""
    try:
        divides = {traits.divides for traits in probe(optimizer).values()}
    except ValueError:
        return "any"
    return "any" if len(divides) != 1 else "adam" if divides.pop() else "sgd"
