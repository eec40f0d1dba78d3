"""Where the ranks meet before anything else works: a store, and deadlines.

The store is torch's own, at the address at which training would have it. What is left
there is JSON: nothing that a stranger could leave is ever executed. Whoever does not
come in time is named; nobody waits longer.
"""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from gradtide.core.torch_internals.distributed import TCPStore
from gradtide.lab.place import Place
from gradtide.transport.addresses import loops

NAP = 0.02  # seconds between two looks
ROOT = 0  # the rank that gathers, decides and reports


class Unmet(RuntimeError):
    """This rank could not come to the meeting, or was left alone in it."""


class Meeting:
    """The ranks that have come to the store of a job."""

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self._kept = _store(place, seconds)
        prefix = f"gradtide doctor/{place.attempt}"
        self.store: Store = PrefixStore(prefix, self._kept)
        self._turn = 0
        if self.store.add(f"came/{place.rank}", 1) > 1:
            raise Unmet(
                f"two processes have RANK={place.rank}: give each a rank of its own"
            )

    def gather(self, own: Any, extra: float = 0.0) -> dict[int, Any]:
        """What each rank gives, by rank, on ROOT, without those that did not in time.

        Elsewhere empty, at once. ROOT waits for `extra` seconds longer than usual.
        """
        self._turn += 1
        self.store.set(f"{self._turn}/{self.place.rank}", json.dumps(own))
        if self.place.rank != ROOT:
            return {}
        deadline, found = time.monotonic() + self.seconds + extra, {}
        missing = list(range(self.place.size))
        while missing and time.monotonic() < deadline:
            came = [r for r in missing if self.store.check([f"{self._turn}/{r}"])]
            for r in came:
                found[r] = json.loads(self.store.get(f"{self._turn}/{r}"))
            missing = [r for r in missing if r not in found]
            time.sleep(NAP)
        return dict(sorted(found.items()))

    def tell(self, words: Any = None, extra: float = 0.0) -> Any:
        """What ROOT says, on every rank. Raises Unmet where it says nothing in time.

        Others wait for twice as long as ROOT does for them, and `extra` seconds.
        """
        self._turn += 1
        key = f"{self._turn}/told"
        if self.place.rank == ROOT:
            self.store.set(key, json.dumps(words))
            return words
        deadline = time.monotonic() + 2 * self.seconds + extra
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise Unmet(f"rank {ROOT} came, and then went silent: see its host")
                time.sleep(NAP)
            return json.loads(self.store.get(key))
        except Unmet:
            raise
        except RuntimeError as error:
            raise Unmet(f"the process that hosts the store is gone ({error})") from None

    def part(self) -> None:
        """Leave, ROOT last: it may be the one that has the store."""
        self.store.add("left", 1)
        deadline = time.monotonic() + 2.0
        while self.place.rank == ROOT and time.monotonic() < deadline:
            if self.store.add("left", 0) == self.place.size:
                return
            time.sleep(NAP)


def _store(place: Place, seconds: float) -> Store:
    here = f"MASTER_ADDR={place.address}, MASTER_PORT={place.port}"
    own = place.rank == ROOT and not place.hosted
    try:
        at = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unmet(
            f"{here}: this host knows no such name ({error.strerror}): set an address"
        ) from None
    address = str(at[0][4][0])
    if not own:
        _knock(place, address, here, seconds)
    try:
        return TCPStore(
            place.address,
            place.port,
            place.size,
            own,
            timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        if own:
            told = f"rank 0 cannot listen there; is another job using the port? {told}"
        raise Unmet(f"{here}: {told}") from None


def _knock(place: Place, address: str, here: str, seconds: float) -> None:
    """Wait until somebody listens where the ranks meet. Raises Unmet."""
    deadline, why = time.monotonic() + seconds, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, place.port), left).close()
            return
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            time.sleep(min(0.1, left))
    loop = ""
    if loops(address) and address != place.address:
        loop = f"; {place.address} stands for {address} here, which is this host itself"
    raise Unmet(
        f"{here}: rank {place.rank} on {socket.gethostname()} reached nobody there in "
        f"{seconds:g} seconds ({why}){loop}: rank 0 did not start, or a firewall is in "
        "between"
    )
