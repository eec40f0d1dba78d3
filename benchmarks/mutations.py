"""A million mutated scheme texts: what the reader of schemes does with anything.

    python benchmarks/mutations.py --out benchmarks/records/mutations_202611.json

Texts are made from all recipes, and from calls of everything that a scheme can hold, by
changing, repeating, nesting and splicing them. Each is read by `gradtide.scheme.parse`:
it has to be a Scheme or a ValueError, within 100 ms of the processor's time, and
nothing may be imported. Texts that took longer are read again, as the machine does
other things, too. Ends with an error where that does not hold.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

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


def survey(count: int, seed: int = 0) -> dict[str, Any]:
    """Read so many texts; outcomes, the slowest, and what should not have been."""
    for text in SEEDS:  # whatever is imported only when it is needed
        read(text)
    imports, loaded = Imports(), set(sys.modules)
    sys.meta_path.insert(0, imports)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    slowest, whole = 0.0, time.process_time()
    try:
        for text in texts(count, seed):
            outcome, seconds = read(text)
            for _ in range(2):
                if seconds > LIMIT:
                    seconds = min(seconds, read(text)[1])
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
            if outcome not in ("scheme", "ValueError") or seconds > LIMIT:
                wrong.append(f"{outcome}, {seconds:.3f} s: {text[:200]!r}")
    finally:
        sys.meta_path.remove(imports)
    return {
        "texts": count,
        "seed": seed,
        "outcomes": dict(outcomes),
        "slowest_seconds": slowest,
        "seconds": time.process_time() - whole,
        "imported": sorted({*imports.asked, *(set(sys.modules) - loaded)}),
        "wrong": wrong[:100],
    }


def main(
    count: Annotated[int, typer.Option(help="Texts to read.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write JSON there.")] = None,
) -> None:
    """Read mutated texts and tell what became of them."""
    found = survey(count, seed)
    print(json.dumps(found, indent=1))
    if out is not None:
        about: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
        about |= {"commit": commit(), "versions": versions(), "machine": machine()}
        out.write_text(json.dumps({**about, **found}, indent=1) + "\n", "utf-8")
    raise typer.Exit(bool(found["wrong"] or found["imported"]))


if __name__ == "__main__":
    typer.run(main)
