"""Mistakes that are put into the code, one at a time: whether a test notices.

    python benchmarks/mutants.py --out benchmarks/records/mutants_202611.json
    python benchmarks/mutants.py --only kfac --only lab-speedup

The mistakes are in mutant_list.py. The checkout stays as it is: what git knows of it,
as it is now, is copied. There each mutant runs the tests that should notice, without
what `make test` leaves out, up to the first that fails; and that test again without the
mutant, where it has to pass. A test that has noticed by the record at `--out` comes
first, and what that says of the same commit stays: a second run goes on with what is
missing. Ends with an error where no test fails, or a mutant's text is not found once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pytest
import torch._dynamo  # with all of torch that tests load  # noqa: F401
import typer
from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
LIMIT = 900  # seconds for the tests of a mutant: what takes longer does not notice
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


def main(
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Mutants whose names begin so.")
    ] = None,
) -> None:
    """Try mutants; fails if the tests miss one."""
    chosen = [m for m in MUTANTS if m.name.startswith(tuple(only or [""]))]
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
        record = apart.submit(origin).result()
    before = json.loads(out.read_text("utf-8")) if out and out.exists() else {}
    rows = {row["name"]: row for row in before.get("mutants", ()) if "by" in row}
    noticed = {name: row["by"] for name, row in rows.items()}
    if before.get("commit") != record["commit"]:
        rows = {}
    with tempfile.TemporaryDirectory(prefix="gradtide-mutants-") as folder:
        tree = Path(folder)
        copy_to(tree)
        for number, mutant in enumerate(chosen, 1):
            if mutant.name in rows:
                continue
            found = tried(mutant, tree, number, noticed.get(mutant.name))
            if "fails without it" in found:  # now and then, where others compute
                found = tried(mutant, tree, number, None)
            about = {"name": mutant.name, "file": mutant.file, "wrong": mutant.wrong}
            rows[mutant.name] = {**about, **found}
            print(f"{mutant.name}: {found}", flush=True)
            if out is not None:
                told = [rows[m.name] for m in MUTANTS if m.name in rows]
                numbers = {"tried": len(told), "caught": sum("by" in r for r in told)}
                content = json.dumps({**record, **numbers, "mutants": told}, indent=1)
                out.write_text(f"{content}\n", encoding="utf-8")
    missed = [m.name for m in chosen if "by" not in rows[m.name]]
    if missed:
        raise SystemExit(f"not noticed: {', '.join(missed)}")


def origin() -> dict[str, Any]:
    """What every record says, asked in a process of its own: see `_test`."""
    from gradtide.lab.record import commit, machine, versions

    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def copy_to(tree: Path) -> None:
    """Copy what git knows of the checkout, or would ask about, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def tried(mutant: Mutant, tree: Path, number: int, first: str | None) -> dict[str, Any]:
    """What comes of a mutant in a copy of the tree, which is as before afterwards."""
    path = tree / "src" / "gradtide" / mutant.file
    before = path.read_bytes()
    try:
        code = mutant.apply(before.decode())
    except ValueError as error:
        return {"text": str(error)}
    files = [f"tests/{name}" for name in mutant.tests]
    begin = time.monotonic()
    try:
        _write(path, code.encode(), number)
        # Of all its cases: a case that is asked for by name runs also if others do not.
        by = _failing([first.partition("[")[0]], tree) if first else None
        by = by or _failing(files, tree)
    finally:
        _write(path, before, -number)
    seconds = round(time.monotonic() - begin, 1)
    if by is None:
        return {"missed by": list(mutant.tests), "seconds": seconds}
    if "::" not in by:
        return {"broken": by}  # nothing can be imported: no mistake to notice
    if _failing([by], tree) is not None:
        return {"fails without it": by}
    return {"by": by, "seconds": seconds}


def _write(path: Path, code: bytes, number: int) -> None:
    """Write a file, as of a time of its own: what was compiled of another is stale."""
    path.write_bytes(code)
    moment = 1_500_000_000 + 10 * number
    os.utime(path, (moment, moment))


def _failing(tests: list[str], tree: Path) -> str | None:
    """The first test that fails of some, or a file that can't be imported, if any."""
    with tempfile.TemporaryFile("w+") as said:
        forked = multiprocessing.get_context("fork")
        process = forked.Process(target=_test, args=(tests, tree, said.fileno()))
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            os.killpg(process.ident or 0, signal.SIGKILL)
            process.join()
            return None
        said.seek(0)
        match = FAILED.search(said.read())
    return None if match is None else match[1]


def _test(tests: list[str], tree: Path, said: int) -> NoReturn:
    """Run pytest in a process of its own, which has loaded torch, and nothing of ours.

    To load that takes longer than most mutants live.
    """
    os.setsid()
    for stream in (1, 2):
        os.dup2(said, stream)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree / "src"), OMP_NUM_THREADS="1")
    sys.path[:0] = [str(tree / "src"), str(tree)]
    assert "gradtide" not in sys.modules
    options = ["-x", "-q", "-p", "no:cacheprovider", "-rfE", "--no-header"]
    code = pytest.main([*options, "-m", "not slow", *tests])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    typer.run(main)
