"""The hooks on the user's module and optimizer, which tell `training` of a step.

A copy of the module has none of them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradtide.core.step import Event, Stage
from gradtide.core.torch_internals import embrace_step
from gradtide.core.torch_internals.autograd import (
    Hook,
    after_accumulation,
    before_backward,
    before_loading,
    identity,
    in_backward,
    is_traced,
    rehook,
)
from gradtide.core.torch_internals.compilation import (
    Compilations,
    is_scripted,
    leave_out,
    untraced,
)
from gradtide.runtime.layout.buckets import GradientBucket, copied_at_once
from gradtide.runtime.layout.slots import Slot
from gradtide.runtime.optimizer.deferred_step import closes
from gradtide.runtime.training import BROKEN_OFF, Training
from gradtide.transport.shards import is_sharded, redistribute


class Hooks:
    """Hooks for every schedule, and those through which parameters change.

    With `buffers` every training forward begins with rank 0's buffers. `stepped` is
    called after each of the optimizer's steps, and told whether it was silent. `owner`
    is whom the hooks belong to.
    `meet` is called as a training forward begins: it returns the hooks that have taken
    the place of these, if the ranks have changed, and None if not.
    """

    def __init__(
        self,
        training: Training,
        buffers: bool,
        stepped: Callable[[bool], None],
        owner: object,
        meet: Callable[[], Hooks | None] = lambda: None,
    ) -> None:
        model, optimizer = training.model, training.optimizer
        self._model, self._optimizer, self._training = model, optimizer, training
        self._buffers, self._stepped, self._owner = buffers, stepped, owner
        self._meet, surviving = meet, training.surviving
        self._compilations = Compilations(self._before_compilation)
        self._handles: list[Any] = []
        self._update_handles: list[Any] = []  # of what depends on the schedule
        keep = self._handles.append
        calls = (
            surviving(training.begin),
            surviving(training.full),
            _take_again,
            GradientBucket.copy_in_one,
            redistribute,
        )
        self._rare = [untraced(call) for call in calls]  # of `take`, in this order
        self._identities: dict[nn.Parameter, tuple[int, int]] = {}
        self._takes = []
        for p in training.placement.places:
            self._takes.append(take := self._gradient_hook(p))
            keep(after_accumulation(p, _weakly(take, owner)))
            self._identities[p] = identity(p)
        training.rehook = self._rehook
        for module in _hookable(model):  # each of them keeps the training alive
            held = Hook(partial(_held, self))
            keep(before_loading(module, held))
            if training.buffers.means is not None:
                arrive = Hook(lambda *_: self._training.buffers.arrive())
                keep(module.register_state_dict_pre_hook(arrive))  # type: ignore[no-untyped-call]
                load = Hook(lambda *_: self._training.buffers.loading())
                keep(before_loading(module, load))
        if is_scripted(model):  # updates at step(): none of its forwards is seen
            training.placement.compiled = True
        else:
            self._watch_model()
        stepping = untraced(lambda _, *a: self.stepping(*a))
        stepped = untraced(lambda opt, *a: self.stepped(opt, closes(*a)))
        keep(optimizer.register_step_pre_hook(stepping))
        keep(optimizer.register_step_post_hook(stepped))
        # The user's hooks see gradients, whenever they are registered: between these
        # two of ours, a deferred step has none.
        before, after = self._handles[-2:]
        self._embrace = partial(embrace_step, optimizer, before, after)
        self._in_step = False

    def _watch_model(self) -> None:
        keep, model = self._handles.append, self._model
        before = Hook(lambda *_: self._before_forward(), needed=self._needed())
        keep(model.register_forward_pre_hook(before))
        # A gradient hook alone could not tell the backward's end from that of a nested
        # one (re-entrant activation checkpointing runs backwards inside backward).
        keep(model.register_forward_hook(Hook(self._after_forward)))
        loading = Hook(lambda *_: self._loading())
        keep(before_loading(model, loading))

    def follow(self) -> None:
        """Have parameters change in the forward, or at step(), as the schedule says."""
        for handle in self._update_handles:
            handle.remove()
        training, self._update_handles = self._training, []
        self._compilations.remove()
        if training.step.schedule.update != "forward":
            return
        self._compilations.watch()

        def flush(*_: Any) -> None:
            training.flush()

        self._update_handles = training.updates.watch(self._model, self._before_read)
        keep = self._update_handles.append
        keep(self._optimizer.register_state_dict_pre_hook(flush))
        keep(self._optimizer.register_load_state_dict_pre_hook(flush))
        for name in ("eval", "train"):  # those of schedule-free ones move parameters
            keep(_Before(self._optimizer, name, flush))
        for module in _hookable(self._model):
            keep(module.register_state_dict_pre_hook(Hook(flush)))  # type: ignore[no-untyped-call]
            keep(before_loading(module, Hook(flush)))

    def remove(self) -> None:
        """Leave module and optimizer as they were."""
        self._compilations.remove()
        for handle in (*self._handles, *self._update_handles):
            handle.remove()
        self._handles, self._update_handles, self._identities = [], [], {}

    def _rehook(self, p: nn.Parameter) -> bool:
        """Have a parameter's hook called, whatever was; returns if it was not."""
        if p not in self._identities:
            return False
        rehook(p)
        before, now = self._identities[p], identity(p)
        self._identities[p] = now
        return before[0] != now[0] or before[1] > now[1]

    def _gradient_hook(self, p: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """What torch calls when the parameter's gradient is complete.

        Hot path: models have hundreds of parameters, and Python is on backward's way.
        """
        training = self._training
        placement, actions = training.placement, training.actions
        unexchanged = training.unexchanged
        place, due, sharded = placement.places[p], Stage.DUE, is_sharded(p)
        at_once = copied_at_once(p)
        begin, full, again, copy_in, shard = self._rare

        def take(_: nn.Parameter) -> None:
            if training.no_sync_active:
                unexchanged.kept.add(place)
                return
            if sharded:
                shard(p)
            if not training.begun:  # it is the first
                begin()
                if training.lost:
                    return
            slot, bucket = place.slot, place.bucket
            if not actions.eager:
                slot.arrived = True  # and it stays in `.grad`
                return
            if slot.arrived:
                again(bucket, slot)
                return
            slot.arrived = True
            bucket.missing = missing = bucket.missing - 1
            if at_once and bucket.stage is not due:
                copy_in(bucket, slot)
            if placement.recorded is not None:
                placement.recorded.append(slot.name)
            if not missing:
                full()

        leave_out(take)
        return take

    def _before_read(self, module: nn.Module) -> None:
        """A module is about to run: what it reads must be up to date."""
        training, placement = self._training, self._training.placement
        if training.engine.transport.progress.may_train() and placement.see(module):
            return
        with training.turns:
            needed = placement.reads.get(module, ())
            training.gradient_info.ensure_updated(needed, placement.buckets[::-1])
            training.updates.rest([module])

    def _before_compilation(self) -> None:
        """Something is about to be traced, which may read what is due."""
        self._training.flush()
        self._training.placement.compile()

    def _loading(self) -> None:
        """Parameters are about to be loaded, perhaps in the middle of training."""
        training = self._training
        training.flush()
        # In a round what is loaded counts as done by its steps.
        if not training.step.schedule.rounds:
            with torch.no_grad():
                training.undone().loading()

    def _needed(self) -> str | None:
        """Why something has to be done before every forward of the model, if so."""
        if self._training.preconditioning is not None:
            return (
                "K-FAC counts forwards: call the model from code that is not compiled"
            )
        averaged = self._training.buffers.means is not None
        if (self._buffers or averaged) and self._training.buffers:
            return (
                "gradtide sends buffers before every forward: compile the model by "
                "model.compile(), or before replicate() and pass what was compiled, or "
                "use buffers='local'"
            )
        return None

    def _before_forward(self) -> None:
        training = self._training
        if not training.turns.trains:  # see [Note: readers] in `turns`
            return
        if not is_traced():
            training.surviving(training.buffers.arrive)()
        if training.step.open and not in_backward():
            raise RuntimeError(BROKEN_OFF)
        exchanged = self._model.training and torch.is_grad_enabled() and not is_traced()
        if not exchanged or (training.no_sync_active and not training.lost):
            return
        if (hooks := self._meet()) is not None:
            hooks._before_forward()
            return
        training.actions.members.begin()
        training.forwarded = True
        deferred = training.step.schedule.update == "forward"
        if deferred and not self._in_step:  # as a closure's forward is
            self._embrace()
        if training.preconditioning is not None:
            training.step.forward()
        if self._buffers:
            training.surviving(self.send_buffers)()
            if training.lost:  # nothing of this forward is computed yet
                self._before_forward()

    def stand_in(self) -> None:
        """Do what begins a training forward, if none has, of a step without."""
        training = self._training
        if training.forwarded or is_scripted(self._model):
            return
        placement = training.placement
        # Which modules run is this rank's own affair: another step tells.
        placement.learning |= placement.recorded is not None
        placement.called |= {self._model}
        with torch.enable_grad():
            self._before_forward()

    def _after_forward(self, *args: Any) -> None:
        training = self._training
        if training.turns.trains and not is_traced():
            before_backward(args[-1], training.surviving(training.expect))

    def send_buffers(self) -> None:
        """Overwrite the buffers with rank 0's; of a round, before its first step."""
        training = self._training
        if not training.actions.exchange.take_buffers():
            return
        with training.turns:
            training.tally.learn()  # whether some rank has other buffers now
        if training.buffers:
            # Before anything is sent: on other ranks they may have been read already.
            with torch.no_grad():
                training.gradient_info.deliver()
            training.actions.members.announce(Event.FORWARD)
            training.buffers.send(training.actions.members.source)

    def stepping(self, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins; `args` begin with the optimizer.

        Returns other arguments for it if it has a closure.
        """
        training, changed, self._in_step = self._training, None, True
        deferred = training.step.schedule.update == "forward"
        curved = training.preconditioning is not None
        # A closure has to run before such a step and not in it.
        apart = training.actions.chosen.apart or deferred or curved
        if apart and closes(args, kwargs):
            changed = _evaluated(args, kwargs)
        if deferred:
            self._compilations.watch()
        inside = changed is None and closes(args, kwargs)
        training.surviving(training.stepping)(args[0], inside)
        if training.lost:
            if closes(args, kwargs):
                changed = changed or _evaluated(args, kwargs)
            training.skip()
        return changed

    def stepped(self, optimizer: Optimizer, closed: bool = False) -> None:
        """It is over; `closed` if it had a closure."""
        silent, self._in_step = self._training.step.silent, False
        self._training.surviving(self._training.stepped)(optimizer, closed)
        self._stepped(silent)


def _evaluated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Call the closure of step() now; returns arguments with what it came to.

    Gradients are averaged, or preconditioned, between it and the step.
    """
    optimizer, *given = args
    closure = next(a for a in (*given, kwargs.get("closure")) if a is not None)
    with torch.enable_grad():
        loss = closure()
    calls = count()

    def once() -> Any:
        if next(calls):
            raise RuntimeError(
                f"{type(optimizer).__name__} calls the closure of step() more than "
                "once, and gradients are exchanged between its call and the step: use "
                "a schedule that updates at step(), such as 'wfbp', without K-FAC"
            )
        return loss

    return (optimizer, *(None if a is None else once for a in given)), {
        **kwargs,
        **({"closure": once} if kwargs.get("closure") is not None else {}),
    }


class _Before:
    """Has `call` called before an object's method, if it has one, until `remove`."""

    def __init__(self, owner: object, name: str, call: Callable[[], None]) -> None:
        self._attributes, self._name = vars(owner), name
        self._own = {k: v for k, v in self._attributes.items() if k == name}
        method = getattr(owner, name, None)
        if not callable(method):
            return

        def called(*args: Any, **kwargs: Any) -> Any:
            call()
            return method(*args, **kwargs)

        self._attributes[name] = called

    def remove(self) -> None:
        self._attributes.pop(self._name, None)
        self._attributes.update(self._own)


def _weakly(
    take: Callable[[nn.Parameter], None], owner: object
) -> Callable[[nn.Parameter], None]:
    """What calls `take` as long as somebody else refers to it.

    torch never collects a parameter whose hook leads to it again.
    """
    known = weakref.ref(take)

    def hook(p: nn.Parameter) -> None:
        taking = known()
        if taking is not None:
            taking(p)
        elif hook.gradtide is not None:  # type: ignore[attr-defined]
            hook.gradtide = None  # type: ignore[attr-defined]
            warnings.warn(
                "a parameter is trained whose replica is gone, with the modules and "
                "the optimizer that replicate() was given: its gradients are this "
                "rank's own from now on; keep what replicate() returned",
                stacklevel=2,
            )

    leave_out(hook)
    hook.gradtide = weakref.ref(owner)  # type: ignore[attr-defined]  # for validate()
    return hook


def _hookable(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that Python runs."""
    return (module for module in model.modules() if not is_scripted(module))


def _held(_: Hooks, *__: object) -> None: ...


def _take_again(bucket: GradientBucket, slot: Slot) -> None:
    """Take a second gradient in one backward pass; RuntimeError if it is too late."""
    if bucket.stage is Stage.SENT:
        raise RuntimeError(
            f"{slot.name} got a second gradient in one backward pass after its "
            "bucket had left: use checkpoint(..., use_reentrant=False), or the scheme "
            "'sequential', which sends all of them at the end of a backward"
        )
    if slot.copied:
        bucket.copy_in_one(slot)
