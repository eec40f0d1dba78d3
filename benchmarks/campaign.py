"""Faults in real ranks, by the hundred: how does each of them end?

    python benchmarks/campaign.py --trials 1000 --out out/campaign.json
    python benchmarks/campaign.py --only "SIGKILL at a cut" --trials 20
    python benchmarks/campaign.py --replay 0:17
    python benchmarks/campaign.py soak --steps 100000

A trial is two to eight ranks that train a small model by a drawn scheme, and one fault
of `campaign_faults.py`, which happens where a rank's own program is at a point
(`campaign_rank.py`). What was drawn follows from the seed and the trial's number. Where
all go on, the same training is run without the fault, and has to end with the same
bits. Every process has a deadline, and is killed after that.

A trial is wrong if some rank *hung*; if ranks *diverged* without an error; if something
is *left* behind (processes, shared memory, temporary files; threads of ranks that have
let go of all they had); if an error is *unclear*: it does not name the rank or the
link, and what was under way; or if it is *late*: more than `MORE` seconds after the
group's timeout, counted from the fault.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import soak as soaks
import torch
import torch._dynamo  # or every rank does, at length
import typer
from campaign_faults import FAULTS, QUIET, Trial, draw_trial
from campaign_rank import FAR_TIMEOUT, LATER, TIMEOUT, are_ready, in_lab, start

from gradtide.lab.record import commit, machine, versions
from gradtide.runtime import join  # noqa: F401  # as above
from gradtide.runtime.ahead import prepare
from gradtide.runtime.exchange import rounds  # noqa: F401  # as above
from gradtide.scheme import as_scheme

# Torch's store looks up the name of whoever connects, and answers nobody meanwhile.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

MORE = 3.0  # seconds behind the timeout in which an error has to be there
ENDING = 10.0  # seconds that a process may take to end then
WHOLE = 45.0  # seconds of a trial in which nothing happens
AT_ONCE = 3  # trials beside each other: some of them wait
TURN = 0.01  # seconds between two looks
HERE = Path(__file__)
COMPILES = "gradtide-compiles-"
LAB = ("--rate", "100mbit")
WAYS: dict[str, list[dict[str, Any]]] = {  # timetables of the lab
    "link: down": [{"at": f"{LATER}s", "link": "down"}],
    "link: down and up": [
        {"at": f"{LATER}s", "link": "down"},
        {"at": f"{LATER + 1.5}s", "link": "up"},
    ],
    "link: slow": [{"at": f"{LATER}s", "rate": "1%"}],
    "link: loss": [],
}
UNDER_WAY = re.compile(
    r"failed in step \d|in vain in step \d|connecting failed|cannot take part"
    r"|differs between ranks|is infinite or NaN|has become infinite or NaN"
    r"|in another order|cannot connect"
)


# - A job ------------------------------------------------------------------------------


@dataclass
class Job:
    """What has become of the ranks of a trial."""

    trial: Trial
    told: list[dict[str, Any]] = field(default_factory=list)  # by ranks; {} of a silent
    codes: list[int | None] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)
    fault: float | None = None  # when it happened
    ended: list[float] = field(default_factory=list)  # when processes had
    left: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)


def times(path: Path) -> list[float]:
    """Those that a process has left in a file."""
    with suppress(FileNotFoundError):
        return [float(line) for line in path.read_text().split()]
    return []


def happens_outside(job: Job, ranks: list[Any], folder: Path) -> None:
    """What the campaign does to a rank: at a random moment, and to one that stopped."""
    trial, now = job.trial, time.monotonic()
    act, pid = trial.fault.act, ranks[trial.dead].pid
    if job.fault is None:
        ready = times(folder / f"ready{trial.dead}")
        waits = not (ready and are_ready(folder, trial.ranks))
        if trial.fault.point == "random" and not waits and now > ready[0] + trial.wait:
            job.fault = time.monotonic()
            kind = signal.SIGKILL if act == "kill" else signal.SIGSTOP
            with suppress(ProcessLookupError):
                os.kill(pid, kind)
        elif happened := times(folder / "fault"):
            job.fault = happened[0]
    elif act == "pause" and now > job.fault + trial.pause:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def run(trial: Trial) -> Iterator[Job | None]:
    """Run a trial's ranks; None while they run, and at last what has become of them."""
    job, fork, begin = Job(trial), mp.get_context("fork"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradtide-campaign-") as name:
        folder, door = Path(name), socket.create_server(("127.0.0.1", 0))
        (folder / "tmp").mkdir()
        ranks = [
            fork.Process(target=start, args=(rank, trial, folder, door))
            for rank in range(trial.ranks)
        ]
        for process in ranks:
            process.start()
        door.close()
        try:
            yield from _until_ended(job, ranks, folder, begin)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        job.codes = [process.exitcode for process in ranks]
        job.told = [_told(folder / f"rank{rank}") for rank in range(trial.ranks)]
        logs = [folder / f"log{rank}" for rank in range(trial.ranks)]
        job.logs = [log.read_text() if log.exists() else "" for log in logs]
        job.left = left_behind([p.pid or 0 for p in ranks], folder / "tmp")
    yield job


def _until_ended(
    job: Job, ranks: list[Any], folder: Path, begin: float
) -> Iterator[None]:
    """Wait for all ranks, and not for ever; who was stopped is woken at the end."""
    trial, woken = job.trial, 0.0
    job.ended = [0.0] * trial.ranks
    stopped = trial.fault.act == "stop"
    while True:
        now = time.monotonic()
        happens_outside(job, ranks, folder)
        for rank, process in enumerate(ranks):
            if not job.ended[rank] and not process.is_alive():
                job.ended[rank] = now
        alive = [rank for rank in range(trial.ranks) if not job.ended[rank]]
        if not alive:
            return
        limit = (job.fault or now) + TIMEOUT + MORE + ENDING
        if woken:
            limit = woken + TIMEOUT + MORE + ENDING
        others = [rank for rank in alive if rank != trial.dead]
        over = now > limit or now > begin + WHOLE
        if stopped and not woken and job.fault and (not others or over):
            woken = now
            job.hung += others
            for rank in others:
                os.kill(ranks[rank].pid, signal.SIGUSR1)
            os.kill(ranks[trial.dead].pid, signal.SIGCONT)
        elif over:
            job.hung = sorted({*job.hung, *alive})
            for rank in alive:  # so that it tells where it is
                os.kill(ranks[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)
            return
        yield None


def _told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def left_behind(pids: list[int], temporary: Path) -> list[str]:
    """What of these processes, which have ended, is still there."""
    files = [path.name for path in temporary.iterdir()]
    # Who compiles first locks a file, which stays.
    found = [f"file {name}" for name in files if not name.startswith(COMPILES)]
    for path in Path("/dev/shm").iterdir():
        # Of some that are another program's a name has digits between letters.
        if {*map(int, re.findall(r"(?<![^\W_])\d+(?![^\W_])", path.name))} & {*pids}:
            found.append(f"shared memory {path.name}")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            text = stat.read_text()
            state, _, _, session = text.rpartition(")")[2].split()[:4]
            if int(session) in pids and state != "Z":
                found.append(f"process {text[:60]}")
    return found


# - The lab ----------------------------------------------------------------------------


def run_in_lab(trial: Trial) -> Iterator[Job | None]:
    """The same on links that change."""
    job, begin = Job(trial), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradtide-campaign-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        events = [{**e, "host": trial.dead} for e in WAYS[trial.fault.act]]
        table = folder / "events.json"
        table.write_text(json.dumps({"events": events}))
        words = [sys.executable, "-m", "gradtide", "lab", "run"]
        words += ["--hosts", str(trial.ranks), *LAB]
        words += ["--events", str(table)] if events else []
        words += ["--delay", "1ms", "--timeout", "120"]
        if trial.fault.act == "link: loss":
            words += ["--loss", "1%"]
        words += ["--", sys.executable, str(HERE), "in-lab", str(trial.seed)]
        words += [str(trial.number), str(folder), trial.fault.name]
        log = (folder / "log").open("w+")
        environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
        lab = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        while lab.poll() is None and time.monotonic() < begin + 3 * WHOLE:
            if job.fault is None and "loses its link" in (folder / "log").read_text():
                job.fault = time.monotonic()
            yield None
        lab.terminate()
        lab.wait()
        job.codes = [lab.returncode]
        job.told = [_told(folder / f"rank{rank}") for rank in range(trial.ranks)]
        ended = [times(folder / f"ended{rank}") for rank in range(trial.ranks)]
        job.ended = [each[0] if each else 0.0 for each in ended]
        job.hung = [rank for rank, each in enumerate(ended) if not each]
        job.logs = [(folder / "log").read_text()]
        pids = [told["pid"] for told in job.told if told]
        job.left = left_behind(pids, folder / "tmp")
    yield job


# - What is right ----------------------------------------------------------------------


def names(trial: Trial, text: str) -> bool:
    """Whether an error names the rank, or two that differ, or the link to it."""
    said = {int(n) for found in RANKS.findall(text) for n in re.findall(r"\d+", found)}
    if trial.fault.act.startswith(("differ", "state", "spoil", "edit")):
        return bool(said)
    # A link has two ends; who speaks is named as well.
    own = re.match(r"rank (\d+)", text)
    rest = text[own.end() :] if own else text
    found = {int(n) for f in RANKS.findall(rest) for n in re.findall(r"\d+", f)}
    if trial.fault.point == "lab" or (trial.tcp and "job's store" in text):
        return bool(found)  # what others knew went with rank 0, which had the store
    return trial.dead in found


RANKS = re.compile(r"ranks? (?:\d+(?:, | and )?)+")


def judge(job: Job, quiet: Job | None) -> dict[str, Any]:
    """What is wrong with a trial, and how it ended; `quiet`: without the fault."""
    trial, fault, wrong = job.trial, job.trial.fault, Counter[str]()
    why: list[str] = []

    def say(kind: str, words: str) -> None:
        wrong[kind] += 1
        why.append(f"{kind}: {words}")

    cannot = re.search(r"^error: .*", "\n".join(job.logs), re.M)
    if cannot and fault.point == "lab" and not any(job.told):
        return verdict(job, "not run", False, [], Counter(), [cannot.group()])
    for rank in job.hung:
        say("hung", f"rank {rank} {where(job.logs[rank : rank + 1])}")
    for thing in job.left:
        say("left", thing)
    gone = fault.act.startswith(("kill", "leave"))
    own_error = fault.act in ("raise", "full disk", "stop")
    seconds, ends = [], Counter[str]()
    for rank, told in enumerate(job.told):
        if rank in job.hung or (rank == trial.dead and gone):
            continue
        ends[told.get("ended", "silent")] += 1
        if not told:
            say("unclear", f"rank {rank} said nothing ({job.codes})")
            continue
        if told["ended"] == "done":
            continue
        # Torch makes a group in a call that nobody can leave, and so it asks a store.
        if not re.search("connecting failed|job's store", told["text"]):
            for thing in (*told.get("threads", ()), *told.get("sockets", ())):
                say("left", f"rank {rank}: {thing}")
        if rank == trial.dead and own_error:
            continue
        if job.fault is not None:
            seconds.append(told["at"] - job.fault)
            limit = FAR_TIMEOUT if fault.point == "lab" else TIMEOUT
            if seconds[-1] > limit + MORE:
                say("late", f"rank {rank} after {seconds[-1]:.1f} s: {told['text']}")
        own = rank == trial.dead and fault.act.startswith("differ")
        text = told["text"]
        if not (own or (names(trial, text) and UNDER_WAY.search(text))):
            say("unclear", f"rank {rank}: {told['kind']}: {text}")
    happened = job.fault is not None or fault.act in ("nothing", "state: whole")
    if fault.act.startswith("link"):
        happened = True
    # Others may have all they need by then; their bits are compared.
    alone = fault.act in ("kill", "stop", "raise")
    may_end = alone or fault.point in LAST
    if ends["error"] and ends["done"] and not may_end:
        say("diverged", f"some ranks ended and some failed: {dict(ends)}")
    ended = "error" if ends["error"] else "went on"
    refused = [told.get("refused", "") for told in job.told]
    if happened and fault.end == "error" and not (ends["error"] or may_end):
        say("diverged", "nobody noticed")
    if fault.end in ("same", "refused") and ends["error"]:
        texts = [told.get("text") for told in job.told]
        say("stopped", f"it had to go on: {texts}")
    if happened and fault.end == "refused":
        ended = "refused" if ended == "went on" else ended
        for rank, text in enumerate(refused):
            named = rank == trial.dead or RANKS.search(text)
            if not (text and named):
                say("unclear", f"rank {rank} refused by {text!r}")
    digests = {told.get("digest") for told in job.told if told.get("ended") == "done"}
    digests -= {None}
    if len(digests) > 1:
        say("diverged", "ranks end with different parameters")
    if quiet is not None and len(digests) == 1:
        expected = {told.get("digest") for told in quiet.told}
        if digests != expected:
            say("diverged", "other bits than without the fault")
    return verdict(job, ended, happened, seconds, wrong, why)


def verdict(
    job: Job,
    ended: str,
    happened: bool,
    seconds: list[float],
    wrong: Counter[str],
    why: list[str],
) -> dict[str, Any]:
    """What there is to say of a trial."""
    trial = job.trial
    return {
        "number": trial.number,
        "fault": trial.fault.name,
        "ranks": trial.ranks,
        "scheme": trial.scheme,
        "ended": ended,
        "happened": happened,
        "seconds": round(max(seconds, default=0.0), 2),
        "wrong": dict(wrong),
        "why": why,
    }


def where(logs: list[str]) -> str:
    """The innermost frames of a rank that hangs, as `faulthandler` has told them."""
    told = "".join(logs).rpartition("Current thread")[2] or "".join(logs)
    lines = [line.strip() for line in told.splitlines() if "File" in line]
    return "; ".join(lines[:6])


LAST = "end", "random"  # ranks may have ended by then


def wants_quiet(job: Job) -> bool:
    """Whether there is something to compare with a run without the fault."""
    same = job.trial.fault.end in ("same", "refused")
    dying = job.trial.fault.act in ("kill", "stop", "raise")
    return (same or dying) and any("digest" in told for told in job.told)


def perform(trial: Trial) -> Iterator[tuple[dict[str, Any], list[Job]] | None]:
    """One trial; None while it runs, and at last what came of it."""
    job: Job | None = None
    for job in run_in_lab(trial) if trial.fault.point == "lab" else run(trial):
        if job is None:
            yield None
    assert job is not None
    jobs, quiet = [job], None
    if wants_quiet(job):
        for quiet in run(without_fault(trial)):
            if quiet is None:
                yield None
        assert quiet is not None
        jobs.append(quiet)
    yield judge(job, quiet), jobs


def without_fault(trial: Trial) -> Trial:
    """The same training, which nobody disturbs."""
    quiet = replace(trial, fault=QUIET[0])
    if trial.fault.point == "lab":
        from campaign_rank import LAB_STEPS

        quiet = replace(quiet, steps=LAB_STEPS, saves=LAB_STEPS)
    return quiet


# - Many trials ------------------------------------------------------------------------


def warm_up() -> None:
    """Load and compile what trials need, before they are forked from this process."""
    torch.set_num_threads(1)
    numbers = [torch.zeros(1), torch.zeros(1, dtype=torch.float64)]
    texts = {draw_trial(0, number).scheme for number in range(300)}
    for text in sorted(texts):
        prepare(numbers, as_scheme(text))
    gc.collect()


def campaign(
    seed: int, numbers: Iterator[int], only: str, until: float
) -> Iterator[dict[str, Any]]:
    """What came of the trials, some of them at once, in the order of their end."""
    under_way: deque[Any] = deque()
    more = True
    while under_way or more:
        while more and len(under_way) < AT_ONCE:
            number = next(numbers, None)
            if number is None or time.monotonic() > until:
                more = False
                break
            under_way.append(perform(draw_trial(seed, number, only)))
        time.sleep(TURN)
        for _ in range(len(under_way)):
            trial = under_way.popleft()
            found = next(trial)
            if found is None:
                under_way.append(trial)
            else:
                trial.close()
                yield found[0]


def rows_of(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of a row each."""
    rows: dict[str, dict[str, Any]] = {}
    for fault in FAULTS:
        own = [each for each in found if each["fault"] == fault]
        if own:
            counts = Counter(each["ended"] for each in own if each["happened"])
            counts["did not happen"] = sum(not each["happened"] for each in own)
            counts["wrong"] = sum(bool(each["wrong"]) for each in own)
            longest = max(each["seconds"] for each in own)
            rows[fault] = {"trials": len(own), **+counts, "longest seconds": longest}
    return rows


def summary(found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """All trials together."""
    wrong = Counter(kind for each in found for kind in each["wrong"])
    times = sorted(each["seconds"] for each in found if each["seconds"])
    return {
        "trials": len(found),
        "wrong": sum(bool(each["wrong"]) for each in found),
        **{kind: wrong[kind] for kind in KINDS},
        "did not happen": sum(not each["happened"] for each in found),
        **Counter(each["ended"] for each in found),
        "median seconds to an error": times[len(times) // 2] if times else None,
        "longest seconds to an error": times[-1] if times else None,
        "took seconds": round(seconds),
    }


KINDS = "hung", "diverged", "left", "unclear", "late", "stopped"


def replay(seed: int, number: int, only: str) -> bool:
    """Run one trial, and print all there is to know; returns whether it was right."""
    trial = draw_trial(seed, number, only)
    print(json.dumps(asdict(trial), indent=2))
    for found in perform(trial):
        if found is None:
            time.sleep(TURN)
            continue
        verdict, jobs = found
        for job, what in zip(jobs, ("the trial", "without the fault"), strict=False):
            print(
                f"\n--- {what}: codes {job.codes}, hung {job.hung}, fault {job.fault}"
            )
            for rank, told in enumerate(job.told):
                print(f"rank {rank}: {json.dumps(told, indent=1)}")
            for rank, log in enumerate(job.logs):
                print(f"- log {rank}:\n{log}")
        print(json.dumps(verdict, indent=2))
        return not verdict["wrong"]
    raise AssertionError


app = typer.Typer()


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    trials: Annotated[int, typer.Option(help="How many.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    first: Annotated[int, typer.Option(help="The number of the first trial.")] = 0,
    minutes: Annotated[float, typer.Option(help="None begins after so many.")] = 60.0,
    only: Annotated[str, typer.Option(help="This row alone.")] = "",
    again: Annotated[str, typer.Option("--replay", help="SEED:NUMBER")] = "",
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Run so many trials, and say which were wrong."""
    if context.invoked_subcommand:
        return
    if only and only not in FAULTS:
        raise typer.BadParameter(f"rows are: {', '.join(FAULTS)}")
    warm_up()
    if again:
        of, number = map(int, again.split(":"))
        raise typer.Exit(not replay(of, number, only))
    begin, found = time.monotonic(), list[dict[str, Any]]()
    numbers = iter(range(first, first + trials))
    option = f' --only "{only}"' if only else ""
    for each in campaign(seed, numbers, only, begin + 60 * minutes):
        found.append(each)
        if each["wrong"]:
            hint = f"--replay {seed}:{each['number']}{option}"
            print(hint, json.dumps(each, indent=1), flush=True)
        if len(found) % 50 == 0:
            print(f"{len(found)} trials, {time.monotonic() - begin:.0f} s", flush=True)
    found.sort(key=lambda each: each["number"])
    results = summary(found, time.monotonic() - begin)
    print(json.dumps(results, indent=2))
    if out is not None:
        write(out, f"--trials {trials} --seed {seed}{option}", results, found)
    raise typer.Exit(bool(results["wrong"]))


def about(options: str, out: Path) -> dict[str, Any]:
    """What every record says first."""
    return {
        "command": f"python benchmarks/campaign.py {options} --out {out}",
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def write(
    out: Path, options: str, results: dict[str, Any], found: list[dict[str, Any]]
) -> None:
    """The record: results, rows, what was wrong, and a line for each trial."""
    record: dict[str, Any] = {
        **about(options, out),
        "timeout": TIMEOUT,
        "results": results,
        "rows": rows_of(found),
        "wrong": [each for each in found if each["wrong"]],
    }
    keys = "number", "fault", "ranks", "scheme", "ended", "seconds"
    lines = [json.dumps([each[key] for key in keys]) for each in found]
    text = json.dumps(record, indent=2)[:-2] + ',\n  "trials": [\n    '
    out.write_text(text + ",\n    ".join(lines) + "\n  ]\n}\n")


@app.command("soak")
def long_runs(
    steps: Annotated[int, typer.Option(help="Of each scheme.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the disturbances.")] = 0,
    minutes: Annotated[float, typer.Option(help="For each scheme, at most.")] = 60.0,
    only: Annotated[str, typer.Option(help="This scheme alone.")] = "",
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Train for long, disturbed now and then, and say what grew or came apart."""
    options = f"soak --steps {steps} --seed {seed}"
    known = {} if out is None else about(options, out)  # before it is written
    warm_up()
    found = []
    for scheme in [only] if only else soaks.SCHEMES:
        prepare([torch.zeros(1)], as_scheme(scheme))
        found.append(soaks.soak(scheme, steps, seed, 60 * minutes))
        print(json.dumps(found[-1]), flush=True)
        if out is not None:
            wrong = sum(bool(each["wrong"]) for each in found)
            results = {"trainings": len(found), "wrong": wrong}
            record = {**known, "results": results, "trainings": found}
            out.write_text(json.dumps(record, indent=2) + "\n")
    raise typer.Exit(any(each["wrong"] for each in found))


@app.command("in-lab", hidden=True)
def as_rank_of_the_lab(seed: int, number: int, folder: Path, only: str) -> None:
    """Be a rank of a trial whose links change."""
    trial = draw_trial(seed, number, only)
    in_lab(trial, folder)


if __name__ == "__main__":
    app()
