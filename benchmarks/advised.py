"""Does `advise` choose what is the first to the loss, on tasks that it never saw?

    python benchmarks/advised.py --out benchmarks/records/advised_202611.json

`benchmarks/advised/` has training scripts as people write them, with torch's DDP, of
tasks that no other measurement of this repository has. Of each, DDP trains `STEPS`
steps on this machine: where it ends, and half a per cent more, is the target. Then for
each rate `gradtide advise` is asked, and `gradtide race` has its choice and others
train the script over emulated links. What counts is the time to the target from the
first loss that is printed; it is there where a loss and the next are below it.

    python benchmarks/advised.py --measured --out benchmarks/records/advised_202611.json

asks again for a record that is there: by a profile of the network, and with as many
ranks as train. Emulated hosts share this machine's processors, which neither the rate
of a link nor a single rank can tell.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from gradtide.lab.race.script import LOSS
from gradtide.lab.record import origin

HERE, HOSTS, STEPS, NEAR = Path(__file__).parent, "4", 300, 1.005
BEHIND = 1.05  # times the first one's time: the bar
SCRIPTS = "denoise", "field"
EXDYNA = "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')"
# By rate, of links in the lab: who races beside the choice, and for how many seconds.
RACES = {
    "20mbit": ((EXDYNA, "wfbp(wire='e3m0')", "wfbp(wire='int8')"), 50),
    "200mbit": (
        ("ddp", "wfbp(wire='bf16')", "wfbp(wire='e3m0')", EXDYNA, "diloco(warmup=240)"),
        30,
    ),
}
GRADTIDE = sys.executable, "-m", "gradtide"


def told(*command: str) -> str:
    """What a command prints; its own errors go to this program's."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def target(script: str) -> float:
    """A loss, in which DDP ends on this machine, and a little more."""
    run = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", HOSTS
    command = *run, script, "--steps", str(STEPS)
    # Torch aborts a rank now and then as it ends, when all is printed.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    losses = re.findall(LOSS, done.stdout, re.IGNORECASE)
    assert f"step {STEPS} " in done.stdout, f"{script} ended with {done.returncode}"
    return NEAR * (float(losses[-1]) + float(losses[-2])) / 2


def advised(script: str, ranks: str, folder: Path, *where: str) -> str:
    """What `advise` says is to be used, when so many ranks were seen."""
    out = folder / "plan.json"
    how = *where, "--steps", str(STEPS), "--json", str(out)
    run = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks
    print(told(*GRADTIDE, "advise", *how, "--", *run, script).splitlines()[0])
    return str(json.loads(out.read_text())["recommended"])


def first_below(course: dict[str, list[float]], loss: float) -> float | None:
    """Seconds until a loss and the next are below; None if that never was."""
    both = zip(course["seconds"], pairwise(course["loss"]), strict=False)
    return next((at for at, pair in both if max(pair) <= loss), None)


def raced(
    script: str, rate: str, schemes: list[str], seconds: int, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Where each contestant was when."""
    out = folder / "race"
    how = "--every", "1", "--seconds", str(seconds), "--out", str(out)
    where = "--hosts", HOSTS, "--rate", rate, "--schemes", ",".join(schemes)
    told(*GRADTIDE, "race", *where, *how, "--", script)
    record = json.loads((out / "record.json").read_text())
    return {each["scheme"]: each["course"] for each in record["results"]}


def asked() -> dict[str, Any]:
    """What the record says first."""
    return {**origin(sys.argv), "command": f"python {shlex.join(sys.argv)}"}


def verdict(choice: str, times: dict[str, float | None]) -> dict[str, Any]:
    """How far a choice is behind the first; None if it did not come there, or race."""
    there = [time for time in times.values() if time is not None]
    own = times.get(choice)
    behind = own / min(there) if own is not None else None
    return {
        "choice": choice,
        "behind the first": behind and round(behind, 3),
        "met": behind is not None and behind <= BEHIND,
    }


def ask_again(out: Path) -> None:
    """Add to a record what is chosen by the network as it is measured."""
    record = json.loads(out.read_text())
    record["measured"] = asked()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for row in record["results"]:
            network = folder / f"{row['rate']}.json"
            if not network.exists():
                there = "--hosts", HOSTS, "--rate", row["rate"], "--seconds", "30"
                told(*GRADTIDE, "profile", "network", *there, "--out", str(network))
            script = str(
                (HERE / "advised" / f"{row['script']}.py").relative_to(Path.cwd())
            )
            choice = advised(script, HOSTS, folder, "--network", str(network))
            row["by the measured network"] = verdict(
                choice, row["seconds to the target"]
            )
            print(json.dumps(row), flush=True)
    out.write_text(json.dumps(record, indent=2))


def main(
    scripts: Annotated[str, typer.Option(help="With commas between.")] = ",".join(
        SCRIPTS
    ),
    rates: Annotated[str, typer.Option(help="With commas between.")] = ",".join(RACES),
    measured: Annotated[
        bool, typer.Option("--measured", help="Ask again, for a record.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The record to write.")] = None,
) -> None:
    """Ask, race, and say how far the choice is behind the first."""
    if measured:
        assert out is not None
        ask_again(out)
        return
    results, about = list[dict[str, Any]](), asked()
    if out is not None and out.exists():  # scripts that were raced before stay
        record = json.loads(out.read_text())
        again = scripts.split(",")
        results = [r for r in record["results"] if r["script"] not in again]
        about = {k: v for k, v in record.items() if k != "results"}
    for name in scripts.split(","):
        script = str((HERE / "advised" / f"{name}.py").relative_to(Path.cwd()))
        loss = target(script)
        for rate in rates.split(","):
            others, seconds = RACES[rate]
            with tempfile.TemporaryDirectory() as where:
                folder = Path(where)
                choice = advised(script, "1", folder, "--hosts", HOSTS, "--rate", rate)
                schemes = list(dict.fromkeys((choice, *others)))
                found = raced(script, rate, schemes, seconds, folder)
            times = {each: first_below(seen, loss) for each, seen in found.items()}
            results.append(
                {
                    "script": name,
                    "rate": rate,
                    "target": round(loss, 5),
                    "seconds to the target": times,
                    **verdict(choice, times),
                }
            )
            print(json.dumps(results[-1]), flush=True)
            if out is not None:
                out.write_text(json.dumps({**about, "results": results}, indent=2))


if __name__ == "__main__":
    typer.run(main)
