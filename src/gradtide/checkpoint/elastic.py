"""What a `Checkpointer` does where ranks come and go.

Ranks agree where they have met, before the first step among others: on their arguments,
on which steps all have whole, and on a name of their own for what they save from now
on, so that files of ranks that were lost meanwhile are never mixed with theirs. If no
rank has a run, it is there that they go on from what was saved. If some have, those
that came later have the items of one of them.

[Note: one step] A step counts if its exchange took effect, and all ranks number it
alike: so the number says whether to save. What one rank has saved, and another has not,
as it was lost, or its step, never counts: it is saved again after the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from gradtide.checkpoint.contents import copied
from gradtide.checkpoint.files import Folder
from gradtide.checkpoint.generations import Missing, new_run, steps_in
from gradtide.checkpoint.loading import Subject
from gradtide.checkpoint.writer import Writer
from gradtide.regrouping import Awaited, Regrouping
from gradtide.runtime.guards.validation import Signature, check_ranks_agree
from gradtide.runtime.own_state import heard
from gradtide.session import Session

LOG = logging.getLogger("gradtide")
PAUSE = 1.0  # seconds before ranks that wait for others look for them again
Prepared = tuple[Subject, bool]  # and whether something was saved


class Keeper(Protocol):
    """A `Checkpointer`, as far as it is asked here."""

    steps: int
    _every: int | None
    _session: Session
    _folder: Folder
    _writer: Writer
    _subject: Subject
    _run: str
    _leads: bool
    _occupied: bool
    _failures: int
    _told: int

    def _step(self, due: bool) -> bool:
        """Save if it is due, and say whether all ranks are to leave."""

    def _save(self) -> None:
        """Save this step."""

    def _resume(self, lossy: bool) -> int:
        """Go on from what was saved."""


@dataclass(frozen=True)
class Words:
    """What a rank says where ranks have met.

    Attributes:
        run: A name for what is saved from now on.
        whole: Steps that all ranks have saved.
        there: Whether its folder has something.
        resumes: Whether to go on from what was saved, and whether `lossy`; or None.
        impatient: Whether it has waited for long enough.
    """

    run: str
    whole: Sequence[int]
    there: bool
    resumes: bool | None
    impatient: bool


class Elastic:
    """Has a Checkpointer go on among other ranks; see [Note: one step]."""

    def __init__(
        self,
        keeper: Keeper,
        ranks: Regrouping,
        prepare: Callable[[], tuple[Prepared, Signature]],
    ) -> None:
        if ranks.opened:
            raise RuntimeError(
                "a Checkpointer where ranks have begun to train: build it between "
                "replicate(elastic=...) and the first sync.meet(), or forward"
            )
        self._keeper, self._ranks, self._prepare = keeper, ranks, prepare
        self._known: tuple[Prepared, Signature] | None = None
        self._resumes: bool | None = None
        self._since: float | None = None  # others are waited for
        self._counted = 0  # steps, when it was looked last whether to save
        keeper._run, keeper._leads, keeper._occupied = "", False, False
        keeper._failures = keeper._told = 0
        ranks.companion = self

    # - What the loop calls ------------------------------------------------------------

    @property
    def lossy(self) -> bool:
        """Whether to go on without what some ranks alone had, as others do for them."""
        return bool(self._resumes)

    def resume(self, lossy: bool) -> int:
        """Go on, where ranks have met, from what was saved, if none has a run. Local.

        Raises RuntimeError once they have.
        """
        if self._ranks.opened:
            raise RuntimeError(
                "resume() where ranks have begun to train: call it before the first "
                "sync.meet(), or forward"
            )
        self._resumes = lossy
        return 0

    def step(self) -> bool:
        """As `Checkpointer.step`; a step that was lost is none."""
        training = self._keeper._session.training
        self._refuse_early()
        if training.lost:
            return False
        self._keeper.steps = now = training.num_steps
        if self._keeper._session.heard.stop:
            # If a rank is lost before all have saved, who is left says it again.
            self._keeper._session.notices.stop = True
        due = self._is_due(now)
        stop = training.surviving(self._keeper._step)(due)
        self._ranks.ended |= bool(stop)
        return bool(stop)

    def save(self) -> None:
        """As `Checkpointer.save`."""
        training = self._keeper._session.training
        self._refuse_early()
        if not training.lost:
            self._keeper.steps = training.num_steps
            training.surviving(self._keeper._save)()

    def _refuse_early(self) -> None:
        if not self._ranks.opened:
            raise RuntimeError(
                "ranks have not met: begin each turn of the loop with sync.meet()"
            )

    def _is_due(self, now: int) -> bool:
        """Whether to save, after so many steps.

        A slow rank may leave steps of a round out: with a grace a round ends first.
        """
        training, every = self._keeper._session.training, self._keeper._every
        graced = self._keeper._session.notices.grace is not None
        if every is None or (graced and training.step.position):
            return False
        before, self._counted = self._counted, now
        return now // every > before // every

    # - Where ranks have met -----------------------------------------------------------

    def meet(self, source: int | None, late: Sequence[bool]) -> None:
        """Go on among these ranks: as `regrouping.Companion.meet`."""
        keeper, session = self._keeper, self._keeper._session
        transport, writer = session.engine.transport, self._keeper._writer
        group = transport.group
        writer.wait()

        def prepare() -> tuple[Prepared, Signature]:
            self._known = self._known or self._prepare()
            return self._known

        remedy = "pass the same to Checkpointer() on every rank"
        keeper._subject, there = check_ranks_agree(transport, prepare, remedy)
        told: list[Words] = transport.gather_objects(self._words(there))
        keeper._run = max(words.run for words in told)
        whole = {*chain.from_iterable(words.whole for words in told)}
        writer.begin_among(group.rank, whole, keeper._told)
        keeper._failures = keeper._told = 0
        keeper._leads = any(host[0] == group.rank for host in transport.hosts)
        session.notices.saves = writer
        if source is None:
            self._begin(told)
        else:
            keeper._occupied = False
            self._tell(source, late)
        keeper.steps = self._counted = session.trained.num_steps
        if source is not None:  # what is not known to be whole is saved again
            self._counted = max(writer.whole, default=0)

    def _words(self, there: bool) -> Words:
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        impatient = waited > self._ranks.patience
        how = there, self._resumes, impatient
        return Words(new_run(self._keeper._run), self._keeper._writer.whole, *how)

    def _begin(self, told: Sequence[Words]) -> None:
        """No rank has a run: go on from what was saved, or begin one."""
        wishes = [words.resumes for words in told]
        if len({*wishes}) > 1:
            calls = {None: "none", False: "resume()", True: "resume(lossy=True)"}
            who = ", ".join(f"rank {r}: {calls[w]}" for r, w in enumerate(wishes))
            raise ValueError(
                f"ranks do not go on from the same ({who}): call resume() on every "
                "rank with the same `lossy`, before the first sync.meet(), or on none"
            )
        self._keeper._occupied = any(words.there for words in told)
        if wishes[0] is None:
            return
        try:
            self._keeper._resume(lossy=wishes[0])
        except Missing as error:
            if any(words.impatient for words in told):
                raise
            if self._since is None:
                self._since = time.monotonic()
                LOG.warning("ranks are waited for that may have files: %s", error)
            time.sleep(PAUSE)
            raise Awaited(str(error)) from error

    def _tell(self, source: int, late: Sequence[bool]) -> None:
        """Have those that are late have the items of a rank that has a run."""
        if not any(late):
            return
        session, subject = self._keeper._session, self._keeper._subject
        rank, groups = session.engine.group.rank, subject.optimizer.param_groups

        def words() -> dict[str, Any]:
            hyper = [{k: v for k, v in g.items() if k != "params"} for g in groups]
            items = subject.items.copies()
            return {"items": items, "groups": copied(hyper, "the optimizer")}

        run = heard(session.engine, source, words, "what a Checkpointer saves")

        def load() -> tuple[None, Signature]:
            if late[rank]:
                subject.items.check(run["items"])
                subject.items.load(run["items"])
                for group, then in zip(groups, run["groups"], strict=True):
                    group.update(then)  # where each rank has its own optimizer's state
            return None, {}

        check_ranks_agree(session.engine.transport, load)
        newest = max(steps_in(self._keeper._folder), default=0)
        if late[rank] and not self._ranks.opened and newest > session.trained.num_steps:
            LOG.warning(
                "rank %d has files of step %d, and came when others had begun: they "
                "train from step %d on. If that is not what you want, end all ranks, "
                "and have the lighthouse wait for as many as saved (--min_replicas)",
                rank,
                newest,
                session.trained.num_steps + 1,
            )
