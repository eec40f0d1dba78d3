"""Hosts are lost with their folders, and the run goes on by copies, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.runs import Run
from tests.checkpoint.test_checkpointer import summed
from tests.ranks import run_ranks

import gradtide
from gradtide.checkpoint import (
    Checkpointer,
    SaveError,
    checkpointer,
    copies,
    neighbours,
)
from gradtide.checkpoint.files import Folder

LOCAL = "exdyna(0.2, schedule='local')"
SCHEMES = [
    "wfbp",
    "dear",
    "exdyna(0.2)",
    LOCAL,
    "diloco(every=4)",
    "diloco(every=5, delay=1)",
    "pad_kfac",
]


def begun(folder: Path, hosts: list[int], scheme: str, **more: Any) -> Run:
    """A run of ranks on pretended hosts, each of which has a folder of its own."""
    host = hosts[dist.get_rank()]
    os.environ["GROUP_RANK"] = str(host)
    kind = "sgd" if "kfac" in scheme else "adamw"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hosts of 2, 1 ranks")
        return Run(folder / str(host), scheme, kind, **more)


def trained(folder: Path, hosts: list[int], scheme: str, **more: Any) -> Any:
    """What an undisturbed run comes to, and one that ends after step 7, saved."""
    whole = begun(folder / "whole", hosts, scheme)
    whole.go()
    expected = whole.end()
    run = begun(folder, hosts, scheme, **{"copies": 1, **more})
    run.go(end=7)
    run.end()
    return expected


def gone_on(folder: Path, hosts: list[int], scheme: str, **more: Any) -> Any:
    run = begun(folder, hosts, scheme, **{"copies": 1, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost
        step = run.resume()
    run.go(step)
    return step, run.end()


def lose(folder: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(folder / str(host))


def there(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files(folder: Path) -> list[str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.product(each=6)
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_goes_on_without_the_folder_of_a_host(
    scheme: str, hosts: list[int], tmp_path: Path
) -> None:
    expected = run_ranks(len(hosts), trained, tmp_path, hosts, scheme)
    lose(tmp_path, 1)
    found = run_ranks(len(hosts), gone_on, tmp_path, hosts, scheme)
    assert [step for step, _ in found] == [6] * len(hosts)
    assert [end for _, end in found] == expected


@pytest.mark.product
@pytest.mark.parametrize("scheme", [LOCAL, "exdyna(0.2)"])
def test_two_copies_outlive_two_hosts(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [0, 1, 2]
    # So they are sent by the network, as between hosts.
    monkeypatch.setattr(neighbours, "network", lambda: str(dist.get_rank()))
    expected = run_ranks(3, lambda: trained(tmp_path, hosts, scheme, copies=2))
    lose(tmp_path, 0, 1)
    found = run_ranks(3, lambda: gone_on(tmp_path, hosts, scheme, copies=2))
    assert found == [(6, end) for end in expected]


def test_one_copy_does_not_outlive_two_neighbours(tmp_path: Path) -> None:
    def refused() -> None:
        run = begun(tmp_path, [0, 1, 2], LOCAL, copies=1)
        with pytest.raises(ValueError, match="the files of rank 1 are nowhere"):
            run.resume()

    run_ranks(3, trained, tmp_path, [0, 1, 2], LOCAL)
    lose(tmp_path, 1, 2)
    run_ranks(3, refused)


def test_hosts_that_changed_folders_go_on(tmp_path: Path) -> None:
    expected = run_ranks(3, trained, tmp_path, [0, 1, 2], LOCAL)
    lose(tmp_path, 1)
    found = run_ranks(3, gone_on, tmp_path, [2, 0, 1], LOCAL)
    assert found == [(6, end) for end in expected]


@pytest.mark.product(each=6)
@pytest.mark.parametrize("now", [[0, 2], [2, 0], [0, 2, 1, 3], [0, 0, 2, 2]], ids=str)
@pytest.mark.parametrize("scheme", ["exdyna(0.2)", LOCAL])
def test_other_numbers_of_ranks_and_hosts_keep_the_sum(
    now: list[int], scheme: str, tmp_path: Path
) -> None:
    def before() -> Any:
        run = begun(tmp_path, [0, 1, 2], scheme, copies=1)
        run.go(end=6)
        total = summed(run)
        run.keeper.close()
        return total

    def after() -> Any:
        run = begun(tmp_path, now, scheme, copies=1)
        assert run.resume() == 6
        total = summed(run)
        run.go(6)
        run.end()
        return total

    expected = run_ranks(3, before)[0]
    lose(tmp_path, 1)
    assert any(expected)
    for total in run_ranks(len(now), after):
        assert total == pytest.approx(expected, abs=1e-7)


@pytest.mark.slow
def test_hosts_are_lost_one_after_the_other(tmp_path: Path) -> None:
    """What a new host lacks is there again before anything else is saved."""

    def resumed() -> int:
        run = begun(tmp_path, [0, 1, 2], LOCAL, copies=1)
        step = run.resume()
        run.keeper.close()
        return step

    expected = run_ranks(3, trained, tmp_path, [0, 1, 2], LOCAL)
    for host in (1, 2, 0):
        lose(tmp_path, host)
        assert run_ranks(3, resumed) == [6] * 3
        assert files(tmp_path / str(host) / "step-6") == [
            "common0.pt",
            *sorted(f"rank{r}.pt" for r in (host, (host - 1) % 3)),
        ]
    found = run_ranks(3, gone_on, tmp_path, [0, 1, 2], LOCAL)
    assert found == [(6, end) for end in expected]


def test_a_damaged_file_is_replaced_by_its_copy(tmp_path: Path) -> None:
    def damage(path: Path) -> bytes:
        data = path.read_bytes()
        half = len(data) // 2
        path.write_bytes(data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :])
        return data

    expected = run_ranks(2, trained, tmp_path, [0, 1], LOCAL)
    file = tmp_path / "1" / "step-6" / "rank1.pt"
    data = damage(file)
    found = run_ranks(2, lambda: gone_on(tmp_path, [0, 1], LOCAL, every=99))
    assert found == [(6, end) for end in expected]
    assert file.read_bytes() == data
    damage(file)
    damage(tmp_path / "0" / "step-6" / "rank1.pt")
    found = run_ranks(2, gone_on, tmp_path, [0, 1], LOCAL)
    assert found == [(3, end) for end in expected]


@pytest.mark.product
@pytest.mark.parametrize(
    ("scheme", "each"),
    [
        ("wfbp", 0),
        ("exdyna(0.1)", 4),  # the residual
        ("exdyna(0.1, schedule='local')", 12),  # and AdamW's two moments
        ("diloco(every=4)", 20),  # and parameters, and the outer momentum
    ],
)
def test_what_a_copy_takes(scheme: str, each: int, tmp_path: Path) -> None:
    """The figures of docs/howto/checkpoint.md."""

    def saved() -> tuple[int, int]:
        rank = dist.get_rank()
        os.environ["GROUP_RANK"] = str(rank)
        layers = (torch.nn.Linear(500, 500) for _ in range(4))
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        sync = gradtide.replicate(model, optimizer, scheme)
        how: dict[str, Any] = {"model": model, "optimizer": optimizer, "copies": 1}
        keeper = Checkpointer(tmp_path / str(rank), sync, every=6, **how)
        for _ in range(6):
            model(torch.randn(4, 500)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keeper.step()
        keeper.close()
        path = tmp_path / str(rank) / "step-6" / f"rank{1 - rank}.pt"
        return sum(p.numel() for p in model.parameters()), path.stat().st_size

    for count, size in run_ranks(2, saved):
        assert size == pytest.approx(each * count, abs=1 << 16)


# - What stays -------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("number", [0, 1, 2])
def test_old_copies_go_with_old_files(number: int, tmp_path: Path) -> None:
    def kept() -> None:
        run = begun(tmp_path, [0, 1, 2], LOCAL, every=2, keep=1, copies=number)
        own = tmp_path / str(dist.get_rank())
        for step in range(20):
            run.go(step, step + 1)
            assert len([*own.glob("step-*")]) <= 4  # `keep` + 3
        run.keeper._writer.wait()
        run.go(20, 23)
        run.end()

    run_ranks(3, kept)
    for host in range(3):
        names = sorted(p.name for p in (tmp_path / str(host)).glob("step-*"))
        assert names in (["step-22"], ["step-20", "step-22"])
        held = [f"rank{(host - i) % 3}.pt" for i in range(number + 1)]
        own = tmp_path / str(host) / "step-22"
        assert files(own) == [f"common{host}.pt", *sorted(held)]


def test_a_shared_folder_has_each_file_once_and_nothing_is_sent(
    tmp_path: Path,
) -> None:
    def shared() -> None:
        def sent(*_: Any) -> None:
            raise AssertionError("a file was sent")

        copies.files.copy = sent  # type: ignore[assignment]
        os.environ["GROUP_RANK"] = str(dist.get_rank())
        run = Run(tmp_path, LOCAL, copies=1)
        run.go()
        run.end()
        again = Run(tmp_path, LOCAL, copies=1)
        assert again.resume() == 12
        again.end()

    run_ranks(3, shared)
    names = ["common0.pt", "common1.pt", "common2.pt"]
    assert files(tmp_path / "step-12") == [*names, *(f"rank{r}.pt" for r in range(3))]


def test_nothing_counts_whose_copy_is_missing(tmp_path: Path) -> None:
    """So the step before it stays, on all ranks."""

    def kept() -> None:
        wait, plain = threading.Event(), copies.files.copy
        run = begun(tmp_path, [0, 1], LOCAL, every=None, keep=1, copies=1)
        run.go(end=2)
        run.keeper.save()
        run.keeper._writer.wait()
        run.go(2, 4)
        if dist.get_rank() == 1:

            def slow(*arguments: Any) -> None:
                wait.wait()
                plain(*arguments)

            copies.files.copy = slow
        run.keeper.save()
        run.go(4, 7)
        there(tmp_path / "0" / "step-4" / "rank1.pt")  # the other way is as ever
        dist.barrier()
        assert (tmp_path / "0" / "step-2").exists()
        assert (tmp_path / "1" / "step-2").exists()
        assert not (tmp_path / "1" / "step-4" / "rank0.pt").exists()
        dist.barrier()
        wait.set()
        run.keeper._writer.wait()
        dist.barrier()
        run.go(7, 9)
        run.end()
        dist.barrier()
        for host in "01":
            assert not (tmp_path / host / "step-2").exists()

    run_ranks(2, kept)


# - What fails -------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "diloco(every=4)", LOCAL])
def test_a_full_disk_at_a_neighbour_is_told_on_all_ranks(
    scheme: str, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def told() -> list[str]:
        plain, said, step = copies.files.copy, [], 0
        run = begun(tmp_path, [0, 1, 2], scheme, copies=1)
        while step < 17:
            if step in (5, 8) and dist.get_rank() == 2:
                copies.files.copy = full if step == 5 else plain
            try:
                step += 1
                run.step()
            except SaveError as error:
                said.append(f"{step} {error}")
            if step in (4, 6):
                run.keeper._writer.wait()
                dist.barrier()
        run.end()
        return said

    ranks = run_ranks(3, told)
    assert ranks[0] == ranks[1] == ranks[2]
    (said,) = ranks[0]
    assert "rank 1: NotKeptError: rank 2 keeps no copy of it: OSError" in said
    assert "No space left" in said
    lose(tmp_path, 1)
    again = run_ranks(3, lambda: begun(tmp_path, [0, 1, 2], scheme, copies=1).resume())
    assert again == [15] * 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a copy leaves", "a copy comes"])
def test_a_rank_that_is_killed_while_copying_ends_all(
    where: str, tmp_path: Path
) -> None:
    """Within seconds, and the run goes on from what has both files."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> float:
        run = begun(tmp_path, [0, 1], LOCAL, copies=1)
        run.go(end=5)
        run.keeper._writer.wait()
        dist.barrier()
        if dist.get_rank() == 1:
            if where == "a copy leaves":
                Folder.pieces = die  # type: ignore[assignment, method-assign]
            else:
                copies.files.copy = die  # type: ignore[assignment]
        begin = time.monotonic()
        try:
            run.go(5)
        except Exception:
            with pytest.raises(SaveError, match="rank 1 keeps no copy"):
                run.keeper.close()
            took = time.monotonic() - begin
            (tmp_path / "took").write_text(str(took))
            raise
        raise AssertionError("it went on")

    expected = run_ranks(2, trained, tmp_path / "other", [0, 1], LOCAL)
    with pytest.raises(AssertionError, match=r"rank 1 died|CommunicationError"):
        run_ranks(2, killed)
    deadline = time.monotonic() + 10
    while not (tmp_path / "took").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    lose(tmp_path, 1)
    found = run_ranks(2, gone_on, tmp_path, [0, 1], LOCAL)
    assert [end for _, end in found] == expected
    arrived = where == "a copy comes"  # its own has perhaps left before
    assert {step for step, _ in found} in ({3}, {6} if arrived else {3})


@pytest.mark.waits
def test_nobody_waits_for_who_has_stopped_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    def stopped() -> float:
        checkpointer.seconds_of = lambda _: 2.0
        run = begun(tmp_path, [0, 1], "wfbp", copies=1)
        if dist.get_rank() == 1:  # its thread stands still, and training goes on
            run.keeper._writer._copies._keep = lambda *_: time.sleep(30)  # type: ignore
        run.go(end=3)
        begin = time.monotonic()
        with pytest.raises(SaveError, match=r"rank 0: NotKeptError.*silent for 2 s"):
            run.go(3)
        with suppress(SaveError):  # the one after it, too
            run.keeper.close()
        return time.monotonic() - begin

    assert max(run_ranks(2, stopped)) < 15


def test_a_signal_saves_copies_too(tmp_path: Path) -> None:
    def ended() -> int:
        run = begun(tmp_path, [0, 1], LOCAL, copies=1, every=None)
        run.go(end=4)
        if dist.get_rank() == 1:
            run.keeper.stop()
        last = run.go(4)
        run.end()
        return last

    (last, _) = run_ranks(2, ended)
    lose(tmp_path, 0)
    again = run_ranks(2, lambda: begun(tmp_path, [0, 1], LOCAL, copies=1).resume())
    assert again == [last] * 2
