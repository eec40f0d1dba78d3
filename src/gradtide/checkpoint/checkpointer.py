"""Saving while training goes on, going on from what was saved, and an orderly end."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from signal import SIGTERM, SIGUSR1
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.checkpoint import files
from gradtide.checkpoint.contents import Items, random_states, set_random
from gradtide.checkpoint.elastic import Elastic
from gradtide.checkpoint.files import Folder
from gradtide.checkpoint.generations import (
    Held,
    Listing,
    Plan,
    choose,
    listing,
    new_run,
    nowhere,
    out_of,
    read,
    remedies_without,
)
from gradtide.checkpoint.loading import Contents, Loading, State, Subject
from gradtide.checkpoint.neighbours import check_copies, copies_of
from gradtide.checkpoint.sending import send
from gradtide.checkpoint.signals import Signals
from gradtide.checkpoint.writer import Writer
from gradtide.replica import Replica
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.session import accumulates
from gradtide.transport import Transport, seconds_of

LOG = logging.getLogger("gradtide")


class SaveError(RuntimeError):
    """Some rank could not write what it saved: it is raised on all, at the same step.

    What was saved before is whole. Who catches it, on every rank, can train on.
    """


class Checkpointer:
    """Saves a run as it goes on, resumes it, and ends it in order.

    Every rank has one, with the same arguments. The constructor is a collective call.
    Where ranks come and go (`elastic=...`) it is a local one, behind `replicate` and
    before the first `Replica.meet`, or forward, in which ranks agree on their
    arguments, and resume.
    Beside model, optimizer and the replica's residuals, the states of random numbers
    (torch, Python, NumPy if it is imported, the model's device) are saved, so that a
    run that is resumed is the undisturbed run, bit for bit.

    Each rank writes a file of its own, and the first rank of each host another one of
    what all have in common, model and optimizer. Hosts may share the folder, or have
    one each. A thread writes, after a copy to host memory was made, for which training
    waits: that takes as much memory as what is saved, and a save waits until the one
    before is written. Files are complete or not there, whatever is killed; what was
    saved before stays until all ranks have a later step whole, and its copies.

    Attributes:
        steps: How many steps `step` has counted, also of the runs before this one;
            where ranks come and go, as many as `Replica.meet` has counted.
        values: What the callables among the items returned when that was saved which
            this run has gone on from.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sync: Replica,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        every: int | None = None,
        keep: int = 2,
        copies: int = 0,
        signals: Sequence[int] = (SIGTERM, SIGUSR1),
        **items: Any,
    ) -> None:
        """Begin to watch signals; nothing is saved or loaded yet.

        Args:
            folder: Where to save, a path or an address of fsspec's ("s3://..."): this
                run's own. It need not be there.
            sync: The replica of the model.
            model: The model, with parameters that are not sharded.
            optimizer: Its optimizer; where there are two, another one is an item.
            every: After how many steps to save. None saves when all are to stop, and
                when `save` is called.
            keep: How many steps stay; one more while it is not known that all ranks
                have the last one.
            copies: On how many other hosts a rank's own file is kept, too, where hosts
                do not share the folder: a rank whose host was replaced goes on by it.
                It is sent to the next hosts in the background. Where there are fewer
                other hosts there are fewer copies, and a warning.
            signals: What ends the run in order, at whichever rank it arrives. A second
                signal has the handler that was there before, as by default ends the
                process at once.
            items: What else to save, by name: whatever has `state_dict` and
                `load_state_dict` (schedulers, a GradScaler, samplers), a
                `torch.Generator`, or a callable that returns a value to find in
                `values` again.

        Raises:
            TypeError: An item is none of these.
            ValueError: Arguments cannot be used, or differ between ranks. It is raised
                on every rank.
        """
        self._session, transport = sync._session, sync.engine.transport
        self.steps = 0
        group, host = transport.group, _host_of(transport)
        self._folder = Folder(folder)

        def prepare() -> tuple[tuple[Subject, bool], Signature]:
            elastic = self._session.regrouping is not None
            if not os.fspath(folder):
                raise ValueError(f"folder={folder!r}: name this run's own folder")
            check_copies(copies, self._folder, elastic)
            if self._session.training.placement.shards:
                raise ValueError(
                    "the model is sharded: put sync.state_dict() into what "
                    "torch.distributed.checkpoint saves"
                )
            if (every is not None and not _counts(every)) or not _counts(keep):
                told = f"every={every!r}, keep={keep!r}"
                raise ValueError(f"{told}: whole numbers, from 1 on")
            if every is not None:
                try:
                    self._folder.make()
                except OSError as error:
                    raise ValueError(f"nothing can be saved: {error}") from error
            subject = Subject(model, optimizer, Items(items))
            subject.validate()
            there = not listing(self._folder).empty
            alike = {"every": every, "keep": keep, "copies": copies}
            return (subject, there), {**alike, "items": sorted(items)}

        self._has_copies = bool(copies)
        self._elastic: Elastic | None = None
        if (ranks := self._session.regrouping) is not None:
            self._every, self._writer = every, Writer(self._folder, 0, keep)
            self._elastic = Elastic(self, ranks, prepare)
            self._signals = Signals(signals, self.stop)
            return
        remedy = "pass the same on every rank"
        self._subject, there = check_ranks_agree(transport, prepare, remedy)
        told = transport.gather_objects((new_run(), there))
        self._run, self._occupied = told[0][0], any(there for _, there in told)
        self._every, self._leads = every, host[0] == group.rank
        seconds = seconds_of(self._session.process_group)
        kept = copies_of(transport, self._folder, copies, seconds)
        self._writer = Writer(self._folder, group.rank, keep, kept)
        # Failures of saves: on all ranks together, and of this rank's those told.
        self._failures = self._told = 0
        self._session.notices.saves = self._writer
        self._signals = Signals(signals, self.stop)

    @property
    def values(self) -> Mapping[str, Any]:
        known: Subject | None = getattr(self, "_subject", None)  # once ranks have met
        return {} if known is None else known.items.values

    @property
    def _transport(self) -> Transport:
        return self._session.engine.transport

    def stop(self) -> None:
        """Have all ranks save and leave after the same step. Local, on any rank."""
        self._session.notices.stop = True

    # - Steps --------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step, save if it is due, and say whether all ranks are to leave.

        Call it on every rank, after `optimizer.step()` and before the next backward,
        also where a GradScaler has skipped that. No message is sent for it: that a rank
        is to stop travels with those of training. It is heard in the step in which the
        signal came; where updates are deferred in the one after; in a round of several
        steps with its exchange.

        Returns:
            Whether to leave the loop, alike on all ranks after the same step. All have
                saved it then.

        Raises:
            SaveError: Some rank could not write: a full disk, say. All ranks raise it
                after the same step, with its reason. Who catches it can train on.
            RuntimeError: `resume` was not called, and the folder is one of another run;
                or the call comes during backward, or inside `no_sync` or `join`.
        """
        if self._elastic is not None:
            return self._elastic.step()
        self.steps += 1
        return self._step(self._every is not None and self.steps % self._every == 0)

    def _step(self, due: bool) -> bool:
        """Save if it is due, and say whether all ranks are to leave."""
        heard = self._session.heard
        self._writer.confirm(heard.whole)
        if heard.stop or due:
            self._save()
        if heard.stop:
            self._writer.wait()
            self._refuse(self._writer.reasons[-1:] if self._writer.torn else [])
        elif heard.failures > self._failures:
            self._failures = heard.failures
            self._writer.give_up()
            self._refuse(self._writer.reasons)
        return heard.stop

    def save(self) -> None:
        """Save this step now: on every rank, after the same one. It is not waited for.

        Raises:
            RuntimeError: As by `step`.
        """
        if self._elastic is not None:
            self._elastic.save()
        else:
            self._save()

    def _save(self) -> None:
        if self._writer.closed:
            raise RuntimeError("a save after close(): build another Checkpointer")
        if self._occupied:
            raise RuntimeError(
                f"{self._folder.path('')} has what another run has saved: call "
                "resume() before the first step, or take another folder"
            )
        training = self._session.training
        if training.step.open or accumulates(self._session):
            raise RuntimeError("a save during backward or in no_sync(): save after it")
        if training.actions.members.inside:
            raise RuntimeError("a save inside join(), where ranks end at other steps")
        self._writer.wait()
        own, common = self._copies(self._leads)
        kinds = {"rank": own, "common": common} if self._leads else {"rank": own}
        self._writer.save({**self._about, "step": self.steps}, kinds)

    def _refuse(self, reasons: Sequence[str]) -> None:
        """Raise SaveError on all ranks if any has reasons; a collective call."""
        self._told = self._writer.failures
        told = enumerate(self._transport.gather_objects(list(reasons)))
        words = [f"rank {rank}: {own[-1]}" for rank, own in told if own]
        if words:
            raise SaveError(
                f"what was saved up to step {self.steps} is not whole: "
                f"{'; '.join(words)}. What was saved before that is"
            )

    def close(self) -> None:
        """Wait for what is being written, and give signals back. Local.

        Raises:
            SaveError: A save could not be written, and this rank was not told of it.
        """
        self._signals.restore()
        self._writer.close()
        if self._session.notices.saves is self._writer:
            self._session.notices.saves = None
        if self._writer.failures > self._told:
            self._told = self._writer.failures
            raise SaveError(f"a save failed: {self._writer.reasons[-1]}")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SaveError:
            if error is None:  # else that is what ends the run
                raise

    # - Going on -----------------------------------------------------------------------

    def resume(self, *, lossy: bool = False) -> int:
        """Go on from the newest step that all ranks have saved. A collective call.

        Call it before training, on every rank. Which step that is all agree on; files
        that are on another host are sent. All is read and checked on every rank before
        anything changes. With another number of ranks than saved it residuals are
        divided so that their sum is kept; of each rank's own items and random numbers
        what the old rank of its number had is taken, if there was one. Where a disk was
        replaced, a rank goes on with a residual of zero and with the items of another
        one, and warns of it.

        Args:
            lossy: Whether to go on without the files of some ranks in other cases, too.

        Returns:
            The number of steps taken; 0 if nothing was saved. Where ranks come and go
                it is what `Replica.meet` returns next, for it is there that all go on;
                here it is 0.

        Raises:
            ValueError: No step is whole on all ranks, or what was saved does not fit.
                It is raised on every rank, with who has what; nothing has changed,
                unless an item did not take its state.
        """
        if self._elastic is not None:
            return self._elastic.resume(lossy)
        if self._session.waiting:  # for the optimizer, which is known here
            self._session.attach(self._subject.optimizer)
        return self._resume(lossy)

    def _resume(self, lossy: bool) -> int:
        self._occupied = False
        found = self._read(lossy)
        if found is None:
            return 0
        plan, contents, fetched = found
        self._load(contents, plan)
        self._writer.begin_at(self.steps)
        if self._has_copies and plan.generation.size == self._transport.group.size:
            self._writer.restore(self.steps, fetched)
        return self.steps

    def _read(self, lossy: bool) -> tuple[Plan, Contents, dict[str, bytes]] | None:
        """What this rank has to load, and files that it had not; collective."""
        rank, size = self._transport.group

        def look() -> tuple[Any, Signature]:
            return listing(self._folder), {}

        own = check_ranks_agree(self._transport, look, "")
        told: list[Listing] = self._transport.gather_objects(own)
        torn: list[tuple[int, Held]] = []
        while True:
            plan = choose(told, torn, lossy)
            if plan is None:
                if any(each.files for each in told) and rank == 0:
                    warnings.warn(
                        "the first save was interrupted: training begins anew",
                        stacklevel=3,
                    )
                return None
            everything = self._session.kfac is not None
            needs = [plan.needs(r, size, everything) for r in range(size)]
            data, odd = read(self._folder, plan, needs, rank)
            broken = self._transport.gather_objects(odd)
            if not any(broken):
                break
            torn += [(r, each) for r, more in enumerate(broken) for each in more]
        damaged = out_of(told, torn)
        if damaged and rank == 0:
            step = plan.generation.step
            LOG.warning("step %d is gone on from; damaged files: %s", step, damaged)
        self._send(plan, needs, data)

        def put_together() -> tuple[Contents, Signature]:
            own = {name: data[name] for name in needs[rank]}
            return Contents.of(own, plan, rank), {}

        contents = check_ranks_agree(self._transport, put_together, "")
        return plan, contents, {n: data[n] for n in plan.missed(rank, self._leads)}

    def _send(
        self, plan: Plan, needs: Sequence[Sequence[str]], data: dict[str, bytes]
    ) -> None:
        """Have each rank have the files that it needs; collective."""
        own = {name: len(piece) for name, piece in data.items()}
        lengths = self._transport.gather_objects(own)
        for receiver, names in enumerate(needs):
            for name in names:
                source = plan.source(name, receiver)
                if source == receiver:
                    continue
                ends, length = (source, receiver), lengths[source][name]
                how = ends, self._subject.device
                got = send(self._session.engine, data.get(name), length, *how)
                if got is not None:
                    data[name] = got

    def _load(self, contents: Contents, plan: Plan | None) -> None:
        """Load what all ranks have read; a collective call."""
        lost = [] if plan is None else list(plan.lost)
        alone = self._session.scheme.schedule.launch == "step" or self._session.kfac
        if plan and lost and alone and not (self._elastic and self._elastic.lossy):
            common = f"step-{contents.step}/{plan.common(self._transport.group.rank)}"
            remedy = remedies_without(self._folder.path(common), self._elastic)
            raise ValueError(f"{nowhere(lost)}, and {remedy}")
        loading = Loading(self._subject, contents)
        self._session.load_state_dict(contents.sync, loading)
        self.steps = contents.step
        if contents.random is not None:
            set_random(contents.random, self._subject.device)
        rank = self._transport.group.rank
        if lost and rank in (0, *lost):
            warnings.warn(
                f"{nowhere(lost)}: what these ranks had not delivered is lost, a "
                "residual begins at zero"
                + f"; rank {rank} has the items of another rank"
                * (rank in lost),
                stacklevel=3,
            )

    # - What is saved ------------------------------------------------------------------

    @property
    def _about(self) -> State:
        rank, size = self._transport.group
        return {"run": self._run, "size": size, "rank": rank}

    def _copies(self, whole: bool) -> tuple[State, State]:
        """Copies of what this rank alone has and, if `whole`, of what all have."""
        training, session = self._session.training, self._session
        if training.step.held:  # a GradScaler has skipped the step
            training.gather()
        self._subject.consolidate()
        sync = {k: _on_host(v) for k, v in session.state_dict(None, None).items()}
        own, common = self._subject.copies(whole)
        own |= {"sync": sync, "random": random_states(self._subject.device)}
        if whole:
            common["sync"] = {k: v for k, v in sync.items() if not k.startswith("rank")}
        return own, common

    # - As a part of what torch.distributed.checkpoint saves ---------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank saves, for torch.distributed.checkpoint. Local.

        What is not the replica's is there as bytes: a checkpoint is read into the keys
        that are there, and what an optimizer holds is not known before its first step.

        Returns:
            A dictionary of tensors, bytes and dictionaries of these.

        Raises:
            RuntimeError: The call comes between backward and step under a deferred
                schedule.
        """
        own, common = self._copies(True)
        sync = own.pop("sync")
        about = {**self._about, "step": self.steps}
        rank = self._transport.group.rank
        return {
            "sync": sync,
            "common": files.packed(common, {**about, "kind": "common"}),
            f"rank{rank}": files.packed(own, {**about, "kind": "rank"}),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with as many ranks. Collective.

        Args:
            saved: This rank's own state.

        Raises:
            ValueError: The state of some rank is damaged or does not fit, or states are
                of different steps. It is raised on every rank, before anything changes.
        """
        if self._elastic is not None:
            raise ValueError("load_state_dict() where ranks come and go: use resume()")
        rank = self._transport.group.rank

        def read() -> tuple[Contents, Signature]:
            found = Contents.of_state(saved, rank)
            return found, {"the state's run": found.run, "the state's step": found.step}

        contents = check_ranks_agree(self._transport, read, "")
        self._occupied = False
        self._load(contents, None)


def _host_of(transport: Transport) -> Sequence[int]:
    """The ranks of this rank's host."""
    return next(host for host in transport.hosts if transport.group.rank in host)


def _counts(value: object) -> bool:
    return type(value) is int and value > 0


def _on_host(value: Any) -> Any:
    """Tensors in host memory; those that are there are copies already."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    return value
