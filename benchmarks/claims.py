"""Claims of docs/benchmarks.md that a later change of code could make untrue.

    python benchmarks/claims.py

What a simulation made is made again, and compared with its record: first what the clock
gives, number by number, then whether the row of the page has the figures of the record.
What was timed cannot be made again anywhere: of that, the records are listed that are
older than the last change of the code that they measured. tests/test_claims.py does the
quick part at every change.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import crossovers
import published_curvature as curvature
import typer

import fusion
from gradtide.fusion import Fusion, best, search
from gradtide.planner.network import Network
from gradtide.planner.virtual import simulate
from gradtide.scheme import parse
from gradtide.simulate.grid import read_network, read_trace, run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
RECORDS = ROOT / "benchmarks/records"
# Of a record, what may be another one each time: where and when it was made, and how
# long that took.
PASSING = {"command", "commit", "versions", "machine", "cores", "took", "met"}
PASSING |= {"seconds_by_scheme", "cpu_seconds"}
Record = Mapping[str, Any]
# Of a record, what the code gives now for a part of it, and what the record has there.
Part = Callable[[Record], tuple[Any, Any]]


@dataclass(frozen=True)
class Claim:
    """A row of the page that a deterministic run makes."""

    row: str  # how it begins on the page
    record: str
    command: str  # behind python, without --out
    said: Callable[[Record], list[str]]  # figures of the record, as the row has them
    part: Part | None = None  # a quick one; None: a test of its own runs it
    passing: frozenset[str] = frozenset()  # keys that are not compared, besides PASSING
    tolerance: float = 1e-6  # of numbers, as a share: another order of sums


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# - Quick parts ------------------------------------------------------------------------


def _curvature(record: Record) -> tuple[Any, Any]:
    """ResNet-50's three rows."""
    found = islice(curvature.rows(curvature.STAGED), 3)
    now = [{"simulated": r.simulated, "stages": [*r.simulated_stages]} for r in found]
    then = [
        {"simulated": row["simulated"], "stages": row["simulated_stages"]}
        for row in record["rows"][:3]
    ]
    return now, then


def _crossovers(record: Record) -> tuple[Any, Any]:
    """A pair that is met, and the one that is furthest off."""
    asked = (8, "topk", "dense"), (32, "topkdsa", "topka2a")
    then = {(r["ranks"], r["faster"], r["than"]): r["below"] for r in record["rows"]}
    now = [crossovers.crossover((one, other), size) for size, one, other in asked]
    return now, [then[key] for key in asked]


def _thousands(record: Record) -> tuple[Any, Any]:
    """Four schemes at two rates among 4096 ranks."""
    rates = (1e8, 1e10)
    now, then = [], []
    exdyna = "exdyna(0.01, schedule='local', warmup=240, wire='e3m0')"
    for name in ("wfbp", "topk", "cltk", exdyna):
        grid = run(
            read_trace("replay:resnet50"),
            read_network("10gbit", 8),
            {name: parse(name)},
            [4096],
            rates,
        )
        now += [cell.prediction.step for cell in grid.cells]
        cells = [cell for cell in record["cells"] if cell["scheme"] == name]
        then += [cells[0]["step"], cells[2]["step"]]
    return now, then


def _fusion(record: Record) -> tuple[Any, Any]:
    """ResNet-50 on one network: the best size, the binary search, and what is fixed."""
    row = record["rows"][1]
    step = fusion.trace(row["workload"])
    hosts, rate, alpha = fusion.NETWORKS[row["network"]]
    there = Network.ideal(hosts, 1, rate, alpha=alpha)
    binary = fusion.SEARCHES["binary"]

    def seconds(one: Fusion) -> float:
        scheme = replace(parse(record["scheme"]), fusion=one)
        return simulate(step, scheme, there).step

    found = best(search(binary, step.nbytes, seconds))
    now = {
        "exhaustive": seconds(binary.at(row["exhaustive"]["megabytes"])),
        "binary": found.seconds,
        **{name: seconds(one) for name, one in fusion.FIXED.items()},
    }
    return now, {name: row[name]["seconds"] for name in now}


# - The table --------------------------------------------------------------------------


def _worst_of(record: Record, methods: str) -> list[str]:
    return [percent(record["worst"][name]) for name in methods.split()]


def _missed(record: Record) -> list[str]:
    """How far crossovers are off; of the one pair that is special, by itself."""
    rows = record["rows"]
    others = [abs(r["error"]) for r in rows if r["faster"] != "topkdsa"]
    dsa = [r for r in rows if r["faster"] == "topkdsa"]
    few = max(abs(r["error"]) for r in dsa if r["ranks"] <= 64)
    many = max(abs(r["error"]) for r in dsa if r["ranks"] > 64)
    return [percent(max(others)), percent(few), percent(many)]


def _searched(record: Record) -> list[str]:
    names = ("binary", "bayesian")
    worst = max(row[name]["above"] for row in record["rows"] for name in names)
    default = max(row["default"]["above"] for row in record["rows"])
    return [f"{worst:.2%}".replace("%", " %"), f"{default:.0%}".replace("%", " %")]


def _of_papers(record: Record) -> list[str]:
    import papers_page

    values = record["values"]
    claims = [c for c in papers_page.CLAIMS if not c.bound]
    far = [papers_page.off(c, values) for c in claims]
    missed = [x for x in far if abs(x) > papers_page.REACHED]
    every = len(papers_page.CLAIMS)
    return [f"{every - len(missed)} of {every} figures"]


CLAIMS = (
    Claim(
        "48 published iteration times",
        "published_202611.json",
        "benchmarks/published.py",
        lambda record: [
            said.removesuffix(" %")
            for said in _worst_of(record, "BSP WFBP-unfused MG-WFBP")
        ],  # tests/planner/test_published.py runs it
    ),
    Claim(
        "6 published K-FAC times",
        "published_curvature_202611.json",
        "benchmarks/published_curvature.py",
        lambda record: [percent(record["worst"])],
        _curvature,
    ),
    Claim(
        "derived crossover densities",
        "crossovers_202611.json",
        "benchmarks/crossovers.py",
        _missed,
        _crossovers,
    ),
    Claim(
        "4096 ranks, 15 schemes, 6 rates",
        "simulate_4096_202611.json",
        "benchmarks/simulate.py",
        lambda record: [f"{record['seconds']:.1f} s"],
        _thousands,
        frozenset({"seconds"}),
    ),
    Claim(
        "search for the size of buckets against all sizes",
        "fusion_202611.json",
        "benchmarks/fusion.py",
        _searched,
        _fusion,
    ),
    Claim(
        "what papers state of their systems",
        "papers_202611.json",
        f"benchmarks/papers.py --page {tempfile.gettempdir()}/papers.md",
        _of_papers,  # tests/test_papers.py runs it
    ),
)
# What other records measured, by how their names begin; the longest that fits.
EVERYTHING = ("src/gradtide",)
STEPS = (
    "src/gradtide/collectives",
    "src/gradtide/core",
    "src/gradtide/fusion",
    "src/gradtide/runtime",
    "src/gradtide/scheme",
    "src/gradtide/selectors",
    "src/gradtide/transport",
    "src/gradtide/wire",
)
LEARNING = (*STEPS, "src/gradtide/lab/workloads")
TIMED: Mapping[str, tuple[str, ...]] = {
    "": STEPS,
    "ablation": (*LEARNING, "benchmarks/tasks.py"),
    "campaign": EVERYTHING,
    "clean_clone": ("tests", "Makefile"),
    "collectives": ("src/gradtide/transport",),
    "curvature": (*STEPS, "src/gradtide/kfac"),
    "ddp_suite": EVERYTHING,
    "elastic": EVERYTHING,
    "gpu": EVERYTHING,
    "kills": EVERYTHING,
    "lab_network": ("src/gradtide/lab",),
    "law": ("src/gradtide/collectives", "src/gradtide/core", "src/gradtide/wire"),
    "league": (*LEARNING, "benchmarks/rivals.py"),
    "learning": LEARNING,
    "make_test": ("tests", "Makefile"),
    "mutations": ("src/gradtide/scheme", "src/gradtide/core"),
    "predictions": (*STEPS, "src/gradtide/planner"),
    "selection": ("src/gradtide/selectors",),
    "strangers": ("src/gradtide/transport",),
    "time": LEARNING,
    "tuning": (*STEPS, "src/gradtide/planner/tuning"),
    "wires": ("src/gradtide/wire",),
}


# - Comparing --------------------------------------------------------------------------


def differences(
    now: Any,
    then: Any,
    tolerance: float,
    passing: frozenset[str] = frozenset(),
    where: str = "",
) -> Iterator[str]:
    """Where two values differ, and how; keys that are passing are not looked at."""
    if isinstance(now, dict) and isinstance(then, dict):
        for key in sorted((now.keys() | then.keys()) - PASSING - passing):
            if (key in now) != (key in then):
                yield f"{where}/{key}: only {'now' if key in now else 'then'}"
            elif key in now:
                place = f"{where}/{key}"
                yield from differences(now[key], then[key], tolerance, passing, place)
    elif isinstance(now, list | tuple) and isinstance(then, list | tuple):
        if len(now) != len(then):
            yield f"{where}: {len(now)} now, {len(then)} then"
        for i, (one, other) in enumerate(zip(now, then, strict=False)):
            yield from differences(one, other, tolerance, passing, f"{where}/{i}")
    elif isinstance(now, float | int) and isinstance(then, float | int):
        if not math.isclose(now, then, rel_tol=tolerance, abs_tol=1e-12):
            yield f"{where}: {now:.6g} now, {then:.6g} then"
    elif now != then:
        yield f"{where}: {now!r} now, {then!r} then"


def load(name: str) -> Record:
    found: Record = json.loads((RECORDS / name).read_text())
    return found


def row_of(claim: Claim, text: str) -> str:
    """The row of the page; ValueError if there is none, or more than one."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {claim.row}")]
    if len(rows) != 1:
        raise ValueError(f"{PAGE.name}: {len(rows)} rows begin with {claim.row!r}")
    return rows[0]


def unsaid(claim: Claim, text: str) -> list[str]:
    """Figures of the record that the row of the page does not have."""
    row = row_of(claim, text)
    return [figure for figure in claim.said(load(claim.record)) if figure not in row]


def wrong_now(claim: Claim) -> list[str]:
    """Where the code gives something else than the record, in the quick part."""
    if claim.part is None:
        return []
    now, then = claim.part(load(claim.record))
    return list(differences(now, then, claim.tolerance, claim.passing))


def made_again(claim: Claim) -> list[str]:
    """The same of the whole record, which the command makes once more."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / claim.record
        command = [sys.executable, *shlex.split(claim.command), "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        now = json.loads(out.read_text())
    then = load(claim.record)
    return list(differences(now, then, claim.tolerance, claim.passing))


# - Records of what was timed ----------------------------------------------------------


def linked(text: str) -> list[str]:
    """The records that the page links to, each once."""
    return sorted(set(re.findall(r"records/([\w.-]+\.json)", text)))


def measured(name: str) -> tuple[str, ...]:
    """The code that a record measured."""
    return TIMED[max((p for p in TIMED if name.startswith(p)), key=len)]


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def made_at(name: str) -> str:
    """The commit that a record is of; if it does not say or git has it not, its own."""
    found = load(name)
    said = str(found.get("commit") or "") if isinstance(found, dict) else ""
    commit = said.removesuffix("-dirty")
    if commit and _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return commit
    return _git("log", "-1", "--format=%H", "--", f"benchmarks/records/{name}")


def changes_since(name: str) -> int:
    """How many later commits changed the code that a record measured."""
    count = _git("rev-list", "--count", f"{made_at(name)}..HEAD", "--", *measured(name))
    return int(count or 0)


def main(
    rerun: Annotated[bool, typer.Option(help="Make whole records again.")] = True,
) -> None:
    """Say which claims do not hold now (and fail), and which records are old."""
    text, bad = PAGE.read_text(), 0
    for claim in CLAIMS:
        found = made_again(claim) if rerun else wrong_now(claim)
        found += [f"the row does not say {figure}" for figure in unsaid(claim, text)]
        print(f"{'differs' if found else 'holds':8} {claim.row} ({claim.record})")
        for line in found[:10]:
            print(f"         {line}")
        if len(found) > 10:
            print(f"         ... and {len(found) - 10} more")
        bad += bool(found)
    known = {claim.record for claim in CLAIMS}
    timed = [name for name in linked(text) if name not in known]
    old = [(count, name) for name in timed if (count := changes_since(name))]
    print(
        f"\n{len(old)} of {len(timed)} timed records are older than what they measured"
    )
    for count, name in sorted(old, reverse=True):
        print(f"{count:5} commits since {made_at(name)[:7]}  {name}")
    raise typer.Exit(bad > 0)


if __name__ == "__main__":
    typer.run(main)
