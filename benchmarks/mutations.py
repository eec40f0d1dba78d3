"""A million mutated scheme texts, or saved runs: what readers do with anything.

    python benchmarks/mutations.py --out benchmarks/records/mutations_202611.json
    python benchmarks/mutations.py --states \
        --out benchmarks/records/mutated_states_202611.json

Texts are made from all recipes, and from calls of everything that a scheme can hold, by
changing, repeating, nesting and splicing them. Each is read by `gradtide.scheme.parse`:
it has to be a Scheme or a ValueError, within 100 ms of the processor's time, and
nothing may be imported. What took longer is read again, as the machine does other
things, too. Ends with an error where that does not hold.

With `--states` it is what a `Checkpointer` saved: files that were cut, spliced or
changed, with their checksums right or not, and the dictionaries in them, with parts
that are missing, others, of another step or of another rank. Each is loaded, or it is a
ValueError; nothing in it is executed.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile
from zlib import crc32

import torch
import torch._subclasses.schema_check_mode  # or training does, when it begins
import torch.distributed as dist
import typer
from torch import nn

import gradtide
from gradtide.checkpoint import Checkpointer, files, generations, loading
from gradtide.lab.record import commit, machine, versions
from gradtide.scheme import RECIPES, Scheme, parse

LIMIT = 0.1  # seconds
CHARACTERS = "()[],=.'\"- \t\n_0123456789eEinfaTrueNone\\#{}:;@äß∞\0"
SEEDS = (
    *RECIPES,
    *map(repr, RECIPES.values()),
    "topk(0.05, warmup=4)",
    "topka2a(0.05, warmup=4, momentum_correction=True)",
    "dear(wire='fp16')",
    "oktopk(0.01, schedule='local', wire='bf16', warmup=240)",
    "oktopk-dear(0.01, warmup=240)",
    "dear-bf16(wire='fp16')",
    "Scheme(Dense('bf16'), BySize(0.04, ends=0.02), DEAR)",
    "Scheme(Warmup(OkTopk(0.05), 15, (1.0, 0.25)), PerTensor(), LOCAL)",
    "spd_kfac(fusion=BySize(0.005, ends=0.005), form='eigen', wire='bf16')",
    "auto(lossy=True, warmup=160)",
)
# What has hurt readers of texts.
HARD = (
    lambda n: "a" * n,
    lambda n: "a." * n + "b",
    lambda n: "-" * n + "1",
    lambda n: "Warmup(" * n + "TopK()" + ")" * n,
    lambda n: "(" * n,
    lambda n: "[" * n + "]" * n,
    lambda n: "topk(" + "9" * n + ")",
    lambda n: "topk(1e" + "9" * n + ")",
    lambda n: "topk(" + "0.1, " * n + ")",
    lambda n: " " * n + "topk",
    lambda n: "'" + "x" * n,
    lambda n: "BySize()" + "(1)" * n,
    lambda n: "__import__('os')" * n,
)


class Imports:
    """A finder that finds nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, *_: Any) -> None:
        self.asked.append(name)


def texts(count: int, seed: int) -> Iterator[str]:
    """So many mutated texts, the same for the same seed."""
    rng = random.Random(seed)
    for number in range(count):
        if number % 1000 == 0:
            yield rng.choice(HARD)(rng.choice((1, 10, 1000, 40_000, 100_000)))
            continue
        text = rng.choice(SEEDS)
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            text = rng.choice(MUTATIONS)(text, rng)
        yield text


def _cut(text: str, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(text) + 1)
    return begin, min(begin + rng.randrange(12), len(text))


def _replaced(text: str, rng: random.Random) -> str:
    begin, end = _cut(text, rng)
    return text[:begin] + rng.choice(CHARACTERS) + text[end:]


def _inserted(text: str, rng: random.Random) -> str:
    begin, _ = _cut(text, rng)
    return text[:begin] + rng.choice(CHARACTERS) + text[begin:]


def _deleted(text: str, rng: random.Random) -> str:
    begin, end = _cut(text, rng)
    return text[:begin] + text[end:]


def _repeated(text: str, rng: random.Random) -> str:
    begin, end = _cut(text, rng)
    return text[:end] + text[begin:end] * rng.choice((1, 2, 30)) + text[end:]


def _spliced(text: str, rng: random.Random) -> str:
    begin, end = _cut(text, rng)
    other = rng.choice(SEEDS)
    return text[:begin] + other[slice(*_cut(other, rng))] + text[end:]


def _nested(text: str, rng: random.Random) -> str:
    name = rng.choice(
        ("Warmup", "MomentumCorrection", "Scheme", "TopK", "BySize", "topk")
    )
    return f"{name}({text})"


def _renumbered(text: str, rng: random.Random) -> str:
    numbers = ("0", "-1", "1e400", "9" * 30, "0.5", "None", "True", "nan", "''", "()")
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if not digits:
        return f"{text}({rng.choice(numbers)})"
    at = rng.choice(digits)
    return text[:at] + rng.choice(numbers) + text[at + 1 :]


MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (
    _replaced,
    _inserted,
    _deleted,
    _repeated,
    _spliced,
    _nested,
    _renumbered,
)


def read(text: str) -> tuple[str, float]:
    """What a text is read as, and seconds of the processor."""
    start = time.process_time()
    try:
        found = parse(text)
        outcome = "scheme" if isinstance(found, Scheme) else type(found).__name__
    except ValueError:
        outcome = "ValueError"
    except BaseException as error:
        outcome = type(error).__name__
    return outcome, time.process_time() - start


# - Saved runs -------------------------------------------------------------------------

FILES = "rank0", "common0"
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1e400,
    float("nan"),
    "",
    "x" * 99,
    b"",
    [],
)
ODD += ({}, (), {"a": {}}, [[]], torch.zeros(0), torch.ones(3), torch.ones(2, 2).bool())
# Protocol 2 of pickle: a function of a module, called with a text.
EVIL = b"\x80\x02c%s\n%s\nX\x08\x00\x00\x00executed\x85R."
CALLS = (b"os", b"mkdir"), (b"builtins", b"eval"), (b"antigravity", b"fly")
PIECES = "algorithm", "optimizer", "round", "preconditioner"


class Subject:
    """A run on one rank that is loaded again and again, and what it has saved."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp()
        if not dist.is_initialized():
            store = f"file://{self.folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scheme = "topk(0.3, momentum_correction=False, schedule='local')"
        self.sync = gradtide.replicate(model, optimizer, scheme)
        items = {"scheduler": scheduler, "data": torch.Generator(), "epoch": lambda: 3}
        how: dict[str, Any] = {"model": model, "optimizer": optimizer, **items}
        self.keeper = Checkpointer(f"{self.folder}/a", self.sync, signals=(), **how)
        self.data, self.parts = list[dict[str, bytes]](), list[dict[str, Any]]()
        for step in (1, 2):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.keeper.step()
            self.keeper.save()
            self.keeper._writer.wait()
            saved = Path(self.folder, "a", f"step-{step}")
            data = {name: (saved / f"{name}.pt").read_bytes() for name in FILES}
            self.data.append(data)
            read = {name: files.unpacked(piece, name) for name, piece in data.items()}
            self.parts.append(read)

    def close(self) -> None:
        self.keeper.close()
        self.sync.remove()
        shutil.rmtree(self.folder)

    def load(self, told: Any) -> tuple[str, float]:
        """What a mutated file, or two of them, is loaded as; seconds."""
        start = time.process_time()
        try:
            if isinstance(told, bytes):
                about, _ = files.unpacked(told, "a file")
                generations.held(about, 2, "rank0.pt")
                outcome = "whole"
            else:
                common, ranks = told
                contents = loading.Contents.joined(common, ranks, 0)
                self.keeper._load(contents, None)
                outcome = "loaded"
        except ValueError:
            outcome = "ValueError"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        return outcome, time.process_time() - start


def saved_runs(count: int, seed: int, subject: Subject) -> Iterator[Any]:
    """So many mutated files, and pairs of what is in them; alike for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice(HARMS)(rng, subject)


def _file(rng: random.Random, subject: Subject) -> bytes:
    """A file's bytes, changed without its checksums."""
    data, other = (rng.choice(subject.data)[rng.choice(FILES)] for _ in range(2))
    at, end = sorted(rng.randrange(len(data)) for _ in range(2))
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    changes = (
        data[:at],
        data[at:],
        data[:at] + noise + data[at + len(noise) :],
        data[:at] + noise + data[at:],
        data[:at] + data[end:],
        data[:at] + other[at:],
        data + data,
    )
    return rng.choice(changes)


def _resealed(rng: random.Random, subject: Subject) -> bytes:
    """What a file says of itself, or its archive, changed; its checksums are right."""
    name = rng.choice(FILES)
    about, state = files.check(rng.choice(subject.data)[name])
    piece, line = bytearray(state), json.dumps(about).encode()
    if rng.randrange(2):
        text = bytearray(line)
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        line = bytes(text)
    else:
        for _ in range(rng.randrange(1, 4)):
            piece[rng.randrange(len(piece))] = rng.randrange(256)
        del piece[rng.choice((len(piece), rng.randrange(len(piece)))) :]
    end = len(piece), len(line), crc32(piece), crc32(line), files.MARK
    return bytes(piece) + line + files.END.pack(*end)


def _pickled(rng: random.Random, subject: Subject) -> bytes:
    """The pickle in torch's archive changed, or one that calls something."""
    name = rng.choice(FILES)
    about, state = files.check(rng.choice(subject.data)[name])
    made = io.BytesIO()
    with ZipFile(io.BytesIO(state)) as archive, ZipFile(made, "w") as out:
        for each in archive.namelist():
            content = bytearray(archive.read(each))
            if each.endswith("data.pkl"):
                for _ in range(rng.randrange(1, 6)):
                    content[rng.randrange(len(content))] = rng.randrange(256)
                if not rng.randrange(4):
                    content = bytearray(EVIL % rng.choice(CALLS))
            out.writestr(each, bytes(content))
    piece, line = made.getvalue(), json.dumps(about).encode()
    end = len(piece), len(line), crc32(piece), crc32(line), files.MARK
    return piece + line + files.END.pack(*end)


def _parts(rng: random.Random, subject: Subject) -> Any:
    """What is in two files, with some of it missing, odd, or from elsewhere."""
    parts = rng.choice(subject.parts)
    common, own = (_copied([*parts[name]]) for name in ("common0", "rank0"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change(rng.choice((common, own)), rng, subject)
    if not rng.randrange(9):
        common = [*rng.choice(subject.parts)["common0"]]
    return common, [own] * rng.choice((1, 1, 1, 1, 0, 2))


def _copied(value: Any) -> Any:
    """Containers anew, so that they can be changed."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value


def _change(value: Any, rng: random.Random, subject: Subject) -> None:
    """Change something, at whatever depth."""
    while True:
        keys = [*(value if isinstance(value, dict) else range(len(value)))]
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.randrange(9):
            value = inner
            continue
        break
    act = rng.randrange(6)
    if act == 0 and isinstance(value, dict):
        del value[key]
    elif act == 1 and isinstance(value, dict):
        value[rng.choice((rng.choice(ODD[:8]), f"{key}x", 3))] = value.pop(key)
    elif act == 2 and isinstance(inner, torch.Tensor):
        value[key] = rng.choice((inner[:1] if inner.dim() else inner, inner.double()))
    elif act == 3 and isinstance(inner, bytes):
        at = rng.randrange(len(inner) + 1)
        value[key] = inner[:at] + rng.choice((b"", b"x", inner[at:][:-1]))
    elif act == 4:
        value[key] = value[rng.choice(keys)]
    else:
        value[key] = rng.choice(ODD)


HARMS: tuple[Callable[[random.Random, Subject], Any], ...] = (
    _file,
    _resealed,
    _pickled,
    _parts,
    _parts,
    _parts,
)


# - All of it --------------------------------------------------------------------------


def survey(count: int, seed: int = 0) -> dict[str, Any]:
    """Read so many texts; outcomes, the slowest, and what should not have been."""
    right = "scheme", "ValueError"
    return {**_survey("texts", texts(count, seed), read, SEEDS, right), "seed": seed}


def survey_states(count: int, seed: int = 0) -> dict[str, Any]:
    """Load so many mutated saved runs; the same of them."""
    subject = Subject()
    begun = [each["rank0"] for each in subject.data]
    known = [*begun, *saved_runs(200, -1, subject)]
    runs, right = saved_runs(count, seed, subject), ("whole", "loaded", "ValueError")
    here = os.getcwd()
    os.chdir(subject.folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _survey("states", runs, subject.load, known, right)
        if Path("executed").exists():
            found["wrong"].append("a folder was made by what is in a file")
    finally:
        os.chdir(here)
        subject.close()
    return {**found, "seed": seed}


def _survey(
    kind: str,
    told: Iterable[Any],
    read: Callable[[Any], tuple[str, float]],
    known: Iterable[Any],
    right: Sequence[str],
) -> dict[str, Any]:
    for each in known:  # whatever is imported only when it is needed
        read(each)
    imports, loaded = Imports(), set(sys.modules)
    sys.meta_path.insert(0, imports)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    slowest, whole = 0.0, time.process_time()
    try:
        for each in told:
            outcome, seconds = read(each)
            for _ in range(2):
                if seconds > LIMIT:
                    seconds = min(seconds, read(each)[1])
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
            if outcome not in right or seconds > LIMIT:
                wrong.append(f"{outcome}, {seconds:.3f} s: {repr(each)[:200]}")
    finally:
        sys.meta_path.remove(imports)
    # Python looks for codecs in its own package, by whatever name a text has for one;
    # and torch has more modules for more kinds of tensors.
    theirs = {n for n in imports.asked if n.startswith(("encodings.", "torch."))}
    theirs |= {name for name in sys.modules if name.startswith("torch.")}
    return {
        kind: outcomes.total(),
        "outcomes": dict(outcomes),
        "slowest_seconds": slowest,
        "seconds": time.process_time() - whole,
        "imported": sorted({*imports.asked, *(set(sys.modules) - loaded)} - theirs),
        "wrong": wrong[:100],
    }


def main(
    count: Annotated[int, typer.Option(help="How many to read.")] = 1_000_000,
    states: Annotated[bool, typer.Option(help="Read saved runs, not texts.")] = False,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Read mutated texts, or saved runs, and tell what became of them."""
    found = (survey_states if states else survey)(count, seed)
    print(json.dumps(found, indent=1))
    if out is not None:
        about: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
        about |= {"commit": commit(), "versions": versions(), "machine": machine()}
        out.write_text(json.dumps({**about, **found}, indent=1) + "\n", "utf-8")
    raise typer.Exit(bool(found["wrong"] or found["imported"]))


if __name__ == "__main__":
    typer.run(main)
