"""Which of what was saved a run goes on from, and which rank reads what of it.

A generation is what all ranks saved after one step: a file of each rank's own, and from
the first rank of each host one of what all have in common. Ranks list what is whole in
their folders, which may be one folder or many, and all learn what all have. The rest is
arithmetic on that, the same on every rank: the newest generation of which nothing is
missing; who reads a file that is in its folder, and to whom it is sent.

[Note: runs] Steps alone do not tell generations apart. A run that went on from step 500
may have been one that had saved 600 on some of its ranks: of what it saves there later,
other ranks must not read the older half. So a run has a name of its own.

[Note: the first] Where nothing is whole, the first save may have been interrupted, and
the run has to begin anew; or files are gone that were there. So a folder has a mark
once it is known that all ranks have a generation whole.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from gradtide.checkpoint.files import UNREADABLE, About, Folder, check

FOLDER = re.compile(r"step-(\d{1,18})")
FILE = re.compile(r"(rank|common)(\d{1,9})\.pt")
SAID = "run", "step", "size", "rank", "kind"  # by every file
WHOLE = re.compile(r"whole\d+\.pt")  # see [Note: the first]


class Missing(ValueError):
    """Files of some ranks are missing."""


class Generation(NamedTuple):
    """What ranks saved after a step, by the run's name and its number of ranks.

    Later ones are greater, see [Note: runs].
    """

    step: int
    run: str
    size: int


class Held(NamedTuple):
    """A whole file that a rank has in its folder."""

    generation: Generation
    name: str  # in the generation's folder


@dataclass(frozen=True)
class Listing:
    """What a rank has in its folder.

    Attributes:
        files: Those that say of themselves what they should.
        empty: Whether there is nothing of any step: the disk is a new one.
        known: Whether all ranks once had a generation whole, see [Note: the first].
        damaged: What is there in the place of files and is none, and why.
    """

    files: Sequence[Held]
    empty: bool
    known: bool
    damaged: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """What to read; `holders` are the ranks that have a file, `lost` has nobody."""

    generation: Generation
    holders: Mapping[str, Sequence[int]]
    lost: Sequence[int] = field(default_factory=list)

    def common(self, rank: int) -> str:
        """The file of what ranks have in common that a rank reads: its own host's."""
        names = [name for name in self.holders if name.startswith("common")]
        return next((n for n in names if rank in self.holders[n]), names[0])

    def needs(self, rank: int, size: int, everything: bool) -> list[str]:
        """The files that one of now `size` ranks needs, or of all old ranks."""
        then = self.generation.size
        mine = range(then) if everything and then != size else range(rank, then, size)
        ranks = [name_of("rank", old) for old in mine if old not in self.lost]
        return [self.common(rank), *ranks]

    def missed(self, rank: int, leads: bool) -> list[str]:
        """Of what a save puts into a rank's folder, what is in others alone."""
        own = [name_of("rank", rank)] + [self.common(rank)] * leads
        return [name for name in own if rank not in self.holders.get(name, [rank])]

    def source(self, name: str, rank: int) -> int:
        """Who reads a file for a rank: itself, if it can."""
        there = self.holders[name]
        return rank if rank in there else there[rank % len(there)]


def new_run(before: str = "") -> str:
    """A new run's name; of two runs the later one's is greater, also than `before`."""
    number = max(time.time_ns(), int(before.partition("-")[0] or 0) + 1)
    return f"{number:020d}-{secrets.token_hex(4)}"


def folder_of(step: int) -> str:
    return f"step-{step}"


def name_of(kind: str, rank: int) -> str:
    return f"{kind}{rank}.pt"


def steps_in(folder: Folder) -> list[int]:
    """The steps of which there is anything, whole or not."""
    found = map(FOLDER.fullmatch, folder.names())
    return sorted(int(match[1]) for match in found if match)


def mark(folder: Folder, rank: int) -> None:
    """All ranks have a generation whole, see [Note: the first]. Local."""
    if not _is_marked(folder):
        folder.write(name_of("whole", rank), None, {})


def _is_marked(folder: Folder) -> bool:
    return any(map(WHOLE.fullmatch, folder.names()))


def listing(folder: Folder) -> Listing:
    """What is in a folder; local."""
    found, damaged, steps = [], list[str](), steps_in(folder)
    for step in steps:
        for name in folder.names(folder_of(step)):
            if FILE.fullmatch(name):
                try:
                    about = folder.about(f"{folder_of(step)}/{name}")
                    found.append(held(about, step, name))
                except UNREADABLE as error:  # cut, or not gradtide's
                    damaged.append(f"{folder_of(step)}/{name} ({error})")
    return Listing(found, not steps, _is_marked(folder), damaged)


def out_of(told: Sequence[Listing], torn: Iterable[tuple[int, Held]]) -> str:
    """Which files do not count as they are damaged; empty if there are none."""
    names = {name for own in told for name in own.damaged}
    for _, file in torn:
        step = folder_of(file.generation.step)
        names.add(f"{step}/{file.name} (its checksum is another)")
    return ", ".join(sorted(names))


def held(about: About, step: int, name: str) -> Held:
    """A file by what it says of itself; ValueError if its place says otherwise."""
    generation, own = spoken(about)
    if (generation.step, own) != (step, name):
        raise ValueError(f"{name} is not in its place: it says {own} of {generation}")
    return Held(generation, name)


def spoken(about: Any) -> tuple[Generation, str]:
    """What a file says of itself, and its name then; ValueError if that is nothing."""
    known = about if isinstance(about, dict) else {}
    run, step, size, rank, kind = (known.get(key) for key in SAID)
    if not isinstance(run, str) or kind not in ("rank", "common"):
        raise ValueError("a file does not say of which run or kind it is")
    if type(step) is not int or type(size) is not int or type(rank) is not int:
        raise ValueError("a file does not say of which step and rank it is")
    if step < 0 or not 0 <= rank < size:
        raise ValueError(
            f"a file says that it is of step {step}, rank {rank} of {size}"
        )
    return Generation(step, run, size), name_of(kind, rank)


def choose(
    told: Sequence[Listing], torn: Iterable[tuple[int, Held]], lossy: bool
) -> Plan | None:
    """What to go on from, of what each rank holds; None to begin anew.

    Files of ranks that are `torn` do not count. Of generations that are whole it is the
    newest. If none ever was, a run begins anew. Else it is the newest one without what
    is nowhere: with as many ranks as then, if so many have an empty folder, as where a
    host and its disk were replaced; or in any case if that may be `lossy`. Otherwise
    this raises `Missing`, which says who has what.
    """
    size, broken = len(told), set(torn)
    found: dict[Generation, dict[str, list[int]]] = {}
    for rank, own in enumerate(told):
        for file in own.files:
            holders = found.setdefault(file.generation, {}).setdefault(file.name, [])
            if (rank, file) not in broken:
                holders.append(rank)
    plans = [_plan(generation, found[generation]) for generation in sorted(found)]
    usable = [p for p in plans if any(n.startswith("common") for n in p.holders)]
    whole = [plan for plan in usable if not plan.lost]
    if whole:
        return whole[-1]
    if not any(own.known for own in told):
        return None
    new = sum(own.empty for own in told)
    partly = [plan for plan in usable if len(plan.lost) < plan.generation.size]
    for plan in reversed(partly):
        if lossy or (plan.generation.size == size and len(plan.lost) <= new):
            return plan
    raise Missing(_refusal(told, broken, plans, bool(partly)))


def _plan(generation: Generation, names: Mapping[str, Sequence[int]]) -> Plan:
    """A generation as it is: who has which of its files."""
    there = {name: ranks for name, ranks in sorted(names.items()) if ranks}
    lost = [r for r in range(generation.size) if name_of("rank", r) not in there]
    return Plan(generation, there, lost)


def _refusal(
    told: Sequence[Listing],
    broken: set[tuple[int, Held]],
    plans: Sequence[Plan],
    partly: bool,
) -> str:
    """Who has what, what is missing of the newest generation, and what can be done."""
    have = [
        sorted({f.generation.step for f in own.files if (rank, f) not in broken})
        for rank, own in enumerate(told)
    ]
    who = "; ".join(
        f"rank {rank} of " + (", ".join(map(str, steps)) or "none")
        for rank, steps in enumerate(have)
    )
    missing = "all are gone"
    if plans:
        (step, _, then), there = plans[-1].generation, plans[-1].holders
        lost = ", ".join(map(str, plans[-1].lost))
        gone = [f"those of rank {lost}"] if lost else []
        if not any(name.startswith("common") for name in there):
            gone.append("model and optimizer (common*.pt)")
        missing = f"of step {step}, which {then} ranks saved, {' and '.join(gone)}"
    remedies = ["Copy the files of all ranks that saved a step into any of the folders"]
    if partly:
        without = "go on without what some had not delivered, by resume(lossy=True)"
        remedies.append(without)
    remedies.append("remove the folders, to begin anew")
    damaged = out_of(told, broken)
    damaged = f"Files that are damaged: {damaged}. " if damaged else ""
    return (
        f"no step has whole files of all ranks. Files that are missing: {missing}. "
        f"{damaged}What is there, by steps: {who}. {'; or '.join(remedies)}"
    )


def nowhere(lost: Iterable[int]) -> str:
    return f"the files of rank {', '.join(map(str, lost))} are nowhere"


def remedies_without(common: str, elastic: object) -> str:
    """What can be done without files of which each rank has its own.

    `common` is where the file with the model is.
    """
    other = f"begin a run in another folder with the model of torch.load({common!r})"
    if elastic:
        other = "by resume(lossy=True)"
    return (
        "each rank's own counts where steps are exchanged, and with K-FAC: go on from "
        f"a step that is whole, or {other}"
    )


def read(
    folder: Folder, plan: Plan, needs: Sequence[Sequence[str]], rank: int
) -> tuple[dict[str, bytes], list[Held]]:
    """What a rank reads, for itself and others; and the files that are torn. Local.

    `needs` are the files that each rank needs.
    """
    data, odd = dict[str, bytes](), list[Held]()
    for name in sorted({*chain.from_iterable(needs)}):
        readers = (r for r, own in enumerate(needs) if name in own)
        if rank not in {plan.source(name, r) for r in readers}:
            continue
        file = Held(plan.generation, name)
        try:
            data[name] = folder.read(f"{folder_of(file.generation.step)}/{name}")
            about, _ = check(data[name])
            if held(about, file.generation.step, name) != file:
                raise ValueError("another run has written it since")
        except UNREADABLE:
            odd.append(file)
    return data, odd
