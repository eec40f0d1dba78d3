"""The library's main tests with other versions of torch and Python.

    make versions
    python benchmarks/versions.py --only 3.12 --torch 2.14.1

Each pair has a virtual environment of its own, in a temporary folder. Only builds for
CPUs are installed, unless `--cuda` allows those that bring gigabytes of libraries: on
PyPI there are no others for Linux, so an index that has them is named in
PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. What cannot be had is in the record with the
reason. What a record of the same commit says of other pairs stays in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Any

import typer

from gradtide.lab.record import commit, machine

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "records" / "versions_202611.json"
# Of Python and torch: the oldest that are promised, the pinned ones, and newer ones.
PAIRS = (
    ("3.10", "2.11.0"),
    ("3.11", "2.11.0"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.1"),
    ("3.11", "2.15.0"),
    ("3.12", "2.13.0"),
    ("3.13", "2.13.0"),
    ("3.14", "2.15.0"),
)
TESTS = (
    "tests/core",
    "tests/collectives",
    "tests/test_law.py",
    "tests/test_replica.py",
    "tests/test_parallel.py",
    "tests/runtime/test_checkpoint.py",
    "tests/runtime/exchange/test_rounds.py",
)
TOOLS = ("numpy", "numba", "pytest", "pytest-timeout", "pytest-xdist", "expecttest")
INSTALLING, TESTING = 600, 3600  # seconds


class Missing(Exception):
    """What a pair cannot be tested for: its text is the reason."""


def main(
    out: Annotated[Path, typer.Option(help="Write JSON there.")] = OUT,
    only: Annotated[str, typer.Option(help="This version of Python alone.")] = "",
    torch: Annotated[str, typer.Option(help="This version of torch alone.")] = "",
    cuda: Annotated[bool, typer.Option(help="Also builds of gigabytes.")] = False,
    workers: Annotated[int, typer.Option(help="Tests at the same time.")] = 2,
) -> None:
    """Test every pair that can be had here; fails if a test of one does."""
    about: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "machine": machine(),
        "tests": TESTS,
    }
    before = json.loads(out.read_text("utf-8")) if out.exists() else {}
    known = before["pairs"] if before.get("commit") == about["commit"] else []
    rows = {tuple(row["asked"].values()): row for row in known}
    for python, version in PAIRS:
        if only not in ("", python) or torch not in ("", version):
            continue
        try:
            found = tested(python, version, cuda, workers)
        except Missing as reason:
            found = {"left_out": str(reason)}
        row = {"asked": {"python": python, "torch": version}, **found}
        rows[python, version] = row
        print(json.dumps(row), flush=True)
        ordered = [rows[pair] for pair in PAIRS if pair in rows]
        record = json.dumps({**about, "pairs": ordered}, indent=1)
        out.write_text(f"{record}\n", "utf-8")
    raise typer.Exit(any(row.get("failed") for row in rows.values()))


def tested(python: str, version: str, cuda: bool, workers: int) -> dict[str, Any]:
    """What comes of the tests with a pair; raises `Missing` if it cannot be had."""
    with tempfile.TemporaryDirectory(prefix="gradtide-versions-") as folder:
        _run([interpreter(python), "-m", "venv", folder], INSTALLING)
        own = str(Path(folder, "bin", "python"))
        pip = [own, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        if not cuda:
            refuse_cuda(pip, version)
        _run([*pip, "install", f"torch=={version}", *TOOLS], INSTALLING)
        _run([*pip, "install", "--no-deps", str(ROOT)], INSTALLING)
        return {**installed(own), **results(own, Path(folder, "tests.xml"), workers)}


def interpreter(python: str) -> str:
    """A program that is this version of Python."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    named = shutil.which(f"python{python}")
    paths = [named] if named else []
    paths += map(str, sorted(kept.glob(f"{python}.*/bin/python")))
    for path in paths:
        done = subprocess.run([path, "-VV"], capture_output=True, text=True)
        if done.returncode == 0 and f"Python {python}." in done.stdout:
            return path
    raise Missing(f"there is no python{python} on this machine")


def refuse_cuda(pip: list[str], version: str) -> None:
    """Raise `Missing` if pip would install a build that needs CUDA's libraries."""
    asking = ["install", "--dry-run", "--no-deps", "--ignore-installed"]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        command = [*pip, *asking, "--report", report.name, f"torch=={version}"]
        _run(command, INSTALLING)
        (wheel,) = json.load(report)["install"]
    needs = wheel["metadata"].get("requires_dist", [])
    if any(need.startswith(("nvidia-", "cuda-")) for need in needs):
        raise Missing(
            f"pip's indexes have torch {version} for this Python only as a build that "
            "needs CUDA's libraries: name one with builds for CPUs, or give --cuda"
        )


def installed(own: str) -> dict[str, Any]:
    """The versions that were installed, as they say themselves."""
    code = (
        "import json, platform, numpy, torch; print(json.dumps("
        "[platform.python_version(), torch.__version__, numpy.__version__]))"
    )
    said = json.loads(_run([own, "-c", code], INSTALLING))
    return dict(zip(("python", "torch", "numpy"), said, strict=True))


def results(own: str, report: Path, workers: int) -> dict[str, Any]:
    """What the tests come to, of the package that is installed."""
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    command += ["-n", str(workers), "-m", "not alone and not waits"]
    command += ["--timeout", "600", f"--junitxml={report}"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TESTING,
        )
    except subprocess.TimeoutExpired:
        return {"failed": [f"pytest itself took more than {TESTING} s"]}
    if not report.exists():
        return {"failed": [f"pytest itself: {(done.stdout + done.stderr)[-1000:]}"]}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if _has(case, "failure", "error")]
    skipped = [case for case in cases if _has(case, "skipped")]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "seconds": round(time.monotonic() - begin),
    }


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _run(command: list[str], limit: int) -> str:
    """What a command prints; raises `Missing` with the last that it says of why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise Missing(f"{command[1:4]} took more than {limit} s") from None
    if done.returncode:
        said = done.stderr.splitlines()
        told = [x for x in said if "ERROR" in x or "(constraint)" in x]
        told = [x.strip() for x in told if "for help visit" not in x]
        raise Missing(f"pip: {(told or said or ['it failed'])[-1][:300]}")
    return done.stdout


if __name__ == "__main__":
    typer.run(main)
