"""Ranks that come and go while the others train on.

Who is there is decided by a lighthouse of torchft's (Meta, BSD licence), which is a
process of its own: `torchft_lighthouse --min_replicas 2`. Every rank tells it that it
lives, asks it who is there after each step that exchanged something, and trains with
those. The others go on when a rank is lost, and a rank that comes, or comes back, gets
all that it has to know from one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch

from gradtide.core.engine import Engine
from gradtide.core.membership import Member, Roster, Standing
from gradtide.core.transport import CommunicationError
from gradtide.transport import generations
from gradtide.transport.grace import StoreGrace

LOG = logging.getLogger("gradtide")

ALIVE = 0.25  # seconds between two signs of life
BEAT = 2.0  # seconds for a sign of life to arrive
AGAIN = 0.5  # seconds before a lighthouse that does not answer is asked again
REMEDY = (
    "start it by `torchft_lighthouse --min_replicas 2`, on a host that all ranks "
    "reach, and pass its address: elastic='http://host:29510'"
)


class Trained(Protocol):
    """A replica, as far as it is asked here."""

    @property
    def engine(self) -> Engine: ...

    def meet(self) -> int: ...


class Batches:
    """What of a data set each rank reads in each step: a global batch, dealt out.

    An epoch is a permutation of all samples, and every step takes the next ones of it.
    Whoever is there shares them: so no sample is read twice in an epoch, none is left
    out, and the steps of an epoch stay as many, whatever ranks are lost or come. The
    samples of a step that is lost are dealt out again. Where the number of ranks does
    not divide a batch, some have one sample more; every rank counts alike in the mean.

    Where a slow rank leaves steps of a round out (`Lighthouse(grace=...)`), nobody
    reads its samples of those: about `left_out_steps` (`Replica.metrics`) times `size`
    over the number of ranks. The next epoch has all again.

    Iterate over it for good: each item is this rank's samples, a list of their numbers,
    of the step that comes next. Where ranks meet anew, they do so before that.

    Args:
        sync: What `replicate(elastic=...)` returned.
        length: How many samples there are.
        size: How many samples all ranks together take in a step.
        seed: Of the permutations, the same on every rank.

    Raises:
        ValueError: There are fewer samples than a step takes, or fewer in a step than
            ranks.
    """

    def __init__(self, sync: Trained, length: int, size: int, *, seed: int = 0) -> None:
        if not 0 < size <= length:
            raise ValueError(f"size={size!r}: 1 to {length}, the number of samples")
        self._sync, self._length, self._size = sync, length, size
        self._seed = seed
        self._known: tuple[int, list[int]] = -1, []

    @property
    def steps_in_epoch(self) -> int:
        """How many steps an epoch takes."""
        return -(-self._length // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            epoch, step = divmod(self._sync.meet(), self.steps_in_epoch)
            rank, ranks = self._sync.engine.group
            batch = self._order(epoch)[step * self._size :][: self._size]
            if ranks > len(batch):
                raise ValueError(
                    f"size={self._size}, length={self._length}: {ranks} ranks share "
                    f"{len(batch)} samples in this step; choose a size that leaves more"
                )
            yield batch[rank::ranks]

    def _order(self, epoch: int) -> list[int]:
        """All samples, as an epoch takes them."""
        if self._known[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(
                self._length, generator=generator, dtype=torch.int64, device="cpu"
            )
            self._known = epoch, order.tolist()
        return self._known[1]


class Counter(Protocol):
    """A client of a lighthouse, as torchft's `LighthouseClient` is one."""

    def heartbeat(self, replica_id: str, timeout: timedelta = ...) -> None: ...

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Any, object] | None = None,
    ) -> Any: ...


class Lighthouse:
    """The ranks that a lighthouse sees, for `replicate(elastic=...)`.

    Args:
        address: The lighthouse's, such as "http://host0:29510".
        name: This rank's, which no other rank of the job has; ranks are numbered in the
            order of their names. None stands for a new one.
        timeout: Seconds for which a rank of the group is waited for that lives and does
            not come; also the timeout of the process group.
        grace: In rounds, seconds for which ranks that have come to the end of a round
            wait for slower ones, before they ask these to end theirs: above 0 and below
            `timeout`, and the same on every rank. A rank that is asked ends its round
            with the step that is under way, and goes on with the others. What its steps
            did counts as ever, in the same mean: after 3 steps of 10 it adds what these
            3 did, with the weight (`Replica.weight`) of a rank that has done all. It
            does not make up for the others, whose number of steps it goes on from. So
            the others wait for `grace` and a step of the slowest rank at most, and
            something for the word to travel. None, the default, waits for all steps.
        patience: Seconds for which too few ranks, a lighthouse that does not answer, or
            ranks that have files of a checkpoint, are waited for, before training ends
            with an error.

    Raises:
        ImportError: torchft is not installed.
        ValueError: An argument is wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        timeout: float = 300.0,
        grace: float | None = None,
        patience: float = 1800.0,
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"the lighthouse's address is {address!r}: {REMEDY}")
        for what, seconds in (("timeout", timeout), ("patience", patience)):
            if not seconds > 0:
                raise ValueError(f"{what}={seconds!r}: a number of seconds above 0")
        if grace is not None and not 0 < grace < timeout:
            raise ValueError(
                f"grace={grace!r}: a number of seconds above 0 and below timeout="
                f"{timeout!r}, when a rank is taken for lost"
            )
        self.grace = None if grace is None else StoreGrace(float(grace))
        self.address, self.name = address, name or uuid.uuid4().hex
        self._timeout, self.patience = float(timeout), float(patience)
        self._store: Any = None
        self._where = ""
        self._asked: Future[Roster | None] | None = None
        self._counted: Roster | None = None  # with this rank, in the last answer
        self._counter: Counter | None = None  # that of questions
        self._closed = threading.Event()
        self._alive: threading.Thread | None = None
        connect()  # says what is missing, before anything is begun

    def ask(self, standing: Standing) -> None:
        """Have the ranks counted, for the next step; returns at once."""
        if self._store is None:
            self._store, self._where = generations.open_store()
            self._alive = threading.Thread(
                target=self._live, name="gradtide lives", daemon=True
            )
            self._alive.start()
            # A thread that comes back from torchft's code while the interpreter is torn
            # down aborts the process.
            atexit.register(self.close)
        before, asked = self._asked, Future[Roster | None]()
        self._asked = asked

        def ask() -> None:
            if standing.lost:
                self._decline(before)
            self._ask(asked, standing)

        threading.Thread(target=ask, name="gradtide asks", daemon=True).start()

    def answer(self) -> Roster | None:
        """Wait for it; None if nobody has asked, or nobody could count."""
        asked, self._asked = self._asked, None
        self._counted = None if asked is None else asked.result()
        return self._counted

    def form(self, roster: Roster) -> None:
        """Make these ranks the default process group."""
        names = [member.name for member in roster.members]
        stores = [member.store for member in roster.members]
        how = names.index(self.name), self._timeout
        self._counted = None
        if self.grace is not None:
            self.grace.rest()
        generations.form(roster.number, stores, *how)
        if self.grace is not None:
            self.grace.begin(roster.number, stores[0])

    def close(self) -> None:
        """Take part no more."""
        self._closed.set()
        atexit.unregister(self.close)
        if self.grace is not None:
            self.grace.close()
        if self._alive is not None and self._alive.is_alive():
            self._alive.join(2 * BEAT)

    def _live(self) -> None:
        """Tell the lighthouse that this process lives, as long as it does."""
        client: Counter | None = None
        while not self._closed.wait(ALIVE):
            try:
                client = client or self._client(BEAT)
                client.heartbeat(self.name, timedelta(seconds=BEAT))
            except Exception:  # whoever asks next says why
                client = None

    def _decline(self, before: Future[Roster | None] | None) -> None:
        """Tell those that were counted with this rank that it does not come to them.

        It has lost another one since, and what it said of itself is true no more. What
        it has asked `before`, and not heard, would count it, too.
        """
        roster = self._counted
        if before is not None:
            with contextlib.suppress(CommunicationError):
                roster = before.result()
        if roster is not None:
            generations.decline(roster.number, roster.members[0].store)

    def _ask(self, asked: Future[Roster | None], standing: Standing) -> None:
        """Ask until there is an answer; one that is not lost can do without."""
        deadline = time.monotonic() + self.patience
        while True:
            left = max(deadline - time.monotonic(), 1.0)
            try:
                self._counter = self._counter or self._client()
                counted = self._counter.quorum(
                    self.name,
                    timedelta(seconds=left),
                    store_address=self._where,
                    step=max(standing.progress, 0),
                    world_size=1,
                    shrink_only=False,
                    data=dict(standing.tell()),
                )
                asked.set_result(_roster(counted))
                return
            except Exception as error:
                self._counter = None
                if self._closed.is_set():
                    asked.set_result(None)
                    return
                if time.monotonic() > deadline:
                    asked.set_exception(
                        CommunicationError(
                            f"{self.name}: no quorum within {self.patience:g} s by "
                            f"the lighthouse at {self.address} ({_first_line(error)}): "
                            f"too few ranks live, or it is not there; {REMEDY}"
                        )
                    )
                    return
                if not standing.lost:
                    LOG.warning(
                        "the lighthouse at %s does not answer (%s): training goes on "
                        "among those who are there",
                        self.address,
                        _first_line(error),
                    )
                    asked.set_result(None)
                    return
            time.sleep(AGAIN)

    def _client(self, seconds: float = 5.0) -> Counter:
        made: Counter = connect()(self.address, timedelta(seconds=seconds))
        return made


def connect() -> Any:
    """torchft's client; ImportError, with the remedy, where it is not installed."""
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise ImportError(
            "elastic training has its ranks counted by torchft: install "
            f"gradtide[elastic] ({error})"
        ) from error
    return LighthouseClient


def _roster(counted: Any) -> Roster:
    """What a quorum says, in the order of names."""
    created = counted.created
    number = f"{counted.quorum_id}.{created.seconds}.{created.nanos}"
    members = []
    for one in sorted(counted.participants, key=lambda one: one.replica_id):
        data = one.data or {}
        with contextlib.suppress(TypeError, ValueError):
            told = int(data["progress"]), bool(data["lost"]), str(data["run"])
            standing = Standing(*told)
            members.append(Member(one.replica_id, one.store_address, standing))
    return Roster(number, members, since=str(counted.quorum_id))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
