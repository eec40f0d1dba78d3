"""Runs that are killed, and runs that are told to stop: does each go on as it was?

    python benchmarks/restarts.py --kills 100 --stops 50 \
        --out benchmarks/records/restarts_202611.json

*Kills.* torchrun starts ranks that train with a `Checkpointer`, save every few steps,
and are slow to bring files to the disk, so that many of the SIGKILLs at random moments
hit a save. torchrun starts all ranks anew. In the end every rank has to have the bits
of a run that nobody disturbed: parameters, the optimizer's state, its residual. Every
fourth job is killed as a whole after that many kills, with torchrun, and goes on with
another number of ranks: the residuals' sum has to be what the files say.

*Lost hosts* (`--lost`). Each rank counts as a host and has a folder of its own, which
is gone after a kill of the rank; a neighbour has a copy of its file. The rest is as
with kills. The next kill comes once the ranks have restored what was lost, or hits the
rank that was just lost.

*Stops.* One rank gets SIGTERM at a random moment. All have to leave after the same
step, and what they saved has to load, with the bits that they left with.

What a trial does follows from its seed alone, but for the moment: the clock decides on
that.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import torch._dynamo  # or every rank does, at length
import torch.distributed as dist
import typer
from torch import Tensor, nn

import gradtide
from gradtide.checkpoint import Checkpointer, files
from gradtide.lab.record import commit, machine, versions
from gradtide.runtime.ahead import prepare
from gradtide.runtime.exchange import rounds  # noqa: F401  # as above
from gradtide.scheme import as_scheme

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

SCHEMES = [
    "wfbp",
    "dear",
    "exdyna(0.05, schedule='local')",
    "topka2a(0.05)",
    "diloco(every=4)",
]
Known: TypeAlias = dict[tuple[str, int], list[str]]  # by scheme and number of ranks
PLAN = "RESTARTS"  # the variable that tells a rank what to do
STEPS, EVERY = 250, 7
STEP = 0.006  # seconds that a step waits
SLOW = 0.1  # seconds, at most, that a file takes to come to the disk
LIFE = 1.0  # seconds, at most, until a kill, once ranks train
LIMIT = 180.0  # seconds that a job may take until it has begun, or is over


class Run:
    """What a rank trains: the same for the same scheme and number of ranks."""

    def __init__(
        self, folder: str, scheme: str, watched: bool = False, copies: int = 0
    ) -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        layers = (nn.Linear(48, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1))
        self.model = nn.Sequential(*layers, nn.Linear(96, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 50)
        self.data = torch.Generator().manual_seed(rank)
        self.sync = gradtide.replicate(self.model, self.optimizer, scheme)
        torch.manual_seed(rank + 1)  # of Dropout
        self.keeper = Checkpointer(
            folder,
            self.sync,
            model=self.model,
            optimizer=self.optimizer,
            every=EVERY,
            copies=copies,
            signals=(signal.SIGTERM,) if watched else (),
            scheduler=self.scheduler,
            data=self.data,
        )

    def step(self) -> bool:
        """One step; whether to leave."""
        time.sleep(STEP)
        self.model(torch.randn(8, 48, generator=self.data)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self.keeper.step()

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has not delivered, by parameter."""
        found: dict[str, Tensor] = self.sync.state_dict()[f"rank{dist.get_rank()}"][
            "remainders"
        ]
        return found

    def digest(self) -> str:
        """What tells this rank's state from any other, bit for bit."""
        self.sync.flush()
        memory = self.optimizer.state_dict()["state"].values()
        values = [torch.as_tensor(v) for one in memory for v in one.values()]
        values += [*self.model.state_dict().values(), *self.residuals().values()]
        values += [torch.rand(4), torch.rand(4, generator=self.data)]
        return digest(values)


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(plain.numpy().tobytes())
    return found.hexdigest()


def join(plan: dict[str, Any], rank: int, size: int, store: str = "env://") -> None:
    """Begin the process group of ranks that torchrun, or this program, has started."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


# - Ranks of torchrun ------------------------------------------------------------------


def work(plan: dict[str, Any]) -> None:
    """A rank's program under torchrun."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = plan["life"] + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    folder = Path(plan["folder"])
    slow_down()
    join(plan, rank, size)
    saves = folder / "saved"
    if plan["lost"]:
        saves /= str(rank)
        os.environ["GROUP_RANK"] = str(rank)  # as by a torchrun on each host
        dead = folder / f"dead-{life}"
        if dead.exists() and dead.read_text() == str(rank):
            shutil.rmtree(saves, ignore_errors=True)
    (folder / f"pid-{life}-{rank}").write_text(str(os.getpid()))
    run = Run(str(saves), plan["scheme"], copies=int(plan["lost"]))
    begin = run.keeper.resume()
    if plan["lost"]:
        run.keeper._writer.wait()
        dist.barrier()
    if size != plan["before"]:
        saved = folder / "saved" / f"step-{begin}"
        told = law(run, saved, plan["before"]) if begin else (0.0, 0.0)
        (folder / f"law-{rank}").write_text(json.dumps([begin, *told]))
    for step in range(begin, plan["steps"]):
        run.step()
        if step == begin:
            (folder / f"begun-{life}-{rank}").touch()
    run.keeper.close()
    (folder / f"end-{rank}").write_text(run.digest())
    dist.barrier()


def slow_down() -> None:
    """Have files take their time to come to the disk."""
    sync, draw = os.fsync, random.Random(os.getpid())

    def slow(number: int) -> None:
        time.sleep(draw.uniform(0, SLOW))
        sync(number)

    os.fsync = slow  # type: ignore[assignment]


def law(run: Run, saved: Path, before: int) -> tuple[float, float]:
    """How far the sum of residuals is from that in the files, and how large it is."""
    own = {name: r.double() for name, r in run.residuals().items()}
    expected = {name: torch.zeros_like(r) for name, r in own.items()}
    for rank in range(before):
        name = f"rank{rank}.pt"
        _, state = files.unpacked((saved / name).read_bytes(), name)
        for key, value in state["sync"][f"rank{rank}"]["remainders"].items():
            expected[key] += value.double()
    apart = largest = 0.0
    for key, value in own.items():
        dist.all_reduce(value)
        apart = max(apart, float((value - expected[key]).abs().max()))
        largest = max(largest, float(expected[key].abs().max()))
    return apart, largest


class Job:
    """torchrun and its ranks; `life` counts how often ranks have been started."""

    def __init__(
        self, folder: Path, scheme: str, before: int, steps: int, lost: bool = False
    ) -> None:
        self.folder, self.scheme, self.before = folder, scheme, before
        self.steps, self.lost, self.dead = steps, lost, -1
        self.life, self.size = 0, before

    def start(self, size: int, restarts: int) -> None:
        self.size = size
        plan = {
            "folder": str(self.folder),
            "scheme": self.scheme,
            "life": self.life,
            "before": self.before,
            "steps": self.steps,
            "lost": self.lost,
        }
        where = {PLAN: json.dumps(plan), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size), "--max-restarts", str(restarts)]
        with (self.folder / "errors").open("a") as errors:
            self.process = subprocess.Popen(
                [*command, __file__],
                env={**os.environ, **where, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def pids(self) -> list[int] | None:
        """The ranks' processes, once all have begun; None if the job is over first."""
        names = [self.folder / f"pid-{self.life}-{r}" for r in range(self.size)]
        there = self._wait(lambda: all(n.exists() and n.read_text() for n in names))
        return [int(name.read_text()) for name in names] if there else None

    def trains(self) -> bool:
        """Whether a first step of this life is over; False if the job is over first."""
        return self._wait(lambda: (self.folder / f"begun-{self.life}-0").exists())

    def _wait(self, until: Callable[[], bool]) -> bool:
        begin = time.monotonic()
        while time.monotonic() - begin < LIMIT:
            if until():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        raise TimeoutError(f"ranks have not begun their life {self.life}")

    def kill(self, draw: random.Random) -> dict[str, Any] | None:
        """Kill a rank at a random moment of its life; None if the job was faster."""
        found = self.pids()
        # Every fourth one while ranks connect and load what was saved, or soon after.
        early = not draw.randrange(4)
        wait, dead = draw.uniform(0, LIFE), draw.randrange(self.size)
        if early and self.lost and self.dead >= 0:
            dead = self.dead
        if found is None or not (early or self.trains()):
            return None
        time.sleep(wait)
        (self.folder / f"dead-{self.life + 1}").write_text(str(dead))
        try:
            os.kill(found[dead], signal.SIGKILL)
        except ProcessLookupError:
            return None
        time.sleep(0.005)
        torn = [*self.folder.glob(f"saved/**/step-*/*{dead}.pt{files.NEW}")]
        torn += self.folder.glob("saved/**/step-*/*.copy*")
        if self.process.poll() is not None:
            return None
        self.life, self.dead = self.life + 1, dead
        about = {"early": early, "rank": dead, "wait": round(wait, 3)}
        return {**about, "while saving": bool(torn)}

    def end(self) -> list[str]:
        """What every rank has in the end; empty where one has nothing."""
        self.process.wait(LIMIT)
        names = [self.folder / f"end-{r}" for r in range(self.size)]
        return [name.read_text() for name in names if name.exists()]

    def destroy(self) -> None:
        """Kill torchrun and what it has started, as where the power fails."""
        found = self.pids() or []
        for pid in (self.process.pid, *found):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        time.sleep(0.3)
        self.life += 1


def undisturbed(known: Known, scheme: str, size: int, steps: int) -> list[str]:
    """What ranks have at the end of a run that nobody kills."""
    if (scheme, size) not in known:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder), scheme, size, steps)
            job.start(size, 0)
            known[scheme, size] = job.end()
            told = Path(folder, "errors").read_text()[-3000:]
        assert len(known[scheme, size]) == size, (scheme, told)
    return known[scheme, size]


def killed(
    seed: int,
    schemes: list[str],
    known: Known,
    count: int = 4,
    steps: int = STEPS,
    lost: bool = False,
) -> Any:
    """One job that is killed several times; what became of it."""
    draw = random.Random(seed)
    scheme, size = schemes[seed % len(schemes)], draw.choice((2, 3))
    other = draw.choice([n for n in (1, 2, 3) if n != size])
    resized = seed % 4 == 3 and not lost
    expected = undisturbed(known, scheme, size, steps)
    kills, wrong, summed = list[Any](), list[str](), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, scheme, size, steps, lost)
        job.start(size, count)
        try:
            while len(kills) < count and (found := job.kill(draw)) is not None:
                kills.append(found)
            if resized and job.pids() is not None and job.trains():
                time.sleep(draw.uniform(0, LIFE))
                if job.process.poll() is None:
                    job.destroy()
                    job.start(other, 0)
            ends = job.end()
            if len(ends) != job.size:
                wrong.append(f"{len(ends)} of {job.size} ranks came to the end")
            elif job.size == size and ends != expected:
                wrong.append("not the bits of an undisturbed run")
            elif job.size != size:
                told = [json.loads(f.read_text()) for f in folder.glob("law-*")]
                summed = {"step": told[0][0], "apart": told[0][1], "of": told[0][2]}
                if summed["apart"] > 1e-6 * max(summed["of"], 1e-3):
                    wrong.append("the residuals' sum is another one")
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            wrong.append(f"it hangs: {error}")
        finally:
            if job.process.poll() is None:
                job.destroy()
        if wrong:
            wrong.append((folder / "errors").read_text()[-3000:])
    return {
        "seed": seed,
        "scheme": scheme,
        "ranks": size,
        "ranks then": job.size,
        "kills": kills,
        "sum": summed,
        "wrong": wrong,
    }


# - Stops ------------------------------------------------------------------------------


def stop(
    rank: int, size: int, folder: str, scheme: str, ready: Any, again: bool
) -> None:
    """Train until all leave; or load what was saved then. What there is, in a file."""
    join({}, rank, size, f"file://{folder}/store-{again}")
    run = Run(f"{folder}/saved", scheme, watched=not again)
    begin = run.keeper.resume()
    ready.set()
    while not again and not run.step():
        begin = run.keeper.steps
    step = begin if again else run.keeper.steps
    Path(folder, f"{again}-{rank}").write_text(f"{step} {run.digest()}")
    run.keeper.close()
    dist.barrier()
    os._exit(0)


def stopped(seed: int, schemes: list[str]) -> Any:
    """One job that is told to stop; after which steps its ranks left, what is wrong."""
    draw = random.Random(seed)
    scheme, size = schemes[seed % len(schemes)], draw.choice((1, 2, 3))
    asked, wait = draw.randrange(size), draw.uniform(0, 1.0)
    fork, wrong = mp.get_context("fork"), list[str]()
    told = dict[bool, list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for again in (False, True):
            ready = [fork.Event() for _ in range(size)]
            ranks = [
                fork.Process(
                    target=stop, args=(r, size, folder, scheme, ready[r], again)
                )
                for r in range(size)
            ]
            for process in ranks:
                process.start()
            for each in ready:
                each.wait(LIMIT)
            if not again:
                time.sleep(wait)
                pid = ranks[asked].pid
                assert pid is not None
                os.kill(pid, signal.SIGTERM)
            for process in ranks:
                process.join(30)
            codes = [process.exitcode for process in ranks]
            if any(codes) or None in codes:
                wrong.append(f"exit codes {codes}, loading: {again}")
            for process in ranks:
                process.kill()
                process.join()
            names = [Path(folder, f"{again}-{r}") for r in range(size)]
            told[again] = [n.read_text() for n in names if n.exists()]
    left = [int(text.split()[0]) for text in told[False]]
    if len(left) != size or len(set(left)) != 1:
        wrong.append(f"ranks left after steps {left}")
    if told[False] != told[True]:
        wrong.append("what was loaded is not what they left with")
    return {
        "seed": seed,
        "scheme": scheme,
        "ranks": size,
        "asked": asked,
        "wait": round(wait, 3),
        "left after": left[:1],
        "wrong": wrong,
    }


# - All of it --------------------------------------------------------------------------


def survey(
    kills: int, stops: int, seed: int, names: list[str], lost: bool = False
) -> dict[str, Any]:
    """At least so many kills, and so many stops."""
    for name in names:  # before the fork, so that no job is about loading and compiling
        prepare([torch.zeros(1)], as_scheme(name))
    known, jobs, number = Known(), list[Any](), seed
    while sum(len(job["kills"]) for job in jobs) < kills:
        jobs.append(killed(number, names, known, lost=lost))
        number += 1
        _tell(jobs[-1])
    ends = []
    for number in range(seed, seed + stops):
        ends.append(stopped(number, names))
        _tell(ends[-1])
    all_kills = [kill for job in jobs for kill in job["kills"]]
    return {
        "kills": len(all_kills),
        "kills while saving": sum(kill["while saving"] for kill in all_kills),
        "jobs": len(jobs),
        "with another number of ranks": sum(job["sum"] is not None for job in jobs),
        "jobs that were wrong": sum(bool(job["wrong"]) for job in jobs),
        "stops": len(ends),
        "stops that were wrong": sum(bool(end["wrong"]) for end in ends),
        "by scheme": dict(Counter(job["scheme"] for job in (*jobs, *ends))),
        "trials of kills": jobs,
        "trials of stops": ends,
    }


def _tell(trial: dict[str, Any]) -> None:
    wrong = trial["wrong"]
    print(f"{trial['seed']} {trial['scheme']}: {wrong or 'right'}", flush=True)


def main(
    kills: Annotated[int, typer.Option(help="SIGKILLs, four to a job.")] = 100,
    stops: Annotated[int, typer.Option(help="SIGTERMs, one to a job.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the first jobs.")] = 0,
    lost: Annotated[
        bool, typer.Option("--lost", help="Folders go with kills.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Kill and stop ranks, and say which runs did not go on as they should."""
    begin = time.monotonic()
    found = survey(kills, stops, seed, SCHEMES, lost)
    results = {k: v for k, v in found.items() if not k.startswith("trials")}
    results["took seconds"] = round(time.monotonic() - begin)
    print(json.dumps(results, indent=2))
    if out is not None:
        where = f"--kills {kills} --stops {stops} --seed {seed}" + " --lost" * lost
        about: dict[str, Any] = {
            "command": f"python benchmarks/restarts.py {where} --out "
            f"benchmarks/records/{out.name}",
            "commit": commit(),
        }
        about |= {"versions": versions(), "machine": machine(), "results": results}
        trials = {k: v for k, v in found.items() if k.startswith("trials")}
        out.write_text(json.dumps({**about, **trials}, indent=1) + "\n")
    raise typer.Exit(
        bool(results["jobs that were wrong"] or results["stops that were wrong"])
    )


if __name__ == "__main__":
    if PLAN in os.environ:
        work(json.loads(os.environ[PLAN]))
    else:
        typer.run(main)
