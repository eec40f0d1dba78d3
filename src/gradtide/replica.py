"""Data parallelism on the user's own module and optimizer, by hooks alone.

Gradients are taken in as backward produces them and leave in buckets. Their means are
back in `.grad` when backward returns; or, under a schedule that updates before the next
forward, they are applied just before a module that reads the parameters runs. Here is
the public side; what hooks (`hooks`) tell of the program goes to `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.core.engine import Engine
from gradtide.loop import Loop
from gradtide.runtime.checkpoint import StateDict
from gradtide.runtime.guards.validation import check_kinds
from gradtide.runtime.layout.parameters import shared_buffers, shared_parameters
from gradtide.runtime.metrics import Metrics, residual_norms
from gradtide.scheme import Scheme
from gradtide.session import Buffers, Session
from gradtide.transport import Mesh, ProcessGroup

if TYPE_CHECKING:  # loaded by what needs them (tests/test_imports.py)
    from gradtide.core.membership import Membership
    from gradtide.kfac.preconditioner import Preconditioner
    from gradtide.planner.tuning.online import Tuner


def replicate(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheme: str | Scheme = "wfbp",
    *,
    process_group: ProcessGroup | Mesh | None = None,
    buffers: Buffers = "broadcast",
    grad_scaler: torch.amp.GradScaler | None = None,
    check_every: int = 100,
    elastic: str | Membership | None = None,
) -> Replica:
    """Average the gradients of `model` over the ranks of a process group.

    This is a collective call. The module and the optimizer stay the user's own, and the
    training loop stays as it is on one machine. Parameters and buffers are overwritten
    with rank 0's.

    Args:
        model: The module to train, the same architecture on every rank, already on its
            device. Do not wrap it in DistributedDataParallel.
        optimizer: The optimizer of the model's parameters. It has to hold all
            parameters that require a gradient. None stands for one that is built
            later: it is found at its first step. A scheme that has to know it (one
            that defers updates, exchanges steps, takes over momentum, has K-FAC or
            is still to be chosen) begins after that step. Until then exact means are
            exchanged, as by "wfbp".
        scheme: What travels, in which buckets, and when; the same on every rank. It is
            a recipe's name ("dear"), a constructor call as text ("oktopk(0.01)"), or a
            `Scheme`. The default exchanges exact means during backward, as
            DistributedDataParallel does.
        process_group: The ranks that train together, or a DeviceMesh of one dimension.
            None stands for all ranks, the default group. A mesh of two dimensions,
            hosts and the ranks of each, also says which ranks share a host, and so does
            a pair of groups: that of the ranks with this rank's place on every host,
            and that of its host. For a model that FSDP2 or tensor parallelism has
            sharded these are the ranks that have the same part of it (`mesh["outer"]`),
            and each rank averages what it has.
        buffers: With "broadcast" every training forward begins with rank 0's buffers
            (running statistics of norms), as in DistributedDataParallel. With "mean"
            every rank goes on from the mean of all ranks, which is asked for as a
            backward ends and waited for when it is next needed, so that one rank alone
            may evaluate; batch norms then have the statistics that SyncBatchNorm would
            have, and none of its messages in forward and backward; what is no float is
            rank 0's. With "local" every rank keeps its own, which saves that exchange.
        grad_scaler: The GradScaler that multiplies the loss. Only a scheme with K-FAC
            has to know it, because its factors are squares of gradients, and with
            `elastic` a rank that comes, to have the scale of the others. Otherwise it
            is found at its first step, from when on ranks compare its scale.
        check_every: After how many steps the ranks compare a checksum of their
            parameters, beginning after the first step; the same on every rank. Where
            they differ, the next backward raises RuntimeError, on every rank, which
            names the first parameter that does. It costs a reading pass over the
            parameters, and no message. 0 compares nothing. Where steps are exchanged
            (LOCAL), parameters are looked at in every step anyway.
        elastic: The address of a lighthouse of torchft's, or a
            `gradtide.elastic.Lighthouse`, for ranks that come and go: the call has the
            default process group formed of those that are there, and forms it anew when
            a rank is lost or comes. Do not call `init_process_group`.

    Returns:
        The `Replica`, which links module, optimizer and ranks. Training goes on
            without it as long as the module or the optimizer is there. When all three
            are gone, its threads and connections are closed. A copy of a module that
            holds its Replica has an object in that place that does nothing.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: The model, the optimizer or the scheme cannot be used, or differs
            between ranks. It is raised on every rank, before anything is exchanged.
        CommunicationError: A rank died, or stalled past the group's timeout.
    """
    check_kinds(model, optimizer)
    alike: list[Tensor] = [p for _, p in shared_parameters(model)]
    alike += [buffer for _, buffer in shared_buffers(model)]
    if isinstance(elastic, str):
        from gradtide.elastic import Lighthouse

        elastic = Lighthouse(elastic)
    rest = buffers, grad_scaler, alike, check_every, elastic
    return Replica(model, optimizer, scheme, process_group, *rest)


class Replica(Loop):
    """The link between a module, its optimizer and the other ranks.

    `replicate` makes it. Every method says whether it is a collective call, which all
    ranks have to make at the same point of their program, or a local one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheme: str | Scheme,
        process_group: ProcessGroup | Mesh | None,
        buffers: Buffers,
        grad_scaler: torch.amp.GradScaler | None,
        alike: Sequence[Tensor],
        check_every: int = 100,
        elastic: Membership | None = None,
    ) -> None:
        how = buffers, grad_scaler, alike, check_every, elastic
        super().__init__(Session(self, model, optimizer, scheme, process_group, *how))
        self.wrapper: Callable[[], object] | None = None
        self.shares_buffers = buffers != "local"  # whoever begins forwards
        self._metrics = Metrics(self.engine)

    @property
    def model(self) -> nn.Module:
        """The module that is trained. Local."""
        return self._session.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was passed or found, or one that never steps. Local."""
        return self._session.optimizer

    @property
    def scheme(self) -> Scheme:
        """The scheme in use, or that waits; "auto" and others change it. Local."""
        return self._session.scheme

    @property
    def engine(self) -> Engine:
        """What drives the exchanges; `telemetry` has single requests. Local."""
        return self._session.engine

    @property
    def tuning(self) -> Tuner | None:
        """The search for a fusion, with `tried` and `best`, or None. Local."""
        return self._session.tuning

    @property
    def waiting(self) -> bool:
        """Whether the scheme begins when the optimizer has made a step. Local."""
        return self._session.waiting

    @property
    def kfac(self) -> Preconditioner | None:
        """The K-FAC preconditioner; None if the scheme has none. Local."""
        return self._session.kfac

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is loaded from a pickle, has no link to the other ranks."""
        return Unlinked, ()

    # - The optimizer ------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Go on with an optimizer that was not passed, or with another one.

        This is a collective call, between `optimizer.step()` and the next backward, or
        before training. It is only needed before `load_state_dict()`, and for a scheme
        that is to begin with the first step: otherwise the optimizer is found. The
        residual, and what algorithms remember, are dropped.

        Args:
            optimizer: The optimizer of the model's parameters, as for `replicate`.

        Raises:
            RuntimeError: The call comes during backward, inside `no_sync`, or between
                backward and step.
            ValueError: The optimizer cannot be used with the scheme. It is raised on
                every rank.
        """
        self._session.attach(optimizer)

    def refresh(self, optimizer: Optimizer | None = None) -> None:
        """Go on with the parameters that are there, and are trained, now.

        This is a collective call, between `optimizer.step()` and the next backward,
        behind whatever has changed which parameters are trained: some were frozen or
        unfrozen, added or removed (adapters, heads), or others are in their place
        (`load_state_dict(assign=True)`). What was replicated goes on; buckets are laid
        out anew. Parameters and buffers of which ranks have other bits become rank 0's.
        What is deferred, or a round that is under way, ends first.

        What was not delivered of parameters that stay is kept, with velocities, outer
        momentum and numbers of steps. A parameter stays that is the same object in the
        same shape, or that has the name and shape of one which the model has no more:
        then it takes the place of that in the optimizer, too, with its state (in all
        that have stepped, if none was passed). The residual of a
        parameter that is frozen is kept until that is trained again; of one that is
        removed it is lost, which is told in the log. Thresholds, factors and the like,
        and K-FAC's statistics, are learnt anew, and so is the order of the buckets.

        Args:
            optimizer: One that takes the place of the present one, if it was made anew.
                Otherwise add new parameters to the present one: `add_param_group`.

        Raises:
            RuntimeError: The call comes during backward, inside `no_sync` or `join`, or
                between backward and step.
            ValueError: What is there now cannot be trained, or differs between ranks:
                the first parameter that does is named. It is raised on every rank, and
                the replica goes on as before.
        """
        from gradtide.refreshing import refresh

        refresh(self._session, optimizer)

    # - The user's side ----------------------------------------------------------------

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        also: Sequence[Replica] = (),
    ) -> Iterator[None]:
        """Train with numbers of batches that differ between ranks.

        This is a collective call. Use it as a context manager around the loop over
        batches, as DDP's `join`. A rank that leaves the loop takes part in the
        exchanges of the others, with zeros in the place of gradients, until all have
        left it. Then all ranks have the parameters, the buffers (unless they are
        "local") and the state of the optimizer of a rank that trained to the end. What
        a sparse scheme keeps as the residual goes on being delivered.

        Inside, ranks announce each exchange in a few bytes, and with buffers each
        forward waits for the answer. Put nothing else inside that all ranks have to do
        together; other replicas that are trained inside are named by `also`.

        Args:
            divide_by_initial_world_size: Whether the mean is over all ranks, also over
                those that have joined. With False every backward waits for the answer
                to its announcement, and only a dense exchange of gradients will do.
            enable: With False nothing is done here.
            throw_on_early_termination: Whether all ranks raise RuntimeError as soon as
                one runs out of batches, instead of going on without it.
            also: Other replicas of these ranks that are trained inside, such as that of
                a GAN's other network; as many and in the same order on every rank.

        Returns:
            A context manager.

        Raises:
            ValueError: The arguments differ between ranks; or the scheme has K-FAC, or
                is still being chosen or searched for; or the optimizer exchanges
                something itself; or a replica is inside join() already.
            RuntimeError: A rank ran out of batches, with `throw_on_early_termination`;
                or ranks exchange different things.
        """
        if not enable:
            yield
            return
        from gradtide.uneven import Trained, join

        ones = [Trained(o._session, o.shares_buffers) for o in (self, *also)]
        how = divide_by_initial_world_size, throw_on_early_termination
        with join(ones, *how):
            yield

    def metrics(self, *, residual: bool = False) -> dict[str, float]:
        """Return numbers of this rank's training, for any logger. Local.

        Call it once a step, after `optimizer.step()`. It reads counters: nothing is
        exchanged, no tensor is touched, and no device is waited for, unless `residual`
        asks for more. Times, bytes and the density are of what has happened since the
        call before, at first since `replicate`. Under a schedule that defers, the
        second half of a step's exchange counts in the call after the next step. The
        keys are:

        - `step`: The steps that the optimizer has taken; of a run that was resumed,
          since its beginning.
        - `exposed_seconds`: The seconds for which the training thread waited for the
          communication queue: for bytes on their way, and for ranks that came later.
          Nothing hid these. They are fewest on the rank that the others wait for.
        - `exchange_seconds`: The seconds for which the communication queue waited for
          answers to its requests, hidden or not. Over NCCL neither time says much,
          because the host does not wait there.
        - `sent_bytes`: The bytes of payload that this rank sent.
        - `density`: The entries that travelled, as a share (0 to 1) of those in the
          buckets whose exchange has ended; 1 for a dense exchange. If none has ended
          since the call before, it is what it was then.
        - `compressed_share`: The share (0 to 1) of gradients, in bytes, whose exchange
          sent fewer bytes than a dense one: `describe` says of which, and why of the
          others not. As the density, it is of what has ended since the call before.
        - `skipped_steps`: How often, since `replicate`, exchanged gradients were
          cleared without an `optimizer.step()`, as by a GradScaler that has found
          infinities. It is counted when the next backward begins. A fused optimizer
          skips within its step, which counts as a step.
        - `residual_norm`: The 2-norm of this rank's residual, in the units of
          gradients, or of steps where these are exchanged (LOCAL). It is there only if
          `residual` is True.
        - `ranks`, `generation`, `lost_ranks`, `lost_steps`: Only with `elastic`: how
          many ranks train now; the number of groups that they have formed so far; and
          how many ranks, and how many of this rank's steps, were lost.
        - `lost_residual_norm`, `lost_residual_share`, `lost_share`: Only with
          `elastic`: what ranks had not delivered that were lost, told as what the
          others have on average: about its 2-norm, in all; when ranks were lost last,
          the share (0 to 1) of what all had not delivered, and the order of that of
          all that they had done. 0 where nothing is left, as by exact schemes.
        - `shortened_rounds`, `left_out_steps`: Only with `elastic`: how many rounds
          this rank has ended sooner, as others waited (`Lighthouse(grace=...)`), and
          how many steps it has left out for that. They are counted in `step`.
        - `waiting_norm`: That of the part of it that waits for parameters which no rank
          trained in the last step: frozen ones, say. It is there with `residual_norm`.

        Args:
            residual: Whether to compute these two norms as well. That applies what is
                deferred first, as `flush` does, so under DEAR this step's exchange
                hides in no forward; and it reads each gradient buffer that has a
                residual once, and waits for its device.

        Returns:
            A new dictionary of numbers, those that are whole of type int.

        Raises:
            RuntimeError: `residual` is True during backward, or between backward and
                step under a deferred schedule.
        """
        more = residual_norms(self._training) if residual else {}
        if (ranks := self._session.regrouping) is not None:
            more |= ranks.numbers()
        return {**self._metrics.read(self._session.trained), **more}

    def describe(self) -> str:
        """Return a table of which bucket travels how, as text. Local.

        A row says which parameters are in a bucket; how many bytes this rank would send
        for it densely, and how many it sends, for each step; and by what, or why it
        travels densely though the scheme says otherwise: too short, in a warm-up,
        before the optimizer is known. Bytes are those `counted` in the bucket's last
        exchange. Before its first one, and after `adopt` has cut buckets anew, those of
        a dense exchange are `foreseen`, and others are not known yet. Where hosts have
        several ranks, bytes are those over their hosts' links.

        Nothing is exchanged, and no tensor is read. Rank 0 logs the table once, when
        `replicate` is over: by `logging`, to "gradtide" at level INFO. What share of
        gradients travels compressed, `metrics` says as a number.

        Returns:
            Lines for people, whose form may change.
        """
        return self._session.describe()

    def adopt(self, scheme: str | Scheme) -> None:
        """Go on with another scheme from the next step on, and lose nothing.

        This is a collective call, between `optimizer.step()` and the next backward.
        Updates that are deferred are applied first. The residual stays with its rank
        for the new collective; a dense exchange delivers it with the next gradients.
        Algorithms start anew if the collective is another one. Otherwise they keep
        their count of steps, and `MomentumCorrection` keeps its velocity. The first
        step of a schedule that defers is an ordinary one, in which the order of the
        modules is recorded.

        Args:
            scheme: The new scheme, the same on every rank, as for `replicate`. Its
                preconditioner has to be the present one. One that exchanges steps
                (LOCAL) may follow any scheme that has left no residual of gradients,
                as exact ones do; one that exchanges gradients cannot follow it.

        Raises:
            RuntimeError: The call comes during backward, inside `no_sync`, or between
                backward and step.
            ValueError: The scheme cannot be used here, or is not the same on all
                ranks. It is raised on every rank, and the replica goes on as before.
        """
        self._session.adopt(scheme)

    def use_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a communication hook for DistributedDataParallel exchange the gradients.

        This is a collective call, between `optimizer.step()` and the next backward. The
        hook takes the scheme's place, until `adopt` is called: it is called in backward
        for every bucket that is full, on the training thread, in the same order on
        every rank, and all futures are waited for when backward ends. What it sends is
        not in `metrics()`. Buckets are gradtide's own, and are cut anew after the first
        backward, as DDP's are.

        Args:
            state: What the hook is given first.
            hook: It is called with the state and a bucket that has the methods of
                `torch.distributed.GradBucket`, and returns a future of the tensor that
                takes the place of `bucket.buffer()`, already divided.

        Raises:
            RuntimeError: The call comes during backward, inside `no_sync`, or between
                backward and step.
            ValueError: The scheme has K-FAC, exchanges steps, or is being chosen.
        """
        self._session.use_comm_hook(state, hook)

    def state_dict(
        self, *, world_size: int | None = None, shards: int | None = None
    ) -> StateDict:
        """Return what this rank needs to go on as if the run had not stopped. Local.

        Save it on every rank, beside the states of model and optimizer. It holds the
        rank's residual by parameter name, under a key of the rank's own, what the
        algorithms remember, and the order of the buckets. Updates that are deferred
        are applied first. It is right for torch.save and for
        torch.distributed.checkpoint.

        Args:
            world_size: The number of ranks of a checkpoint that is to be read with
                torch.distributed.checkpoint: load into what is returned for it. None
                stands for the present number, and is right for saving.
            shards: The number of parts that each of these had of a sharded model, as
                `world_size`: the ranks of a host, where FSDP2 shards inside hosts.

        Returns:
            A dictionary of tensors, strings and dictionaries of these.

        Raises:
            RuntimeError: The call comes between backward and step under a deferred
                schedule.
        """
        return self._session.state_dict(world_size, shards)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict()` returned.

        This is a collective call, before training. Load the optimizer's state first:
        where steps are exchanged (LOCAL), every rank has one of its own, which is in
        here.

        Args:
            saved: This rank's own state. If the number of ranks is another one, it is
                one dictionary with the states of all ranks: their residuals are shared
                out, so that the sum is kept.

        Raises:
            RuntimeError: The scheme still waits for the optimizer: `attach` it.
            ValueError: The state of some rank is damaged or does not fit, or states
                are of different steps. It is raised on every rank, before anything
                changes. Whatever else is raised on some rank is RuntimeError on the
                others.
        """
        self._session.load_state_dict(saved)

    def remove(self, *, end_round: bool = True) -> None:
        """Apply what is deferred, and detach from module and optimizer.

        This is a collective call, between two steps. Afterwards module and optimizer
        are plain ones, and the replica is of no use: its methods raise RuntimeError,
        but for `metrics()`, and for this one, which does nothing then. Residuals are
        dropped: where they matter, `adopt` a dense scheme and take one more step
        before.

        Args:
            end_round: Whether a round that is under way ends first, as by `end_round`.
                With False every rank keeps parameters of its own, and nothing is sent.
        """
        self._session.remove(end_round)
        self.wrapper = None


class Unlinked:
    """What a copy has in the place of a `Replica`: of a model that holds its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this is a copy of a Replica, or was loaded from a pickle, and "
            "has no link to the other ranks: call replicate() for the copied model; "
            "what a run needs to go on is saved by sync.state_dict()"
        )
