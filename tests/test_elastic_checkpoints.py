"""Ranks that come and go save their run, and go on from it when all are lost."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradtide
from gradtide.checkpoint import Checkpointer, SaveError
from gradtide.checkpoint import files as written
from gradtide.checkpoint.elastic import Elastic
from gradtide.checkpoint.files import Folder
from gradtide.checkpoint.generations import listing
from gradtide.elastic import Lighthouse
from gradtide.regrouping import Losses
from tests.lighthouse import Job, Words, alike, lighthouse, run
from tests.test_elastic import build, digest, members, step
from tests.test_regrouping import trained

pytestmark = pytest.mark.timeout(300)

SCHEMES = [
    "wfbp",
    "dear",
    "topka2a(0.1)",
    "exdyna(0.1, schedule='local')",
    "diloco(every=3)",
    "local_sgd(every=4, delay=2, fragments=2)",
]
EVERY = 5
Tell = Callable[[Any], None]


class Run:
    """A rank's model, optimizer, scheduler, replica and Checkpointer."""

    def __init__(
        self,
        name: str,
        address: str,
        folder: str,
        scheme: str,
        *,
        resumes: bool | None = False,
        there: Lighthouse | None = None,
        **more: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.log = Words()
        self.name, self.model, self.optimizer = name, *build(sum(map(ord, name)))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.generator = torch.Generator().manual_seed(sum(map(ord, name)))
        self.sync = gradtide.replicate(
            self.model, self.optimizer, scheme, elastic=there or members(address, name)
        )
        arguments = {"every": EVERY, "scheduler": self.scheduler, **more}
        how: Any = {"model": self.model, "optimizer": self.optimizer, **arguments}
        self.keeper = Checkpointer(
            folder, self.sync, seen=lambda: self.scheduler.last_epoch, **how
        )
        if resumes is not None:
            self.keeper.resume(lossy=resumes)

    def step(self) -> bool:
        now = self.sync.meet()
        x = torch.randn(8, 8, generator=self.generator)
        step(self.model, self.optimizer, x, torch.tanh(x[:, :4]))
        while self.scheduler.last_epoch <= now:  # not twice for a step that was lost
            self.scheduler.step()
        return self.keeper.step()

    def found(self) -> dict[str, Any]:
        """What all ranks have alike, between two rounds."""
        self.sync.flush()
        return {
            "step": self.sync.metrics()["step"],
            "digest": digest(self.model),
            "epoch": self.scheduler.last_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def residuals(self) -> dict[str, Any]:
        rank = torch.distributed.get_rank()
        left = self.sync.state_dict()[f"rank{rank}"]["remainders"]
        return {name: value.double().tolist() for name, value in left.items()}


def newest(*folders: Path) -> tuple[int, int, list[Path]]:
    """The newest step that all ranks which saved it have: and how many, and files."""
    found: dict[tuple[int, str, int], dict[str, Path]] = defaultdict(dict)
    for folder in folders:
        for file in listing(Folder(folder)).files:
            where = folder / f"step-{file.generation.step}" / file.name
            found[tuple(file.generation)].setdefault(file.name, where)
    whole = [
        (number, [names[f"rank{rank}.pt"] for rank in range(number[2])])
        for number, names in found.items()
        if all(f"rank{rank}.pt" in names for rank in range(number[2]))
        and any(name.startswith("common") for name in names)
    ]
    number, paths = max(whole)
    return number[0], number[2], paths


def left_in(paths: list[Path]) -> dict[str, Tensor]:
    """The sum of the residuals in files of all ranks."""
    total: dict[str, Tensor] = {}
    for rank, path in enumerate(paths):
        _, state = written.unpacked(path.read_bytes(), path.name)
        for name, value in state["sync"][f"rank{rank}"]["remainders"].items():
            total[name] = total.get(name, 0) + value.double()
    return total


# - All are lost -----------------------------------------------------------------------


def lives(
    name: str, tell: Tell, address: str, folder: str, scheme: str, dies: int = 0
) -> None:
    """Train for good; one that `dies` does so in a step."""
    run = Run(name, address, folder, scheme)
    while True:
        now = run.sync.meet()
        if dies and now >= dies:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
        tell(now)


def resumes(
    name: str, tell: Tell, address: str, folder: str, scheme: str, steps: int
) -> dict[str, Any]:
    """Go on for some steps from what was saved."""
    run = Run(name, address, folder, scheme)
    begin = run.sync.meet()
    found = {"begin": begin, "left": run.residuals(), "seen": run.keeper.values["seen"]}
    while run.sync.meet() < begin + steps:
        run.step()
    run.sync.end_round()
    run.keeper.close()
    found |= run.found()
    run.sync.remove()
    return found


def kill_all(job: Job, when: int, others: Callable[[int], None]) -> None:
    """Kill all ranks a little after one has come to a step."""
    waiting, draw = [True], random.Random(when)

    def kill() -> None:
        time.sleep(draw.uniform(0, 0.2))
        for process, _ in job._ranks.values():
            process.kill()

    def heard(_: str, now: int) -> None:
        others(now)
        if now >= when and waiting:
            waiting.clear()
            threading.Thread(target=kill).start()

    job.wait(heard)


def all_lost(tmp_path: Path, scheme: str, loss: bool, comes: bool, after: int) -> None:
    folder = tmp_path / "saved"
    with lighthouse(2) as address:
        job = Job(lives, address, str(folder), scheme)
        for name in "abc":
            job.start(name, 8 if loss and name == "b" else 0)
        waiting = ["d"] if comes else []

        def others(now: int) -> None:
            if now >= 8 and waiting:
                job.start(waiting.pop())

        kill_all(job, 40, others)
    assert set(job.ended.values()) == {-signal.SIGKILL}
    at, _, paths = newest(folder)
    assert at >= 25
    before = left_in(paths)
    with lighthouse(after) as address:
        found = run(resumes, "abcd"[:after], address, str(folder), scheme, 11)
    for told in found.values():
        assert told["begin"] == at
        assert told["seen"] == at
        assert told["epoch"] == told["step"]
    same = {
        k: [v[key] for key in ("step", "digest", "epoch")] for k, v in found.items()
    }
    assert alike(same)
    now: dict[str, Tensor] = {}
    for told in found.values():
        for name, value in told["left"].items():
            now[name] = now.get(name, 0) + torch.tensor(value, dtype=torch.float64)
    for name, value in before.items():
        torch.testing.assert_close(now[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(
    ("scheme", "loss", "comes", "after"),
    [("dear", True, True, 3), ("exdyna(0.1, schedule='local')", True, False, 4)],
)
def test_all_are_lost_and_go_on_from_what_was_saved(
    tmp_path: Path, scheme: str, loss: bool, comes: bool, after: int
) -> None:
    all_lost(tmp_path, scheme, loss, comes, after)


@pytest.mark.slow
@pytest.mark.pairs(
    scheme=SCHEMES, loss=[False, True], comes=[False, True], after=[1, 2, 3, 4]
)
def test_all_are_lost_under_every_scheme(
    tmp_path: Path, scheme: str, loss: bool, comes: bool, after: int
) -> None:
    all_lost(tmp_path, scheme, loss, comes, after)


# - All are to stop --------------------------------------------------------------------


def stops(
    name: str, tell: Tell, address: str, folder: str, scheme: str, dies: bool
) -> dict[str, Any]:
    """Train until all are to stop; b is told so, and c may be killed in that step."""
    run = Run(name, address, folder, scheme)
    told = name != "b"
    while True:
        now = run.sync.meet()
        # Two may have begun before the third has started.
        here = now >= 12 and run.sync.metrics()["ranks"] == 3
        if here and not told:  # once: a second signal ends the process
            os.kill(os.getpid(), signal.SIGTERM)
            told = True
        if here and name == "c" and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.step():
            break
    found = {**run.found(), "lost_ranks": run.sync.metrics()["lost_ranks"]}
    run.keeper.close()
    run.sync.remove()
    return found


def begins(
    name: str, tell: Tell, address: str, folder: str, scheme: str
) -> dict[str, Any]:
    """What there is of a run before the first step."""
    run = Run(name, address, folder, scheme)
    run.sync.meet()
    return run.found()


def stopped(tmp_path: Path, scheme: str, dies: bool) -> None:
    folder = tmp_path / "saved"
    with lighthouse(2) as address:
        found = run(stops, "abc", address, str(folder), scheme, dies)
    if dies:
        assert found.pop("c") == -signal.SIGKILL
    told = found["a"]
    assert alike({name: one["step"] for name, one in found.items()})
    if "fragments" not in scheme:  # of which one is under way
        assert alike(found)
    assert told["step"] >= 12
    assert (told["lost_ranks"] > 0) == dies
    assert newest(folder)[:2] == (told["step"], len(found))
    with lighthouse(len(found)) as address:
        again = run(begins, "abc"[: len(found)], address, str(folder), scheme)
    for name, one in again.items():
        assert one == {key: found[name][key] for key in one}


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize(("scheme", "dies"), [("wfbp", False), ("dear", True)])
def test_all_leave_after_the_same_step(tmp_path: Path, scheme: str, dies: bool) -> None:
    stopped(tmp_path, scheme, dies)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_leave_after_the_same_step_under_every_scheme(
    tmp_path: Path, scheme: str, dies: bool
) -> None:
    stopped(tmp_path, scheme, dies)


# - One comes --------------------------------------------------------------------------


def comes(
    name: str, tell: Tell, address: str, folder: str, scheme: str
) -> dict[str, Any]:
    """Hosts have folders of their own; d comes with that of another life."""
    run = Run(name, address, f"{folder}/{name}", scheme)
    first = run.sync.meet()
    epoch, seen = run.scheduler.last_epoch, run.keeper.values
    three = None  # the step from which on they are three
    while three is None or run.sync.meet() < three + 2 * EVERY:
        tell(run.sync.meet())
        if three is None and run.sync.metrics()["ranks"] == 3:
            three = run.sync.meet()
        run.step()
    run.sync.end_round()
    run.keeper.close()
    more = {"first": first, "came": epoch, "seen": seen, "log": run.log.words}
    return {**run.found(), **more}


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize("scheme", ["wfbp", "diloco(every=3)"])
def test_one_that_comes_has_what_others_have(tmp_path: Path, scheme: str) -> None:
    with lighthouse(1) as address:
        run(old, "d", address, str(tmp_path), scheme)
    assert newest(tmp_path / "d")[0] == 60
    waiting = ["d"]
    with lighthouse(2) as address:
        job = Job(comes, address, str(tmp_path), scheme)

        def heard(_: str, now: int) -> None:
            if now >= 8 and waiting:
                job.start(waiting.pop())

        for name in "ab":
            job.start(name)
        job.wait(heard)
    found = job.ended
    same = {
        k: [v[key] for key in ("step", "digest", "epoch")] for k, v in found.items()
    }
    assert alike(same)
    assert found["d"]["first"] >= 8
    assert found["d"]["came"] == found["d"]["first"]
    assert found["d"]["seen"] == {"seen": found["d"]["came"]}
    said = [word for word in found["d"]["log"] if "has files of step 60" in word]
    assert len(said) == (found["d"]["first"] < 60)
    # It has saved with the others, and what it had is earlier, or whole.
    assert 3 in {file.generation.size for file in listing(Folder(tmp_path / "d")).files}


def old(name: str, tell: Tell, address: str, folder: str, scheme: str) -> None:
    run = Run(name, address, f"{folder}/{name}", scheme, every=60)
    while run.sync.meet() < 60:
        run.step()
    run.keeper.close()


def waits(
    name: str,
    tell: Tell,
    address: str,
    folder: str,
    lossy: bool,
    patience: float,
    scheme: str = "topka2a(0.1)",
) -> Any:
    """Go on where hosts have folders of their own."""
    warnings.filterwarnings("ignore", "the files of rank")
    there = Lighthouse(address, name=name, timeout=30, patience=90)
    run = Run(name, address, f"{folder}/{name}", scheme, resumes=lossy, there=there)
    tell("up")
    there.patience = patience  # after the ranks have started, which may take long
    try:
        begin = run.sync.meet()
    except ValueError as error:
        return str(error)
    ranks = run.sync.metrics()["ranks"]
    run.step()
    return begin, ranks, [word for word in run.log.words if "are waited for" in word]


def saved_apart(tmp_path: Path, scheme: str = "topka2a(0.1)") -> int:
    """Three ranks have saved, each in a folder of its own."""
    with lighthouse(3) as address:
        run(apart, "abc", address, str(tmp_path), scheme)
    step, size, _ = newest(*(tmp_path / name for name in "abc"))
    assert (step, size) == (10, 3)
    return step


def apart(name: str, tell: Tell, address: str, folder: str, scheme: str) -> None:
    run = Run(name, address, f"{folder}/{name}", scheme)
    while run.sync.meet() < 12:
        run.step()
        run.keeper._writer.wait()
    run.keeper.close()


@pytest.mark.waits
def test_ranks_wait_for_those_that_have_files(tmp_path: Path) -> None:
    step = saved_apart(tmp_path)
    with lighthouse(2) as address:
        job, up = Job(waits, address, str(tmp_path), False, 90.0), set[str]()

        def heard(name: str, _: str) -> None:
            up.add(name)
            if up == {"a", "b"}:
                threading.Timer(2.5, job.start, "c").start()

        for name in "ab":
            job.start(name)
        while len(job.ended) < 3:  # it may have looked before the last has started
            job.wait(heard)
            time.sleep(0.1)
    assert {told[:2] for told in job.ended.values()} == {(step, 3)}
    assert [len(job.ended[name][2]) for name in "abc"] == [1, 1, 0]


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize("lossy", [False, True])
def test_nobody_waits_for_good(tmp_path: Path, lossy: bool) -> None:
    step = saved_apart(tmp_path)
    with lighthouse(2) as address:
        found = run(waits, "ab", address, str(tmp_path), lossy, 4.0)
    for told in found.values():
        if lossy:
            assert told[:2] == (step, 2)
        else:
            assert "lossy=True" in told


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "abz"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_nowhere_is_gone_on_without(
    tmp_path: Path, scheme: str, names: str
) -> None:
    """Fewer ranks, or as many, one of which has a new disk."""
    step = saved_apart(tmp_path, scheme)
    with lighthouse(len(names)) as address:
        found = run(waits, names, address, str(tmp_path), True, 4.0, scheme)
    assert {told[:2] for told in found.values()} == {(step, len(names))}


# - What does not go together ----------------------------------------------------------


def unlike(
    name: str, tell: Tell, address: str, folder: str, how: str, later: bool
) -> str:
    """One rank, z, does otherwise than others."""
    odd = name == "z"
    more: dict[str, Any] = {"scheduler": None} if odd and how == "items" else {}
    if how == "every" and odd:
        more = {"every": 7}
    elif how == "wrong" and odd:
        more = {"every": 0}
    elif how == "copies" and odd:
        more = {"copies": 1}
    try:
        if how == "none" and odd:
            torch.set_num_threads(1)
            model, optimizer = build(0)
            sync = gradtide.replicate(
                model, optimizer, "wfbp", elastic=members(address, name)
            )
            step(model, optimizer, torch.ones(8, 8), torch.ones(8, 4))
            return f"went on: {sync.meet()}"
        resumes = None if how == "resume" and odd else False
        run = Run(name, address, folder, "wfbp", resumes=resumes, **more)
        while run.sync.meet() < 12 or (later and run.sync.metrics()["generation"] < 3):
            tell(run.sync.meet())
            run.step()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


WRONG = {
    "none": r"has a Checkpointer, and rank . has none: build one on every rank",
    "every": r"every differs between ranks.*pass the same to Checkpointer\(\)",
    "wrong": r"every=0, keep=2: whole numbers",
    "items": r"scheduler is a NoneType",
    "copies": r"copies=1, and ranks come and go",
    "resume": r"call resume\(\) on every rank",
}


@pytest.mark.product
@pytest.mark.parametrize("how", WRONG)
def test_all_are_told_what_differs(tmp_path: Path, how: str) -> None:
    with lighthouse(2) as address:
        found = run(unlike, "az", address, str(tmp_path), how, False)
    for told in found.values():
        assert re.search(WRONG[how], told), told


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize("how", ["none", "every", "wrong"])
def test_one_that_comes_otherwise_ends_alone(tmp_path: Path, how: str) -> None:
    waiting = ["z"]
    with lighthouse(2) as address:
        job = Job(unlike, address, str(tmp_path), how, True)

        def heard(_: str, now: int) -> None:
            if now >= 3 and waiting:
                job.start(waiting.pop())

        for name in "ab":
            job.start(name)
        job.wait(heard)
    assert job.ended["a"] == job.ended["b"] == "went on"
    assert re.search(WRONG[how], job.ended["z"])


def full(name: str, tell: Tell, address: str, folder: str) -> Any:
    """The disk of b is full for a while, and another rank is lost."""
    run = Run(name, address, f"{folder}/{name}", "wfbp")
    sync, errors = os.fsync, []

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    while (now := run.sync.meet()) < 30:
        if name == "c" and now == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = fails if name == "b" and 8 <= now < 12 else sync
        try:
            run.step()
        except SaveError as error:
            errors.append((run.sync.metrics()["step"], str(error)))
        run.keeper._writer.wait()
    run.keeper.close()
    return errors


@pytest.mark.waits
def test_a_full_disk_is_told_to_all_and_they_train_on(tmp_path: Path) -> None:
    with lighthouse(2) as address:
        found = run(full, "abc", address, str(tmp_path))
    assert found.pop("c") == -signal.SIGKILL
    assert alike(found)
    ((step, words), *_) = found["a"]
    assert 10 <= step <= 13
    assert "No space left" in words
    assert newest(*(tmp_path / name for name in "ab"))[0] in (25, 30)


def graced(name: str, tell: Tell, address: str, folder: str) -> dict[str, Any]:
    """A slow rank leaves steps of rounds out."""
    there = Lighthouse(address, name=name, timeout=30, patience=90, grace=0.15)
    run = Run(name, address, folder, "diloco(every=8)", there=there)
    saved = []
    while run.sync.meet() < 48:
        time.sleep(0.12 if name == "b" else 0.005)
        before = run.keeper._writer.begun
        run.step()
        if run.keeper._writer.begun > before:
            saved.append(run.sync.metrics()["step"])
    run.keeper.close()
    return {"saved": saved, "left": run.sync.metrics()["left_out_steps"]}


@pytest.mark.slow
@pytest.mark.waits
def test_with_a_grace_all_save_where_a_round_ends(tmp_path: Path) -> None:
    with lighthouse(2) as address:
        found = run(graced, "ab", address, str(tmp_path))
    assert found["b"]["left"] > 0
    assert found["a"]["saved"] == found["b"]["saved"] == [8, 16, 24, 32, 40, 48]
    assert newest(tmp_path)[:2] == (48, 2)


@contextmanager
def alone(folder: Path, scheme: str = "wfbp") -> Iterator[Any]:
    model, optimizer, sync, ranks, step = trained(scheme)
    how: Any = {"model": model, "optimizer": optimizer, "every": 2, "signals": ()}
    made = lambda **more: Checkpointer(folder, sync, **{**how, **more})  # noqa: E731
    yield made, sync, step, ranks


def _moments(name: str, tell: Tell, folder: str) -> list[str]:
    """Calls at a wrong moment."""
    found = []
    with alone(Path(folder)) as (make, sync, step, _):
        keeper = make()
        assert keeper.values == {}
        assert isinstance(keeper._elastic, Elastic)
        for call in (keeper.step, keeper.save):
            with pytest.raises(RuntimeError, match="meet") as error:
                call()
            found.append(str(error.value))
        assert keeper.resume() == 0
        for _ in range(3):
            assert sync.meet() == keeper.steps
            step()
            keeper.step()
        for late in (keeper.resume, make):
            with pytest.raises(RuntimeError, match=r"before|between") as error:
                late()
            found.append(str(error.value))
        with pytest.raises(ValueError, match=r"resume\(\)"):
            keeper.load_state_dict({})
        keeper.save()
        keeper.close()
    return found


def test_calls_at_a_wrong_moment_are_refused(tmp_path: Path) -> None:
    (found,) = run(_moments, "a", str(tmp_path)).values()
    assert len(found) == 4
    assert newest(tmp_path)[0] == 3


def _occupied(name: str, tell: Tell, folder: str) -> str:
    with alone(Path(folder)) as (make, sync, step, _):
        keeper = make()
        sync.meet()
        step()
        with pytest.raises(RuntimeError, match="another run") as error:
            keeper.save()
        return str(error.value)


def test_what_another_run_saved_is_not_written_over(tmp_path: Path) -> None:
    run(_moments, "a", str(tmp_path))
    (found,) = run(_occupied, "a", str(tmp_path)).values()
    assert "resume()" in found


def _anew(name: str, tell: Tell, folder: str) -> list[Any]:
    """Ranks meet anew when a save is not known to be whole; and are to stop then."""
    saved, left = [], []
    with alone(Path(folder), "dear") as (make, sync, step, ranks):
        keeper = make(every=3, keep=5)
        for _ in range(12):
            ranks.fresh = keeper.steps in (3, 8)
            begun = keeper._writer.begun if not ranks.fresh else 0
            step()
            left.append(keeper.step())
            if left[-1]:
                break
            keeper._writer.wait()
            if keeper._writer.begun > begun:
                saved.append(keeper.steps)
            if keeper.steps == 8:
                keeper.stop()
        keeper.close()
        sync.remove()
        return [saved, left, keeper.steps, ranks.formed]


def test_what_is_not_known_to_be_whole_is_saved_again(tmp_path: Path) -> None:
    (found,) = run(_anew, "a", str(tmp_path)).values()
    assert found == [[3, 4, 6, 9], [False] * 9 + [True], 10, 3]
    files = [file.generation for file in listing(Folder(tmp_path)).files]
    runs = {step: name for step, name, _ in sorted(files)}
    # Each group of ranks has a name of its own, and later ones are greater.
    assert list(runs) == [4, 6, 9, 10]
    assert runs[4] == runs[6] < runs[9] == runs[10]


# - What is lost -----------------------------------------------------------------------


def measured(
    name: str, tell: Tell, address: str, scheme: str, folder: str
) -> dict[str, Any]:
    """Tell what a rank has not delivered, until b is killed."""
    torch.set_num_threads(1)
    log, (model, optimizer) = Words(), build(0)
    sync = gradtide.replicate(model, optimizer, scheme, elastic=members(address, name))
    generator = torch.Generator().manual_seed(ord(name))
    norm = 0.0
    while sync.meet() < 20:
        if name == "b" and sync.meet() == 13:
            tell(norm)
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 8, generator=generator)
        step(model, optimizer, x, torch.tanh(x[:, :4]))
        if not sync._session.training.lost:
            norm = sync.metrics(residual=True)["residual_norm"]
    told = {k: v for k, v in sync.metrics().items() if k.startswith("lost")}
    return {**told, "log": [word for word in log.words if "lost with" in word]}


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "topk(0.1)", "diloco(every=4)"])
def test_what_is_lost_with_a_rank_is_told(scheme: str, tmp_path: Path) -> None:
    norms: list[float] = []
    with lighthouse(2) as address:
        job = Job(measured, address, scheme, str(tmp_path))
        for name in "abc":
            job.start(name)
        job.wait(lambda _, norm: norms.append(norm))
    assert job.ended.pop("b") == -signal.SIGKILL
    for told in job.ended.values():
        assert told["lost_ranks"] == 1
        share = told["lost_residual_share"], told["lost_share"]
        if scheme in ("wfbp", "dear"):
            assert (*share, told["lost_residual_norm"]) == (0, 0, 0)
            assert not told["log"]
            continue
        assert share[0] == pytest.approx(1 / 3)
        assert 0 < share[1] <= share[0]
        (words,) = told["log"]
        assert words.startswith("lost with b: 33% of what all ranks")
        assert told["lost_residual_norm"] > 0
        if scheme.startswith("topk"):
            assert norms[0] / 3 < told["lost_residual_norm"] < 3 * norms[0]
    assert alike({k: told["lost_residual_norm"] for k, told in job.ended.items()})


def test_what_is_lost_adds_up() -> None:
    losses = Losses()
    assert losses.add(1, 4, [0.0, 0.0, 0.0], 0.5) == ""
    assert losses == Losses(lost_ranks=1)
    words = losses.add(2, 4, [9.0, 7.0], 0.1)
    assert "50% of what all ranks had not delivered, about 4 in norm" in words
    assert losses == Losses(3, 4.0, 0.5, 0.05)
    losses.add(1, 2, [9.0], 7.0)
    assert losses == Losses(4, 5.0, 0.5, 0.5)
