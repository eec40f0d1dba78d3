"""The sections, their processes, and the time that there is for them.

A section that ends early has left its figures; it is started anew while that finds
some more. Whatever it has started ends with it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpu.ranks import SHARED
from gpu.results import Book, begin_run, changing, read
from gpu.setting import Setting
from gradtide.lab.record import commit, machine, versions

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = 4.0  # times as long may a section take there, where others compute, too


@dataclass(frozen=True)
class Section:
    """A module of this package that has `measure(book, setting)` and BARS."""

    name: str
    seconds: float  # at most
    proves: str
    beside: str = ""  # what has to be said beside its figures
    least: float = 10.0  # seconds: with less left it does not begin
    timed: bool = True  # it has the device to itself; what is right may be at once

    @property
    def module(self) -> Any:
        return import_module(f"gpu.{self.name}")


# In the order of what they are worth.
SECTIONS = {
    section.name: section
    for section in (
        Section("facts", 40, "what there is, and how much is copied in a second"),
        Section("kernels", 150, "kernels and codecs have the CPU's bits", timed=False),
        Section(
            "alike", 150, "the same bits, however the device is driven", timed=False
        ),
        Section(
            "death", 120, "a rank that dies is named, and all ends", SHARED, timed=False
        ),
        Section("compiled", 150, "torch.compile, its graphs, fused AdamW", timed=False),
        Section("hooks", 80, "what hooks cost where there is nobody to exchange with"),
        Section("selection", 25, "selection, held against a copy"),
        Section("codecs", 30, "codecs, held against a copy of their bytes"),
        Section("links", 120, "steps of four ranks over slow links", SHARED, 50),
        Section("loss", 150, "a training to a loss over a slow link", SHARED, 110),
        Section("curvature", 40, "K-FAC's stages"),
        Section("shapes", 30, "blocks and warps of the kernels"),
    )
}


def main() -> None:
    given = _options()
    path = given.out / "record.json"
    if given.section:
        _measure(given, path)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch finds no CUDA device here: --device cpu --tiny walks through what "
            "needs none"
        )
    end = time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    about = _about(given)
    begin_run(path, about)
    signal.signal(signal.SIGTERM, _end)

    def run(name: str) -> None:
        section = SECTIONS[name]
        print(f"== {name}: {section.proves}", flush=True)
        ended = _run(section, given, end, path)
        with changing(path) as data:
            if ended:
                data["sections"][name]["ended at"] = about["commit"]
            for there, found in data["sections"].items():
                figures, bars = found["figures"], SECTIONS[there].module.BARS
                found["proves"] = SECTIONS[there].proves
                found["beside"] = SECTIONS[there].beside
                found["bars"] = [bar.row(figures, given.tiny) for bar in bars]

    to_do = _to_do(given.sections or SECTIONS, path, about["commit"])
    for names in _at_once(to_do, given):
        with ThreadPoolExecutor(len(names)) as threads:
            list(threads.map(run, names))
    print("\n".join(table(read(path)["sections"])))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules["gpu"].__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=_folder, default="out/gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a walk-through")
    parser.add_argument("--sections", type=_names, help="separated by commas")
    parser.add_argument("--commit", help="of this tree, where git does not know it")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _folder(text: str) -> Path:
    return Path(text).resolve()  # sections run in the repository's root


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(
            f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}"
        )
    return names


def _to_do(names: Iterable[str], path: Path, now: str | None) -> list[str]:
    """Sections that never came to their end; then those in which something failed.

    What another commit has left undone is not known: of that all come again.
    """
    there = read(path)["sections"]
    ended = [n for n in names if n in there and there[n].get("ended at") == now]
    again = [
        n for n in ended if any("value" not in e for e in there[n]["figures"].values())
    ]
    return [name for name in names if name not in ended] + again


def _at_once(names: Iterable[str], given: argparse.Namespace) -> Iterator[list[str]]:
    """What is timed, alone; neighbours that are not, beside one another on a GPU."""

    def timed(name: str) -> bool:
        return SECTIONS[name].timed or given.device != "cuda"

    for alone, group in groupby(names, timed):
        together = list(group)
        yield from ([name] for name in together) if alone else [together]


# - One section ------------------------------------------------------------------------


def _run(section: Section, given: argparse.Namespace, end: float, path: Path) -> bool:
    """Start a section, and anew while it ends early and that finds more figures.

    Whether it has come to its end.
    """
    most = section.seconds * (1.0 if given.device == "cuda" else ON_CPU)
    if given.sections == [section.name]:
        most = 60 * given.minutes  # nobody else wants them
    stop = min(end, time.monotonic() + most)
    least = 5.0 if given.tiny else section.least
    while (left := stop - time.monotonic()) > least:
        before = Book(path, section.name).entries.keys()
        command = [sys.executable, "-u", str(Path(__file__).parent)]
        command += ["--section", section.name, "--seconds", f"{left:.0f}"]
        command += ["--out", str(given.out), "--device", given.device]
        command += ["--tiny"] if given.tiny else []
        if _ended(command, left):
            return True
        if Book(path, section.name).entries.keys() == before:
            return False
    print(f"  no time is left for {section.name}", flush=True)
    return False


_running = set[int]()  # process groups


def _end(*_: object) -> NoReturn:
    """Whoever is asked to end leaves no process behind."""
    for number in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
    os._exit(1)


def _ended(command: Sequence[str], seconds: float) -> bool:
    """Whether a command came to its end; no process of its group is left then."""
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    _running.add(child.pid)
    try:
        return child.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        print(f"  cut off after {seconds:.0f} s", flush=True)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _running.discard(child.pid)


def _measure(given: argparse.Namespace, path: Path) -> NoReturn:
    """What the process of a section does; it does not outlive who has started it."""
    with suppress(OSError, AttributeError):  # on Linux, there is such a call
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    warnings.simplefilter("ignore")
    if not shutil.which("tc"):
        carried = ROOT / ".net" / "bin"
        os.environ["PATH"] = os.pathsep.join([str(carried), os.environ["PATH"]])
    setting = Setting(given.device, given.tiny, given.seconds)
    SECTIONS[given.section].module.measure(Book(path, given.section), setting)
    sys.stdout.flush()
    os._exit(0)  # nobody waits for threads of what was measured


# - What is told -----------------------------------------------------------------------


def _about(given: argparse.Namespace) -> dict[str, Any]:
    """What a record says first."""
    card, _, driver = _asked_card().partition(", ")
    return {
        "command": shlex.join(["python", "benchmarks/gpu", *sys.argv[1:]]),
        "commit": given.commit or commit(),
        "device": given.device,
        "card": card or None,
        "driver": driver or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": versions("triton", "numba", "nvidia-nccl-cu13"),
        "machine": machine(),
    }


def _asked_card() -> str:
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.partition("\n")[0]
    return ""


def table(sections: Mapping[str, Any]) -> Iterator[str]:
    """All bars; then what failed, and what is not to be had here."""
    rows = [("section", "figure", "number", "bar", "verdict")]
    for name, section in sections.items():
        for row in section.get("bars", []):
            number = "" if row["number"] is None else f"{row['number']:.3g}"
            rows.append((name, row["what"], number, row["bar"], row["verdict"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield ""
    for line in rows:
        cells = (text.ljust(n) for text, n in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
    for name, section in sections.items():
        if section.get("beside"):
            yield f"{name}: {section['beside']}"
        for figure, entry in section["figures"].items():
            for word in ("failed", "skipped"):
                if word in entry:
                    last = entry[word].strip().rpartition("\n")[2]
                    yield f"{name}: {figure} {word}: {last[:160]}"
