"""A rank of a trial: its program, and what it does to itself when it reaches a point.

It leaves what has become of it in a file: how it ended, and when; a digest of its
parameters; and, after an error, what is still there when it has let go of all it had.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import hashlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from campaign_faults import Trial
from torch import Tensor, nn

import gradtide
from gradtide.core.engine import Engine
from gradtide.core.ops import Cut
from gradtide.runtime import checkpoint
from gradtide.transport import gloo
from gradtide.transport.distance import Distance
from gradtide.transport.gloo import GlooTransport
from gradtide.transport.stream import Stream

c10d: Any = dist  # whose stores are not exported for mypy

TIMEOUT = 5.0  # seconds: the group's, which bounds what a fault may cost
FAR_TIMEOUT = 10.0  # the same in the lab, where ranks start one after the other
LEAVES = TIMEOUT + 2  # seconds in which threads have to end: torch has one that waits
AWAY = Distance(0.05, 0.05)
FULL = "/dev/full"
BYTES = 1 << 13  # that a file may have
NAP = 0.1  # seconds of a step in the lab, where a timetable says when
LAB_STEPS = 120
HELD = 10  # the step after which ranks wait for the timetable
LATER = 40.0  # seconds after which a link changes: ranks take long to begin
STARTING = 60.0  # seconds that ranks may take to come


class Broken(RuntimeError):
    """The program's own error."""


def age() -> float:
    """For how many seconds this process has been there: the lab's clock, too."""
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(words[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def note(folder: Path, name: str) -> None:
    """Leave the time in a file, all of it at once."""
    number = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, f"{time.monotonic()}\n".encode())
    os.close(number)


def are_ready(folder: Path, ranks: int) -> bool:
    """Whether all ranks are through what torch alone does before they train.

    Its `init_process_group` may hang where a rank is lost in it, its `barrier` names
    nobody.
    """
    return len([*folder.glob("ready*")]) == ranks


def await_ready(folder: Path, ranks: int) -> None:
    """Wait for that, and not for ever."""
    deadline = time.monotonic() + TIMEOUT
    while not are_ready(folder, ranks) and time.monotonic() < deadline:
        time.sleep(0.001)


class Points:
    """Where a rank's program is; at one point, for one time, the fault happens."""

    def __init__(self, trial: Trial, rank: int, folder: Path) -> None:
        self.trial, self.rank, self.folder = trial, rank, folder
        self.mine = rank == trial.dead
        self.step, self._met, self._lock = 0, 0, threading.Lock()
        self.done = False  # it has happened

    def reached(self, point: str) -> None:
        """The program is at a point."""
        whole = self.trial.fault.act in ("kill", "stop", "pause", "raise")
        if whole and self._is_due(point):
            if point == "connect":
                await_ready(self.folder, self.trial.ranks)
            self.strike()

    def _is_due(self, point: str) -> bool:
        if not self.mine or point != self.trial.fault.point:
            return False
        with self._lock:
            self._met += 1
            due = self._met == self.trial.at + 1
            self.done = self.done or due
            return due

    def strike(self) -> None:
        """What happens to a rank as a whole, at any point."""
        act = self.trial.fault.act
        if act in ("kill", "stop", "pause"):
            note(self.folder, "fault")
            os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        if act == "raise":
            note(self.folder, "fault")
            raise Broken("the program's own error")

    def spoilt(self, point: str, tensor: Tensor) -> Tensor:
        """A gradient, or, once, what becomes of it."""
        act, _, value = self.trial.fault.act.partition(": ")
        if act != "spoil" or not self._is_due(point):
            return tensor
        note(self.folder, "fault")
        changed = tensor.clone()
        changed.view(-1)[0] = float(value)
        return changed

    def edit(self, model: nn.Module) -> None:
        """Change a parameter on this rank alone, once, between two steps."""
        act, _, value = self.trial.fault.act.partition(": ")
        if act not in ("spoil", "edit") or self.trial.fault.point != "loop":
            return
        if self.mine and self.step == self.trial.step:
            note(self.folder, "fault")
            with torch.no_grad():
                first = next(p for p in model.parameters() if p.requires_grad)
                first.view(-1)[0] = float(value) if value else first.view(-1)[0] + 0.01

    def leaves(self) -> str:
        """How this rank's program leaves its loop now; "" if it does not."""
        act, _, how = self.trial.fault.act.partition(": ")
        if act != "leave" or not self.mine or self.step != self.trial.step:
            return ""
        note(self.folder, "fault")
        return how

    def arm(self) -> None:
        """Have this process notice where the library is."""
        if not self.mine:
            return
        issue, gather = GlooTransport.issue, GlooTransport.gather_objects
        resume, answer, push = Engine._resume, Engine._answer, Stream.send
        save, read = checkpoint.save, checkpoint.read

        def issued(own: Any, *args: Any) -> Any:
            self.reached("request")
            return issue(own, *args)

        def gathered(own: Any, *args: Any) -> Any:
            self.reached("comparing")
            return gather(own, *args)

        def resumed(own: Any, flight: Any, *args: Any) -> None:
            resume(own, flight, *args)
            if isinstance(flight.asked, Cut):
                self.reached("cut")

        def answered(own: Any, flight: Any) -> Any:
            self.reached("second half" if flight.turned else "first half")
            return answer(own, flight)

        def pushed(own: Any, *args: Any, **named: Any) -> bool:
            self.reached("piece")
            return push(own, *args, **named)

        def saved(*args: Any) -> Any:
            found = save(*args)
            self.reached("saving")
            return found

        def loaded(*args: Any) -> Any:
            self.reached("loading")
            return read(*args)

        changed: Any = GlooTransport, Engine, Stream, checkpoint
        transport, engine, stream, states = changed
        transport.issue, transport.gather_objects = issued, gathered
        engine._resume, engine._answer, stream.send = resumed, answered, pushed
        states.save, states.read = saved, loaded


# - What is trained --------------------------------------------------------------------


def network(trial: Trial, rank: int, points: Points) -> nn.Module:
    """The model; another one on the rank to which that happens."""
    torch.manual_seed(trial.model)
    differs = trial.fault.act.partition(": ")[2] if points.mine else ""
    widths = [8, 16 + trial.model % 48, 24 + trial.model // 64 % 64, 4]
    if differs == "shape":
        widths[2] += 1
    first, middle, last = (nn.Linear(a, b) for a, b in pairwise(widths))
    norm = nn.BatchNorm1d(widths[1]) if trial.norm else nn.Identity()
    layers: dict[str, nn.Module] = {"first": first, "norm": norm, "one": nn.Tanh()}
    layers |= {"middle": middle, "two": nn.Tanh(), "last": last}
    if differs == "order":
        names = ["middle", "first", "norm", "one", "two", "last"]
        layers = {name: layers[name] for name in names}
    if differs == "missing layer":
        first.bias = None  # type: ignore[assignment]
    if differs == "frozen layer":
        middle.weight.requires_grad_(False)

    def forward(*_: Any) -> None:
        points.reached("forward")

    def backward(_: Any, __: Any, out: Any) -> None:
        if out.requires_grad:
            out.register_hook(arrived)

    def arrived(grad: Tensor) -> Tensor:
        points.reached("backward")
        return points.spoilt("backward", grad)

    model = Layers(layers)
    middle.register_forward_pre_hook(forward)
    middle.register_forward_hook(backward)
    return model.double() if trial.double != (differs == "dtype") else model


class Layers(nn.Module):
    """Layers whose order of registering is not that of the forward."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "norm", "one", "middle", "two", "last"):
            x = self._modules[name](x)  # type: ignore[misc]
        return x


def stepper(trial: Trial, model: nn.Module, points: Points) -> torch.optim.Optimizer:
    """The optimizer; a step of it is a point."""
    differs = points.mine and trial.fault.act == "differ: optimizer"
    lr, params = 0.02 if differs else 0.01, model.parameters()
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, lr=lr),
        "momentum": lambda: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(
            params, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-3
        ),
        "adam": lambda: torch.optim.Adam(params, lr=lr),
        "adamw": lambda: torch.optim.AdamW(params, lr=lr),
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=lr),
    }
    optimizer = kinds[trial.optimizer]()
    optimizer.register_step_pre_hook(lambda *_: points.reached("step"))
    return optimizer


def batch(trial: Trial, rank: int, step: int, part: int) -> Tensor:
    seed = hash((trial.model, rank, step, part)) % (1 << 60)
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if trial.double else torch.float32
    return torch.randn(6, 8, generator=rng, dtype=dtype)


class Training:
    """Model, optimizer and replica of a rank, and its loop."""

    def __init__(self, trial: Trial, rank: int, points: Points) -> None:
        self.trial, self.rank, self.points = trial, rank, points
        self.refused = ""
        self._earlier: Any = None
        self.begin()

    def begin(self) -> None:
        """Build and replicate."""
        trial, points = self.trial, self.points
        differs = trial.fault.act.partition(": ")[2] if points.mine else ""
        self.model = network(trial, self.rank, points)
        self.optimizer = stepper(trial, self.model, points)
        points.reached("connect")
        if trial.fault.act.startswith("differ") and points.mine:
            note(points.folder, "fault")
        other = {"broadcast": "local", "local": "broadcast"}[trial.buffers]
        buffers: Any = other if differs == "buffers" else trial.buffers
        self.sync = gradtide.replicate(
            self.model,
            self.optimizer,
            trial.other if differs == "scheme" else trial.scheme,
            buffers=buffers,
            check_every=trial.check_every + (differs == "check_every"),
        )

    def run(self) -> str:
        """Train to the end; returns how the rank left before that, or ""."""
        for step in range(self.trial.steps):
            self.points.step = step
            self.points.edit(self.model)
            if how := self.points.leaves():
                return how
            self.make_step(step)
            if self.trial.fault.point == "lab":
                time.sleep(NAP)
                if step == HELD:  # until the timetable is about to begin
                    time.sleep(max(LATER - age(), 0.0))
                note(self.points.folder, f"step{self.rank}")
            self.after(step)
        self.points.reached("end")
        return ""

    def make_step(self, step: int) -> None:
        trial, params = self.trial, list(self.model.parameters())
        for part in range(trial.accumulate):
            last = part == trial.accumulate - 1
            with nullcontext() if last else self.sync.no_sync():
                out = self.model(batch(trial, self.rank, step, part))
                loss = (out - 1).square().mean() / trial.accumulate
                loss.backward()
        self.points.reached("between")
        if trial.clip == "torch's":
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        elif trial.clip:
            self.sync.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after(self, step: int) -> None:
        """What there is to do between two steps."""
        point, act = self.trial.fault.point, self.trial.fault.act
        if act == "state: is of another step" and step == self.trial.saves - 1:
            self._earlier = copy.deepcopy(self.sync.state_dict())
        if step != self.trial.saves:
            return
        if point in ("restart", "loading"):
            self.restart()
        elif point == "file":
            self.save_to_file(act)
        else:
            torch.save(self.states(), io.BytesIO())

    def states(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict(),
        }

    def restart(self) -> None:
        """Begin anew from what is saved, after a try with what was damaged."""
        saved = copy.deepcopy(self.states())
        self.sync.remove(end_round=False)
        self.begin()
        kind = self.trial.fault.act.partition("state: ")[2]
        if kind not in ("", "whole"):
            state = saved["sync"]
            if self.points.mine:
                note(self.points.folder, "fault")
                earlier = self._earlier
                state = damaged(copy.deepcopy(state), kind, earlier, self.trial)
            try:
                self.load({**saved, "sync": state})
            except ValueError as error:
                self.refused = str(error)
        self.load(saved)

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.sync.load_state_dict(saved["sync"])

    def save_to_file(self, act: str) -> None:
        """Save, where the disk is full on one rank."""
        folder, caught = self.points.folder, act.endswith("caught")
        path = str(folder / f"saved{self.rank}.pt")
        states = self.states()
        if self.points.mine:
            note(folder, "fault")
            path = FULL if act.startswith("full") else path
        had = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.points.mine and act.startswith("short"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, had[1]))
        try:
            with open(path, "wb") as file:
                torch.save({**states, "more": torch.zeros(BYTES)}, file)
        except (OSError, RuntimeError) as error:
            if not caught:
                raise Broken(f"nothing was saved: {error}") from error
            self.refused = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, had)

    def end(self) -> str:
        """End the training; returns a digest of what all ranks have in common."""
        self.sync.flush()
        self.sync.end_round()
        bits = hashlib.sha256()
        for p in self.model.parameters():
            bits.update(p.detach().numpy().tobytes())
        self.sync.remove()
        return bits.hexdigest()


def damaged(state: Any, kind: str, earlier: Any, trial: Trial) -> Any:
    """A state with a mistake."""
    own = [key for key in state if key.startswith("rank")]
    tensors = [x for key in own for x in state[key].get("remainders", {}).values()]
    pieces = [
        (key, name)
        for key in own
        for name, value in state[key].items()
        if isinstance(value, bytes) and value
    ]
    at = trial.model
    if kind == "has a changed bit in a tensor" and tensors:
        bits = tensors[at % len(tensors)].view(-1).view(torch.uint8)
        bits[at % len(bits)] ^= 1 << at % 8
        return state
    if kind == "is of another step":
        return earlier
    if kind == "is of another rank":
        theirs = f"rank{(trial.dead + 1) % trial.ranks}"
        return {theirs if key in own else key: value for key, value in state.items()}
    if kind == "is of another number of ranks":
        return {**state, "world_size": trial.ranks + 1}
    if kind == "names another scheme":
        return {**state, "scheme": trial.other}
    if kind == "is a text":
        return "a state"
    key, name = pieces[at % len(pieces)]
    piece = state[key][name]
    if kind == "lacks a piece":
        del state[key][name]
    elif kind == "has a shorter piece":
        state[key][name] = piece[: at % len(piece)]
    else:
        there = at % len(piece)
        changed = bytes([piece[there] ^ (1 << at % 8)])
        state[key][name] = piece[:there] + changed + piece[there + 1 :]
    return state


# - The program ------------------------------------------------------------------------


def tell(folder: Path, rank: int, told: dict[str, Any]) -> None:
    path = folder / f"rank{rank}"
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").replace(path)


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if "gradtide" in t.name)


def sockets() -> dict[str, str]:
    """The sockets that this process has open, and what they are."""
    kinds: dict[str, str] = {}
    for table, place in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            kinds[f"socket:[{words[place]}]"] = f"{table} {' '.join(words[1:4])}"
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket"):
                found[name] = kinds.get(name, "?")
    return found


def after_letting_go(before: Collection[str], port: int) -> dict[str, Any]:
    """What is still there that is the library's, when its user has let go of all.

    The job's store, if it is here, has connections of its own, at this port.
    """
    store = f":{port:04X} "
    deadline, patience = time.monotonic() + LEAVES, 0.01
    while True:
        gc.collect()
        threads, opened = own_threads(), sockets()
        more = [kind for name, kind in opened.items() if name not in before]
        more = [kind for kind in more if store not in kind]
        if not (threads or more) or time.monotonic() > deadline:
            return {"threads": threads, "sockets": more}
        time.sleep(patience)
        patience = min(2 * patience, 0.2)


def work(rank: int, trial: Trial, folder: Path, port: int = 0) -> None:
    """A rank's program, in a process of its own."""
    points = Points(trial, rank, folder)
    told: dict[str, Any] = {"pid": os.getpid()}
    if trial.far:  # ranks are told that they are, and ask in other ways
        vars(gloo)["distance_of"] = lambda told: AWAY
    try:
        points.arm()
        if trial.lets_go:
            dist.barrier()  # by which the user's own group is connected
        note(folder, f"ready{rank}")
        before = sockets()
        told |= trained(trial, rank, points)
        told |= {"ended": "done", "at": time.monotonic(), "done": points.done}
        tell(folder, rank, told)
    except BaseException as error:
        words = "".join(traceback.format_exception(error))
        told |= {
            "ended": "error",
            "at": time.monotonic(),
            "kind": type(error).__name__,
            "text": str(error),
            "trace": words,
            "done": points.done,
        }
        tell(folder, rank, told)
        if not trial.lets_go:
            sys.last_value = error  # as the interpreter does
            raise
    if told["ended"] == "error":
        told |= after_letting_go(before, port)
        told["let go"] = time.monotonic() - told["at"]
        tell(folder, rank, told)
        raise SystemExit(1)
    if told.get("left") == "a barrier":
        dist.barrier()


def trained(trial: Trial, rank: int, points: Points) -> dict[str, Any]:
    """Train; nothing of it is referred to any more when this returns."""
    training = Training(trial, rank, points)
    left = training.run()
    if left:
        if left == "remove()":
            training.sync.remove()
        elif left == "a barrier":
            dist.barrier()
        return {"left": left, "refused": training.refused}
    return {"digest": training.end(), "refused": training.refused}


def start(rank: int, trial: Trial, folder: Path, door: Any) -> None:
    """Begin as a fork of the campaign: join the job, then `work`."""
    os.setsid()
    gc.freeze()
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)  # where it is, if it hangs
    limit = timedelta(seconds=TIMEOUT)
    store: Any
    port = door.getsockname()[1]
    if trial.tcp:
        own = rank == 0
        # Of a listening socket that is there already: nobody else has the port.
        number = door.detach() if own else None
        if not own:
            door.close()
        store = c10d.TCPStore(
            "127.0.0.1",
            port,
            trial.ranks,
            own,
            timeout=timedelta(seconds=STARTING),
            master_listen_fd=number,
        )
        store.set_timeout(limit)
    else:
        store = c10d.FileStore(str(folder / "store"), trial.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=trial.ranks, timeout=limit
    )
    del store
    work(rank, trial, folder, port)


def in_lab(trial: Trial, folder: Path) -> None:
    """A rank of the lab's: its end is never a failure, or the others were ended."""
    torch.set_num_threads(1)
    rank, where = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    port, longer = int(os.environ["MASTER_PORT"]), timedelta(seconds=STARTING)
    store = c10d.TCPStore(where, port, trial.ranks, rank == 0, timeout=longer)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(trial.ranks)])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=trial.ranks,
        timeout=timedelta(seconds=FAR_TIMEOUT),
    )
    del store
    trial = replace(trial, steps=LAB_STEPS, saves=LAB_STEPS, lets_go=False)
    try:
        work(rank, trial, folder)
    except BaseException:
        traceback.print_exc()
    note(folder, f"ended{rank}")
    while len(list(folder.glob("ended*"))) < trial.ranks:
        time.sleep(0.1)
