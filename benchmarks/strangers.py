"""Strangers at every port: do ranks train on as if nobody had called?

    python benchmarks/strangers.py --out benchmarks/records/strangers_202611.json

Ranks train, remove the replica and begin anew, so that they connect again and again.
Meanwhile strangers call at every TCP port and Unix socket on which a rank listens: they
send noise of all lengths, lengths without end, pickles that would make a file, a byte
now and then, nothing at all, and what ranks of an earlier run or of this one have said.
Each job is run without strangers first. Weights have to end with the same bits, every
rank by itself, and each stranger has a line of the log at most.

Three kinds of sockets are told apart: those of gradtide (`doors`), that of torch's
store (`store`), and those of Gloo, by which torch's own collectives travel (`gloo`).
What happens at the latter two is torch's doing; it is measured and told all the same.
In the last jobs strangers fill the doors before any rank has called there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing as mp
import os
import pickle
import random
import resource
import socket
import struct
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo  # or every rank does, at length
import torch.distributed as dist
import typer
from torch import nn

import gradtide
from gradtide.lab.record import commit, machine, versions
from gradtide.lab.spec import split_schemes
from gradtide.runtime import join  # noqa: F401  # as above
from gradtide.runtime.ahead import prepare
from gradtide.scheme import as_scheme
from gradtide.transport.doors import Door
from gradtide.transport.link import MARK
from gradtide.transport.opening import HELLO, Meeting

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

c10d: Any = dist  # whose stores are not exported for mypy

SCHEMES = "wfbp,topka2a(0.02, schedule='local', warmup=6, wire='e3m0')"
WAYS = "unix", "tcp"  # by which ranks are connected; strangers come by both
LIMIT = 120.0  # seconds that a job may take
FILES = 1024  # that a process may open, as systems are shipped
STEPS = 10  # of each training
CALLERS = 4  # threads that call
KEPT = 48  # calls that each of them leaves open
CALL = 0.02  # seconds for a call: a door that nobody answers may have no room
LONGEST = 1 << 16  # bytes of a message
HUGE = struct.pack("<Q", 1 << 62), struct.pack("!Q", 1 << 62), b"\xff" * 16
SMALL = [struct.pack("<Q", number) for number in range(8)]  # as Gloo numbers its pairs


# - The ranks --------------------------------------------------------------------------


def watch(notes: Path, job: Job) -> None:
    """Have this process note its doors' words, and who has called.

    Whoever finds a door has a head start: then its rank goes on.
    """
    listen, answer = Meeting._listen, Meeting.answer

    def note(*words: Any) -> None:
        with notes.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def listened(self: Meeting, word: bytes) -> Door:
        door = listen(self, word)
        note("door", word.hex(), door.port, door.name)
        time.sleep(job.head_start)
        return door if job.way == "unix" else door._replace(name="")

    def answered(self: Meeting, peer: int, lane: int) -> socket.socket:
        connection = answer(self, peer, lane)
        note("call", self.door.word.hex(), peer, lane)
        return connection

    Meeting._listen, Meeting.answer = listened, answered  # type: ignore[method-assign]


def work(rank: int, size: int, folder: Path, job: Job, pace: Any, at: Any) -> None:
    """A rank's program: it leaves a digest of its weights, and what it has open."""
    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    path = folder / f"log{rank}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(filename=path, format="%(name)s: %(message)s", force=True)
    watch(folder / f"notes{rank}", job)
    limit = timedelta(seconds=LIMIT)
    store = c10d.TCPStore("127.0.0.1", job.port, size, rank == 0, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))
    torch.manual_seed(rank)
    for training in range(job.trainings):
        at[rank] = training
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sync = gradtide.replicate(model, optimizer, job.scheme)
        for step in range(STEPS):
            while step == STEPS // 2 and pace.value <= training:
                time.sleep(0.002)  # strangers have to keep up
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        if training + 1 < job.trainings:
            sync.remove()
    bits = hashlib.sha256()
    for x in model.parameters():
        bits.update(x.detach().numpy().tobytes())
    opened = len(os.listdir("/proc/self/fd"))
    (folder / f"end{rank}").write_text(json.dumps([bits.hexdigest(), opened]))
    dist.barrier()


# - The strangers ----------------------------------------------------------------------


class Trap:
    """What makes a file if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


@dataclass
class Overheard:
    """What ranks have said at their doors, in an earlier run and in this one."""

    before: list[bytes]
    doors: set[object] = field(default_factory=set)  # ports, and names of Unix sockets
    said: dict[object, list[bytes]] = field(default_factory=dict)  # at these

    def read(self, folder: Path, size: int) -> None:
        """Read what the ranks have noted so far."""
        words: dict[str, list[object]] = {}
        said: dict[object, list[bytes]] = {}
        for rank in range(size):
            with suppress(FileNotFoundError):
                lines = (folder / f"notes{rank}").read_text().splitlines(keepends=True)
                for kind, word, *told in (
                    json.loads(line) for line in lines if line.endswith("\n")
                ):
                    if kind == "door":
                        words[word] = told
                        self.doors.update(told)
                        continue
                    for door in words[word]:
                        hello = HELLO.pack(bytes.fromhex(word), *told)
                        said.setdefault(door, []).append(hello)
        self.said = said


def listening(pid: int) -> list[int | str]:
    """The TCP ports and abstract Unix sockets at which a process listens."""
    own = set()
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                own.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    found: list[int | str] = []
    for row in _rows(pid, "tcp") + _rows(pid, "tcp6"):
        if row[3] == "0A" and f"socket:[{row[9]}]" in own:
            found.append(int(row[1].rpartition(":")[2], 16))
    for row in _rows(pid, "unix"):
        listens = int(row[3], 16) & 0x10000
        if listens and len(row) > 7 and f"socket:[{row[6]}]" in own:
            found.append(row[7].replace("@", "\0"))
    return found


def _rows(pid: int, table: str) -> list[list[str]]:
    with suppress(OSError):  # it has ended, or there is no such protocol
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        return [line.split() for line in lines[1:]]
    return []


class Stranger(threading.Thread):
    """Calls at what is listened at, again and again, until it is told to end."""

    def __init__(self, seed: int, heard: Overheard, pickled: bytes, port: int) -> None:
        super().__init__(daemon=True)
        self.draw, self.heard, self.pickled = random.Random(seed), heard, pickled
        self.port = port  # of the store
        self.places: list[int | str] = []
        self.allowed, self.sent, self.ended = 0, 0, False
        self.counts: Counter[str] = Counter()
        self.kept: deque[tuple[socket.socket, bytes]] = deque()

    def run(self) -> None:
        while not self.ended:
            places = self.places
            if self.sent >= self.allowed or not places:
                time.sleep(0.002)
                continue
            place = self.draw.choice(places)
            kind = self.draw.choice(KINDS)
            whose = self._of(place)
            try:
                self._call(place, kind)
                self.counts[f"{whose}: {kind}"] += 1
            except (BlockingIOError, TimeoutError):
                self.counts[f"{whose}: no room"] += 1
            except ConnectionRefusedError:  # it listens no longer
                time.sleep(0.002)
                continue
            except OSError:  # it was sent away before it had said all
                self.counts[f"{whose}: {kind}"] += 1
            self.sent += 1
            self._drip()
        while self.kept:
            self.kept.pop()[0].close()

    def _of(self, place: int | str) -> str:
        """Whose socket it is."""
        if place == self.port:
            return "store"
        return "doors" if place in self.heard.doors else "gloo"

    def _call(self, place: int | str, kind: str) -> None:
        where: Any = place if isinstance(place, str) else ("127.0.0.1", place)
        by_name = place is where
        call = socket.socket(socket.AF_UNIX if by_name else socket.AF_INET)
        call.settimeout(CALL)
        try:
            call.connect(where)
            message = self._message(place, kind)
            if kind == "slowly":
                self._keep(call, message)
                return
            call.sendall(message)
        except BaseException:
            call.close()
            raise
        if kind == "nothing" or self.draw.random() < 0.3:
            self._keep(call, b"")
        else:
            call.close()

    def _message(self, place: int | str, kind: str) -> bytes:
        draw = self.draw
        if kind == "nothing":
            return b""
        if kind == "no end":
            return draw.choice(HUGE) * draw.randrange(1, 9)
        if kind == "pickle":
            front = b"", draw.randbytes(HELLO.size), draw.choice(SMALL)
            return draw.choice(front) + self.pickled
        said = self.heard.said.get(place)
        if kind == "of this run" and said:
            return draw.choice(said) + MARK.pack(0, 1, 1, 0, 1 << 20, 1 << 20)
        if kind in ("of this run", "of an earlier run"):
            return draw.choice(self.heard.before) + draw.randbytes(64)
        return draw.randbytes(int(LONGEST ** draw.random()))

    def _keep(self, call: socket.socket, rest: bytes) -> None:
        self.kept.append((call, rest))
        if len(self.kept) > KEPT:
            self.kept.popleft()[0].close()

    def _drip(self) -> None:
        """Send one more byte where there is more to be said."""
        if self.kept:
            call, rest = self.kept.popleft()
            with suppress(OSError):
                call.sendall(rest[:1])
                self.kept.append((call, rest[1:]))
                return
            call.close()


KINDS = (
    "noise",
    "no end",
    "pickle",
    "nothing",
    "slowly",
    "of this run",
    "of an earlier run",
)


# - A job ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is run, and of which sockets strangers learn."""

    scheme: str
    way: str
    size: int
    trainings: int
    messages: int
    at: tuple[str, ...]  # the kinds of sockets at which strangers call
    head_start: float = 0.1  # seconds
    port: int = 0


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def first_words() -> bytes:
    """What a client of torch's store says first."""
    limit = timedelta(seconds=10)
    host = c10d.TCPStore("127.0.0.1", 0, 1, True, timeout=limit)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def call() -> None:
            port = server.getsockname()[1]
            c10d.TCPStore("127.0.0.1", port, 1, False, timeout=limit).set("a", "b")

        client = threading.Thread(target=call, daemon=True)
        client.start()
        end, _ = server.accept()
        with end, socket.create_connection(("127.0.0.1", host.port)) as to:
            said = b""
            while more := _passed(end, to):
                said += more
            return said


def _passed(client: socket.socket, server: socket.socket) -> bytes:
    """What a client says next, after which it has the server's answer."""
    client.settimeout(0.5)
    with suppress(TimeoutError):
        said = client.recv(1 << 16)
        server.sendall(said)
        server.settimeout(0.2)
        with suppress(TimeoutError):
            client.sendall(server.recv(1 << 16))
        return said
    return b""


def run(job: Job, before: list[bytes], seed: int = 0) -> dict[str, Any]:
    """Run a job, with strangers if there is anything that they could say."""
    fork = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        pace = fork.Value("i", 0 if before else job.trainings)
        at = fork.Array("i", job.size)
        ranks = [
            fork.Process(target=work, args=(r, job.size, folder, job, pace, at))
            for r in range(job.size)
        ]
        for process in ranks:
            process.start()
        heard, trap = Overheard(before), folder / "trapped"
        callers = [
            Stranger(CALLERS * seed + i, heard, pickle.dumps(Trap(trap)), job.port)
            for i in range(CALLERS if before else 0)
        ]
        for caller in callers:
            caller.start()
        each = -(
            -job.messages // (job.trainings * CALLERS)
        )  # of a caller, in a training
        while any(process.is_alive() for process in ranks):
            places = [place for p in ranks for place in listening(p.pid or 0)]
            heard.read(folder, job.size)
            for caller in callers:
                found = [p for p in places if caller._of(p) in job.at]
                # They call while there are sockets of all kinds.
                here = {*map(caller._of, found)} == {*job.at}
                caller.places = found if here else []
                caller.allowed = each * (min(at[:]) + 1)
            if callers:
                pace.value = min([c.sent for c in callers]) // each
            if time.monotonic() - begin > LIMIT or any(p.exitcode for p in ranks):
                break
            time.sleep(0.01)
        for process in ranks:
            process.join(5.0)
        seconds = time.monotonic() - begin
        codes = [process.exitcode for process in ranks]
        for caller in callers:
            caller.ended = True
            caller.join()
        for process in ranks:
            process.kill()
            process.join()
        heard.read(folder, job.size)
        ends = [folder / f"end{r}" for r in range(job.size)]
        told = [json.loads(end.read_text()) if end.exists() else None for end in ends]
        logs = [(folder / f"log{r}").read_text().splitlines() for r in range(job.size)]
        return {
            "digests": [end and end[0] for end in told],
            "open files": [end and end[1] for end in told],
            "exit codes": codes,
            "seconds": round(seconds, 2),
            "sent": sum(caller.sent for caller in callers),
            "counts": sum((caller.counts for caller in callers), Counter()),
            "unpickled": trap.exists(),
            "lines": sum(line.startswith("gradtide") for log in logs for line in log),
            "other lines": sum(
                not line.startswith("gradtide") for log in logs for line in log
            ),
            "log": [line for log in logs for line in log if "gradtide" in line][:8],
            "said": [hello for each in heard.said.values() for hello in each],
        }


# - Many jobs --------------------------------------------------------------------------


def compare(job: Job, seed: int) -> dict[str, Any]:
    """A job without strangers and with them, and what was wrong."""
    quiet = run(replace(job, port=free_port()), [])
    said = [*quiet.pop("said"), first_words()]
    found = run(replace(job, port=free_port()), said, seed)
    found.pop("said")
    wrong = []
    if found["digests"] != quiet["digests"] or None in found["digests"]:
        wrong.append("other weights")
    if any(found["exit codes"]) or any(quiet["exit codes"]):
        wrong.append("a rank failed")
    if found["unpickled"]:
        wrong.append("unpickled")
    if found["lines"] > found["sent"]:
        wrong.append("more lines than strangers")
    if found["sent"] < job.messages:
        wrong.append("too few strangers")
    return {**asdict(job), "wrong": wrong, "without": quiet, "with": found}


def main(
    messages: Annotated[int, typer.Option(help="Of strangers, in each job.")] = 10_000,
    schemes: Annotated[str, typer.Option(help="Separated by commas.")] = SCHEMES,
    size: Annotated[int, typer.Option(help="How many ranks.")] = 3,
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Train among strangers, and say what went wrong."""
    names = list(split_schemes(schemes))
    for name in names:  # before the fork, so that no job is about loading and compiling
        prepare([torch.zeros(1)], as_scheme(name))
    everywhere = "doors", "store", "gloo"
    jobs = [Job(n, way, size, 25, messages, everywhere) for n in names for way in WAYS]
    # So many at a time that doors have no room for more.
    full = everywhere[:1], 3.0
    jobs += [Job(names[0], way, size, 3, messages, *full) for way in WAYS]
    found = []
    for seed, job in enumerate(jobs):
        found.append(compare(job, seed))
        one = found[-1]["with"]
        told = {key: one[key] for key in ("seconds", "sent", "lines", "open files")}
        print(job.scheme, job.way, found[-1]["wrong"] or "as without", told, flush=True)
    if out is not None:
        about: dict[str, Any] = {
            "command": f"python benchmarks/strangers.py --messages {messages} "
            f"--size {size} --out benchmarks/records/{out.name}",
            "commit": commit(),
        }
        about |= {"versions": versions(), "machine": machine()}
        results = {
            "jobs": len(found),
            "wrong": sum(bool(each["wrong"]) for each in found),
            "messages": sum(each["with"]["sent"] for each in found),
            "lines of gradtide's": sum(each["with"]["lines"] for each in found),
            "lines of torch's": sum(each["with"]["other lines"] for each in found),
            "longest seconds": max(each["with"]["seconds"] for each in found),
        }
        record = {**about, "results": results, "jobs": found}
        out.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    typer.run(main)
