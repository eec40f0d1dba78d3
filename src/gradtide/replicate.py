"""Data parallelism on the user's own module and optimizer, by hooks alone.

Gradients are taken in as backward produces them and leave in buckets. Their means are
back in `.grad` when backward returns; or, under a schedule that updates before the next
forward, they are applied just before a module that reads the parameters runs. Here is
the public side; what hooks (`hooks`) tell of the program goes to `training`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide import state
from gradtide.admit import Admitted, admit, admit_collective, admit_optimizer
from gradtide.agree import Signature, agree, describe
from gradtide.auto import Pilot, start, undecided
from gradtide.broadcast import synchronize
from gradtide.engine import Engine
from gradtide.fusion import BySize, Search
from gradtide.hooks import Hooks
from gradtide.kfac.costs import admitted
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.opaque import packed
from gradtide.scheme import Scheme, check, parse
from gradtide.state import StateDict
from gradtide.training import Training, momentum_of
from gradtide.transport import ProcessGroup, Transport, connect
from gradtide.tune import Tuner

Buffers: TypeAlias = Literal["broadcast", "local"]


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    scheme: str | Scheme = "wfbp",
    *,
    process_group: ProcessGroup | None = None,
    buffers: Buffers = "broadcast",
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Replica:
    """Average the gradients of `model` over all ranks of `process_group` (None: all).

    A collective call. Every rank passes the same architecture, already on its device,
    and the same scheme (a recipe's name, a constructor call as text, or a Scheme);
    parameters and buffers are overwritten with rank 0's. The module and the optimizer
    stay the user's: train as on one machine. With `buffers="broadcast"` every training
    forward begins with rank 0's buffers, as in DDP; with "local" each rank keeps its
    own. A scheme with K-FAC has to know the `grad_scaler` that multiplies the loss, if
    there is one: its factors are squares of gradients.

    Raises RuntimeError when torch.distributed is not initialised, and ValueError, on
    every rank, where the model, the optimizer or the scheme cannot be used or differ
    between ranks.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    transport = connect(process_group, device)

    def prepare() -> tuple[Scheme, Signature]:
        chosen = check(scheme) if isinstance(scheme, Scheme) else parse(scheme)
        admit(model, optimizer, chosen.schedule, buffers)
        admit_collective(model, chosen.collective, chosen.schedule)
        momentum_of(optimizer, chosen)
        if chosen.preconditioner is not None:
            admitted(model, chosen.preconditioner)
        return chosen, describe(model, chosen)

    try:
        chosen = agree(transport, prepare)
    except (ValueError, TypeError):
        transport.close()
        raise
    return Replica(model, optimizer, chosen, transport, buffers, grad_scaler)


class Replica:
    """The link between a module, its optimizer and the other ranks.

    Made by `replicate`. All methods are collective calls unless they say otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheme: Scheme,
        transport: Transport,
        buffers: Buffers,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheme = model, optimizer, scheme
        self.engine = Engine(transport)
        synchronize(self.engine, [*model.parameters(), *model.buffers()])
        self._admitted = Admitted(model, optimizer)
        scale = None if grad_scaler is None else grad_scaler.get_scale
        self._training = Training(model, optimizer, start(scheme), self.engine, scale)
        self._hooks = Hooks(
            model,
            optimizer,
            self._training,
            buffers == "broadcast",
            lambda: None if self.tuning is None else self.tuning.stepped(),
        )
        self._hooks.follow()
        auto = undecided(scheme)
        self._pilot = None if auto is None else Pilot(self, auto)
        self.tuning = self._search()

    @property
    def kfac(self) -> Preconditioner | None:
        """The preconditioner, if the scheme has one."""
        second = self._training.second
        return None if second is None else second.kfac

    # - The user's side ----------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, in `.grad`, without exchanging them."""
        quiet = self._training.quiet
        self._be_quiet(True)
        try:
            yield
        finally:
            self._be_quiet(quiet)

    def _be_quiet(self, quiet: bool) -> None:
        self._training.quiet = quiet
        if self.kfac is not None:
            self.kfac.statistics.quiet = quiet

    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the averaged gradients to a total 2-norm of at most `max_norm`.

        Call between backward and step, as torch's function of this name. Returns the
        exact norm before scaling (a scalar), the same on every rank: every rank
        computes the norm of the part of the mean that it owns. Covers all trainable
        parameters of the model. Where steps are exchanged (LOCAL) it is the norm of the
        rank's own gradients, and the call is local. Raises RuntimeError for a
        non-finite norm if asked to.
        """
        norm = self._training.clip(max_norm, error_if_nonfinite)
        if self._pilot is not None:
            self._pilot.hands.note()
        return norm

    def gather_gradients(self) -> None:
        """Have the averaged gradients in `.grad` now, also under a deferred schedule.

        The next `step()` is then an ordinary one; its second half hides behind nothing.
        """
        self._training.gather()

    def flush(self) -> None:
        """Apply what `step()` has deferred. Local: no rank waits for another's call."""
        self._training.flush()

    def adopt(self, scheme: str | Scheme) -> None:
        """Go on with another scheme, from the next step on; nothing is lost.

        Call between `optimizer.step()` and the next backward, with the same scheme on
        every rank. What is deferred is applied first. What the old collective left
        behind stays with its rank for the new one; a dense exchange delivers it with
        the next gradients. The algorithms start anew if the collective is another one;
        otherwise they keep their count of steps, and Corrected its velocity. The first
        step of a schedule that defers is an ordinary one, in which the order of the
        modules is recorded.

        Raises RuntimeError at another moment, and ValueError, on every rank, for a
        scheme that cannot be used here or is not the same everywhere. The replica goes
        on as before then.
        """
        self._refuse_moment()
        self.flush()

        def prepare() -> tuple[Scheme, Signature]:
            chosen = check(scheme) if isinstance(scheme, Scheme) else parse(scheme)
            if undecided(chosen) is not None:
                raise ValueError("adopt() takes a decided scheme: replicate with auto")
            admit_optimizer(self.model, self.optimizer, chosen.schedule)
            admit_collective(self.model, chosen.collective, chosen.schedule)
            momentum_of(self.optimizer, chosen)
            if (chosen.schedule.launch == "step") != (
                self.scheme.schedule.launch == "step"
            ):
                raise ValueError(
                    f"adopt({chosen!r}): what was left behind of gradients is no step, "
                    "nor the other way round; call remove() and replicate()"
                )
            if chosen.preconditioner != self.scheme.preconditioner:
                raise ValueError(
                    f"adopt({chosen!r}): the preconditioner stays as it is; call "
                    "remove() and replicate() for another one"
                )
            return chosen, {"scheme": repr(chosen)}

        if self.tuning is not None:
            self.tuning.settle()
        self._adopt(agree(self.engine.transport, prepare))
        self.tuning = self._search()

    def _adopt(self, scheme: Scheme) -> None:
        """`adopt` what all ranks have agreed on, when nothing is on its way."""
        self._training.adopt(scheme)
        self._hooks.follow()
        self.scheme = scheme

    def _search(self) -> Tuner | None:
        """Begin to search for a fusion, if the scheme's is one that is searched for."""
        fusion = self.scheme.fusion
        if not isinstance(fusion, Search) or undecided(self.scheme) is not None:
            return None
        flats = [bucket.load.flat for bucket in self._training.buckets]
        whole = sum(flat.nbytes for flat in flats)
        return Tuner(self.engine, fusion, whole, flats[0].device, self._recut)

    def _recut(self, fusion: BySize) -> None:
        """Go on with other buckets, between step() and the next backward."""
        self.flush()
        self._adopt(replace(self.scheme, fusion=fusion))

    def _refuse_moment(self) -> None:
        """Raise RuntimeError unless all that was exchanged has been made use of."""
        moment = self._training.moment()
        if moment is not None:
            raise RuntimeError(
                f"adopt() {moment}: call it after optimizer.step(), before the next "
                "backward"
            )

    def state_dict(self, *, world_size: int | None = None) -> StateDict:
        """What this rank needs to go on as if the run had not been stopped. Local.

        Save it beside the model's and the optimizer's, on every rank: it holds the
        rank's undelivered remainders by parameter name, under a key of the rank's own,
        the algorithms' memory, and the order of the buckets. Also right for
        torch.distributed.checkpoint. To read a checkpoint of another `world_size` with
        that, load into what this returns for it. Raises RuntimeError between backward
        and step under a deferred schedule.
        """
        self.flush()
        if self._training.step.held:
            raise RuntimeError(
                "state_dict() between backward and step, while means are on their way: "
                "call it after optimizer.step()"
            )
        group = self.engine.transport.group
        size = group.size if world_size is None else world_size
        training = self._training
        if size == group.size:
            saved = state.save(training.placement, self.scheme, group, training.taken)
            if training.steps is not None:  # every rank's optimizer has its own
                own = self.optimizer.state_dict()["state"]
                saved[f"rank{group.rank}"]["optimizer"] = packed(own)
        else:
            saved = state.blank(training.placement, group, size)
        if self._training.second is not None:
            self._training.second.save(saved, group)
        if self.tuning is not None:
            saved["tuning"] = self.tuning.save()
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict()` returned; call on every rank, before training.

        Load the optimizer's state before: where steps are exchanged (LOCAL), ranks have
        different ones, and this rank's own is in here. `saved` is this rank's own
        state, or with another number of ranks one dictionary with the states of all:
        their remainders are shared out, so that the sum is kept. Raises ValueError on
        every rank, before anything changes, where one has a state that is damaged or
        does not fit, or where states are of different steps.
        """
        training, group = self._training, self.engine.group
        second = training.second

        def prepare() -> tuple[Any, Signature]:
            with state.refusing_damage():
                found = state.read(training.placement, group, saved)
                factors = [] if second is None else second.read(saved, group)
                json.loads(saved.get("tuning") or "{}")
            return (found, factors), found.common

        remedy = "load what was saved at one moment, on every rank"
        found, factors = agree(self.engine.transport, prepare, remedy)
        if self._pilot is not None:
            self._pilot.resume(saved)
        self.flush()
        if self.tuning is not None and found.size == group.size:
            self.tuning.load(saved.get("tuning"))
        state.load(training.placement, self.scheme, group, found)
        training.taken = found.step or 0
        if second is not None:
            second.load(factors, saved, group)
        if training.steps is not None and found.optimizer is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            own = {"state": found.optimizer, "param_groups": groups}
            self.optimizer.load_state_dict(own)

    def remove(self) -> None:
        """Apply what is deferred and detach: module and optimizer are as before."""
        self.gather_gradients()
        self.flush()
        if self.tuning is not None:
            self.tuning.settle()
        if self._pilot is not None:
            self._pilot.remove()
        if self.kfac is not None:
            self.kfac.finish()
            self.kfac.close()
        self._admitted.remove()
        self._hooks.remove()
        self.engine.transport.close()
