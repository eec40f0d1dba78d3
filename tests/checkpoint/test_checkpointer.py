"""A run that is resumed is the run that was not stopped, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.runs import Run, listed
from tests.lighthouse import Words
from tests.ranks import run_ranks

import gradtide
from gradtide.checkpoint import Checkpointer, SaveError, loading, sending
from gradtide.checkpoint.signals import Signals
from gradtide.optim import DistributedMuon

SCHEMES = [
    "wfbp",
    "dear",
    "topka2a(0.2)",
    "exdyna(0.2, schedule='dear')",
    "topk(0.2, momentum_correction=True)",
    "powersgd(2)",
    "exdyna(0.2, schedule='local')",
    "oktopk(0.2, schedule='local', warmup=8)",
    "diloco(every=4)",
    "diloco(every=5, delay=1)",
    "spd_kfac",
    "pad_kfac(schedule='dear')",
    "dear(fusion=BinarySearch(steps=2))",
    "wfbp(wire='sign')",
    "demo",
]


def undisturbed(folder: Path, scheme: str, kind: str, stop: int) -> Any:
    """A run that is not stopped; and one that is, and resumed by another program."""
    whole = Run(folder / "whole", scheme, kind)
    whole.go()
    expected = whole.end()
    first = Run(folder / "parts", scheme, kind)
    first.go(end=stop)
    first.end()
    second = Run(folder / "parts", scheme, kind)
    begin = second.resume()
    assert begin == stop - stop % 3
    second.go(begin)
    return second.end() == expected


@pytest.mark.product(each=12)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_resumed_run_is_the_undisturbed_one(
    scheme: str, size: int, tmp_path: Path
) -> None:
    kind = "sgd" if "momentum" in scheme or "kfac" in scheme else "adamw"
    stop = 7 if "local" in scheme else 10
    assert run_ranks(size, undisturbed, tmp_path, scheme, kind, stop) == [True] * size


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme",
    [
        "wfbp",
        "dear",
        "exdyna(0.2, schedule='dear')",
        "exdyna(0.2, schedule='local')",
        "diloco(every=4)",
    ],
)
@pytest.mark.parametrize("skipped", [5, 6, 7])
def test_steps_that_a_scaler_skips_may_be_saved(
    scheme: str, skipped: int, tmp_path: Path
) -> None:
    def stopped() -> bool:
        whole = Run(tmp_path / "whole", scheme)
        whole.skipped = skipped
        whole.go()
        expected = whole.end()
        first = Run(tmp_path / "parts", scheme)
        first.skipped = skipped
        first.go(end=7)
        first.keeper.close()
        first.sync.remove(end_round=False)
        second = Run(tmp_path / "parts", scheme)
        second.skipped = skipped
        assert second.resume() == 6
        second.go(6)
        return second.end() == expected

    assert run_ranks(2, stopped) == [True, True]


@pytest.mark.slow
def test_what_auto_has_decided_goes_on(tmp_path: Path) -> None:
    def stopped() -> int:
        first = Run(tmp_path, "auto", every=None)
        first.go(end=40)
        first.keeper.save()
        first.keeper.close()
        decided = first.sync.scheme
        first.sync.remove()
        second = Run(tmp_path, "auto")
        begin = second.resume()
        assert second.sync.scheme == decided
        second.go(begin, begin + 3)
        second.end()
        return begin

    assert run_ranks(2, stopped) == [40, 40]


def test_a_scheme_that_waits_for_its_optimizer_begins(tmp_path: Path) -> None:
    def resumed() -> None:
        first = Run(tmp_path, "dear")
        first.go()
        expected = first.end()
        second = Run(tmp_path, "dear")
        second.sync.remove()
        sync = gradtide.replicate(second.model, None, "dear")
        second.keeper = Checkpointer(
            tmp_path,
            sync,
            model=second.model,
            optimizer=second.optimizer,
            scheduler=second.scheduler,
            generator=second.generator,
            seen=lambda: 0,
        )
        second.sync = sync
        assert second.resume() == 12
        assert second.end() == expected

    run_ranks(2, resumed)


def test_what_ranks_have_of_their_own_is_theirs_again(tmp_path: Path) -> None:
    """Buffers, and parameters that are not averaged, with their optimizer's state."""

    def begun(folder: Path) -> tuple[Any, Checkpointer, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        own = torch.nn.Parameter(torch.zeros(3))
        model.register_parameter("own", own)
        model._ddp_params_and_buffers_to_ignore = ["own"]
        optimizer = torch.optim.Adam(model.parameters())
        sync = gradtide.replicate(model, optimizer, "topk(0.5)", buffers="local")
        how: dict[str, Any] = {"model": model, "optimizer": optimizer, "signals": ()}
        keeper = Checkpointer(folder, sync, every=2, **how)

        def step(number: int) -> None:
            x = torch.full((4, 3), float(number * (dist.get_rank() + 1)))
            x[0] += torch.arange(3)
            (model(x) + own * dist.get_rank()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            keeper.step()

        def end() -> list[Any]:
            keeper.close()
            sync.remove()
            memory = optimizer.state_dict()["state"].values()
            return listed(
                [*model.state_dict().values(), *(v for s in memory for v in s.values())]
            )

        return step, keeper, end

    def resumed() -> list[Any]:
        step, _, end = begun(tmp_path)
        for number in range(5):
            step(number)
        expected = end()
        step, keeper, end = begun(tmp_path)
        assert keeper.resume() == 4
        step(4)
        assert end() == expected
        return expected

    one, other = run_ranks(2, resumed)
    assert one != other


def test_optimizers_that_divide_their_state_go_on(tmp_path: Path) -> None:
    def begun() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        matrices = [p for p in model.parameters() if p.dim() == 2]
        muon = DistributedMuon(matrices, lr=0.02)
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
        sync = gradtide.replicate(model, None)
        how: dict[str, Any] = {"model": model, "optimizer": rest, "muon": muon}
        return model, (muon, rest), Checkpointer(tmp_path, sync, every=2, **how)

    def resumed() -> bool:
        ends = []
        for _ in range(2):
            model, optimizers, keeper = begun()
            for number in range(keeper.resume(), 5):
                x = torch.full((2, 4), number + dist.get_rank() / 3)
                model(x).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                keeper.step()
            keeper.close()
            ends.append(listed(model.parameters()))
        return ends[0] == ends[1] and keeper.steps == 5

    assert run_ranks(2, resumed) == [True, True]


def test_an_optimizer_whose_state_one_rank_alone_gets_is_refused() -> None:
    def refused() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit's, where it is imported
            from torch.distributed.optim import ZeroRedundancyOptimizer
        model = torch.nn.Linear(2, 2)
        zero: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        sync = gradtide.replicate(model, None)
        with pytest.raises(ValueError, match="divides its state"):
            Checkpointer("nowhere", sync, model=model, optimizer=zero)

    run_ranks(2, refused)


# - Where files are --------------------------------------------------------------------


def own_folder(folder: Path, places: list[int]) -> Path:
    """Of this rank, where every host has a disk of its own."""
    return folder / str(places[dist.get_rank()])


def saved(folder: Path, scheme: str, places: list[int], steps: int = 7) -> Any:
    """Train and save; what the run comes to, and the sum of residuals at step 6."""
    run = Run(own_folder(folder, places), scheme)
    run.go(end=6)
    total = summed(run)
    run.go(6, steps)
    run.keeper.close()
    run.keeper.step = lambda: False  # type: ignore[method-assign]
    run.go(steps)
    return run.end(), total


def summed(run: Run) -> list[float]:
    """The sum of all ranks' residuals."""
    own = run.sync.state_dict()[f"rank{dist.get_rank()}"]["remainders"]
    named = {name: r.double() for name, r in own.items()}
    total = torch.cat([torch.zeros(1), *(named[n].flatten() for n in sorted(named))])
    dist.all_reduce(total)
    return list(total.tolist())


def gone_on(folder: Path, scheme: str, places: list[int], **how: Any) -> Any:
    run = Run(own_folder(folder, places), scheme, every=99)
    begin = run.resume(**how)
    total = summed(run)
    run.go(begin)
    return run.end(), total, begin


@pytest.mark.product
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0, 0, 0], [0, 0, 0]),  # one folder for all
        ([0, 1, 2], [0, 1, 2]),  # one for each
        ([0, 1, 2], [2, 0, 1]),  # hosts have got other numbers
        ([0, 1, 1], [1, 1, 0]),
    ],
)
def test_files_are_found_on_whichever_host(
    before: list[int], after: list[int], tmp_path: Path
) -> None:
    expected = run_ranks(3, saved, tmp_path, "topka2a(0.2)", before)
    found = run_ranks(3, gone_on, tmp_path, "topka2a(0.2)", after)
    for (end, total), (other, total_then, begin) in zip(expected, found, strict=True):
        assert begin == 6
        assert total == total_then
        assert end == other


@pytest.mark.product(each=12)
@pytest.mark.parametrize(("then", "now"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("scheme", ["topka2a(0.2)", "exdyna(0.2, schedule='local')"])
def test_other_numbers_of_ranks_keep_the_sum(
    scheme: str, then: int, now: int, tmp_path: Path
) -> None:
    before, after = ([0, 1, 0], [1, 0, 2]) if now > 1 else ([0, 0, 0], [0])
    _, expected = run_ranks(then, saved, tmp_path, scheme, before)[0]
    assert any(expected)
    for _, total, begin in run_ranks(now, gone_on, tmp_path, scheme, after):
        assert begin == 6
        assert total == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("scheme", ["pad_kfac", "diloco(every=4)"])
def test_factors_and_rounds_go_on_with_other_numbers_of_ranks(
    scheme: str, tmp_path: Path
) -> None:
    run_ranks(3, saved, tmp_path, scheme, [0, 1, 1])
    found = run_ranks(2, gone_on, tmp_path, scheme, [1, 0])
    assert [begin for _, _, begin in found] == [6, 6]


def test_a_new_disk_begins_with_no_residual_and_says_so(tmp_path: Path) -> None:
    def resumed() -> tuple[list[float], list[Any], list[str]]:
        run = Run(own_folder(tmp_path, [0, 9]), "topka2a(0.2)", every=1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert run.resume() == 6
        own = run.sync.state_dict()[f"rank{dist.get_rank()}"]["remainders"]
        model = listed(run.model.state_dict().values())
        run.go(6, 8)
        run.keeper.close()
        return (
            [float(r.norm()) for r in own.values()],
            model,
            [str(one.message) for one in told],
        )

    run_ranks(2, saved, tmp_path, "topka2a(0.2)", [0, 1])
    (norms, model, told), (none, other, warned) = run_ranks(2, resumed)
    assert any(norms)
    assert not any(none)
    assert model == other
    assert "lost" in " ".join(told)
    assert "residual begins at zero" in " ".join(warned)
    assert [gone_on_from(tmp_path, [0, 9])] == [8]


def gone_on_from(folder: Path, places: list[int], **how: Any) -> int:
    found = run_ranks(len(places), gone_on, folder, "topka2a(0.2)", places)
    return int(found[0][2])


@pytest.mark.parametrize("scheme", ["exdyna(0.2, schedule='local')", "pad_kfac"])
def test_a_new_disk_is_refused_where_its_own_state_counts(
    scheme: str, tmp_path: Path
) -> None:
    def refused() -> None:
        run = Run(own_folder(tmp_path, [0, 9]), scheme)
        before = listed(run.model.parameters())
        words = r"rank 1 are nowhere.*torch\.load\('/.*step-6/common0\.pt'\)"
        with pytest.raises(ValueError, match=words):
            run.resume()
        assert before == listed(run.model.parameters())

    run_ranks(2, saved, tmp_path, scheme, [0, 1])
    run_ranks(2, refused)


def test_who_has_what_is_said_on_every_rank(tmp_path: Path) -> None:
    def refused() -> None:
        run = Run(own_folder(tmp_path, [0, 1]), "topka2a(0.2)")
        with pytest.raises(ValueError, match=r"of rank 1, 2.*rank 0 of 3, 6; rank 1"):
            run.resume()
        with pytest.warns(UserWarning, match="of rank 1, 2 are nowhere"):
            assert run.resume(lossy=True) == 6
        run.go(6)
        run.end()

    run_ranks(3, saved, tmp_path, "topka2a(0.2)", [0, 1, 2])
    for name in ("1", "2"):
        shutil.rmtree(tmp_path / name)
    run_ranks(2, refused)


def test_long_files_are_sent_in_pieces() -> None:
    def sent() -> bool:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        sync = gradtide.replicate(model, optimizer)
        data = bytes(range(256)) * 40
        sending.CHUNK = 1000
        own = data if dist.get_rank() == 2 else None
        ends, cpu = (2, 0), torch.device("cpu")
        got = sending.send(sync.engine, own, len(data), ends, cpu)
        return got == (data if dist.get_rank() == 0 else None)

    assert run_ranks(3, sent) == [True] * 3


# - What is damaged --------------------------------------------------------------------


def test_what_is_torn_is_not_loaded_but_what_was_whole_before(tmp_path: Path) -> None:
    def twice() -> None:
        expected, _ = saved(tmp_path, "topka2a(0.2)", [0, 0])
        dist.barrier()
        if dist.get_rank() == 0:
            file = tmp_path / "0" / "step-6" / "rank1.pt"
            data = bytearray(file.read_bytes())
            data[1000] ^= 1
            file.write_bytes(data)
        dist.barrier()
        found, _, begin = gone_on(tmp_path, "topka2a(0.2)", [0, 0])
        assert begin == 3
        assert found == expected

    run_ranks(2, twice)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    def twice() -> list[str]:
        words, run = Words(), Run(tmp_path)
        run.go(end=6)
        run.end()
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "step-6" / "rank1.pt").write_bytes(b"")
        dist.barrier()
        assert Run(tmp_path).resume() == 3
        dist.barrier()
        if dist.get_rank() == 0:
            for step in (3, 6):
                file = tmp_path / f"step-{step}" / "common0.pt"
                file.write_bytes(file.read_bytes()[:1000])
        dist.barrier()
        with pytest.raises(ValueError, match=r"damaged: step-3/common0\.pt \(.*step-6"):
            Run(tmp_path).resume()
        return words.words

    first, second = run_ranks(2, twice)
    assert "step 3 is gone on from; damaged files: step-6/rank1.pt (" in first[0]
    assert not second


def test_a_first_save_that_was_interrupted_begins_anew(tmp_path: Path) -> None:
    def begun() -> None:
        run = Run(tmp_path)
        run.go(end=3)  # and no message after it
        run.keeper.close()
        dist.barrier()
        if dist.get_rank() == 0:
            (tmp_path / "step-3" / "rank1.pt").unlink()
        dist.barrier()
        again = Run(tmp_path)
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="was interrupted"):
                assert again.resume() == 0
        else:
            assert again.resume() == 0
        again.go()
        again.end()

    run_ranks(2, begun)


@pytest.mark.product
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.model.append(torch.nn.Linear(2, 2)), "build the model"),
        (lambda run: run.optimizer.add_param_group({"params": []}), "groups"),
        (None, None),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    change: Callable[[Run], Any] | None, message: str | None, tmp_path: Path
) -> None:
    def refused() -> None:
        run = Run(tmp_path)
        if change is None:
            run.keeper._subject.items._items.pop("seen")
        elif dist.get_rank() == 1:
            change(run)
        before = listed(run.model.parameters())
        with pytest.raises(ValueError, match=message or "items"):
            run.keeper.resume()
        assert before == listed(run.model.parameters())
        assert run.generator.initial_seed() == dist.get_rank()

    run_ranks(2, saved, tmp_path.parent / tmp_path.name, "wfbp", [0, 0])
    for each in (tmp_path / "0").iterdir():
        each.rename(tmp_path / each.name)
    run_ranks(2, refused)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"state": {}, "param_groups": []},
        {"state": [], "param_groups": [{"params": [0, 1], "lr": 0.1}]},
        {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]},
        {"state": {}, "param_groups": [{"params": [0, "x"], "lr": 0.1}]},
        {"state": {}, "param_groups": [{"params": [0, 1], "lr": "fast"}]},
        {"state": {7: {}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]},
        {"state": {0: []}, "param_groups": [{"params": [0, 1], "lr": 0.1}]},
    ],
)
def test_the_state_of_another_optimizer_is_refused(state: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loading._check_optimizer(optimizer, optimizer.state_dict())
    with pytest.raises(ValueError, match="optimizer"):
        loading._check_optimizer(optimizer, state)


def test_another_runs_folder_is_not_written_into(tmp_path: Path) -> None:
    def refused() -> None:
        first = Run(tmp_path)
        first.go()
        first.end()
        second = Run(tmp_path)
        second.go(end=2)
        with pytest.raises(RuntimeError, match=r"call\s+resume"):
            second.go(2)

    run_ranks(2, refused)


# - What stays -------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    return sorted(int(d.name.removeprefix("step-")) for d in folder.glob("step-*"))


@pytest.mark.product(each=6)
@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["wfbp", "dear", "diloco(every=2)"])
def test_the_newest_stay(scheme: str, keep: int, tmp_path: Path) -> None:
    def trained() -> None:
        run = Run(tmp_path, scheme, every=2, keep=keep)
        run.go(end=20)
        run.keeper._writer.wait()
        run.go(20, 23)  # all hear that all have it
        run.end()

    run_ranks(3, trained)
    assert steps_in(tmp_path) in (
        [22 - 2 * i for i in reversed(range(keep))],
        [22 - 2 * i for i in reversed(range(keep + 1))],  # of 22 not all know yet
    )
    last = tmp_path / "step-22"
    assert sorted(file.name for file in last.iterdir()) == [
        "common0.pt",
        *(f"rank{r}.pt" for r in range(3)),
    ]


def test_what_an_interrupted_save_left_is_removed(tmp_path: Path) -> None:
    def trained() -> None:
        run = Run(tmp_path)
        run.go(end=3)
        run.keeper._writer.wait()
        left = tmp_path / "step-3" / f"rank{dist.get_rank()}.pt.new"
        left.write_bytes(b"half")
        run.go(3, 6)
        run.keeper.close()
        assert not left.exists()

    run_ranks(2, trained)


def test_nothing_is_removed_that_a_slow_rank_needs(tmp_path: Path) -> None:
    def trained() -> None:
        run = Run(own_folder(tmp_path, [0, 1]), every=None, keep=1)
        folder, wait = run.keeper._folder, threading.Event()
        write = folder.write
        run.go(end=2)
        run.keeper.save()
        run.keeper._writer.wait()
        run.go(2, 4)
        if dist.get_rank() == 1:

            def slow(*arguments: Any) -> None:
                wait.wait()
                write(*arguments)

            folder.write = slow  # type: ignore[method-assign]
        run.keeper.save()
        run.go(4, 7)
        run.keeper._writer._pool.submit(int).result() if not dist.get_rank() else None
        dist.barrier()
        assert steps_in(tmp_path / "0") == [2, 4]
        assert steps_in(tmp_path / "1") == [2]
        dist.barrier()
        wait.set()
        run.keeper._writer.wait()
        dist.barrier()
        run.go(7, 9)
        run.end()
        dist.barrier()
        assert steps_in(tmp_path / "0") == steps_in(tmp_path / "1") == [4]

    run_ranks(2, trained)


# - A disk that is full ----------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize(
    "scheme", ["wfbp", "dear", "diloco(every=4)", "oktopk(.1, schedule='local')"]
)
def test_a_full_disk_is_told_on_all_ranks_and_all_may_train_on(
    scheme: str, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def trained() -> tuple[int, list[str]]:
        run = Run(tmp_path, scheme)
        folder, told, step = run.keeper._folder, [], 0
        write = folder.write
        while step < 17:
            if step == 5 and dist.get_rank() == 1:
                folder.write = full  # type: ignore[method-assign]
            if step == 8:
                folder.write = write  # type: ignore[method-assign]
            try:
                step += 1
                run.step()
            except SaveError as error:
                told.append(f"{step} {error}")
            if step == 6:
                run.keeper._writer.wait()
        run.end()
        return told

    ranks = run_ranks(3, trained)
    assert ranks[0] == ranks[1] == ranks[2]
    (told,) = ranks[0]
    assert "rank 1: OSError" in told
    assert "No space left" in told
    assert int(told.split()[0]) in (7, 8)
    again = run_ranks(3, lambda: Run(tmp_path, scheme).resume())
    assert again == [15] * 3


def test_a_folder_in_which_nothing_can_be_saved_is_refused_at_once(
    tmp_path: Path,
) -> None:
    """On every rank, also where one alone has such a folder."""
    (tmp_path / "file").touch()

    def work() -> str:
        place = "file/folder" if dist.get_rank() else "folder"
        with pytest.raises(ValueError, match="nothing can be saved") as raised:
            Run(tmp_path / place, "wfbp")
        return str(raised.value)

    for message in run_ranks(2, work):
        assert "Not a directory" in message


def test_no_folder_is_refused() -> None:
    def work() -> None:
        with pytest.raises(ValueError, match="name this run's own folder"):
            Run("", "wfbp")

    run_ranks(2, work)


def test_what_fails_last_is_told_by_close(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def trained() -> None:
        run = Run(tmp_path, every=12)
        run.keeper._folder.write = full  # type: ignore[method-assign]
        run.go()
        with pytest.raises(SaveError, match="No space left"):
            run.keeper.close()
        run.keeper.close()

    run_ranks(1, trained)


# - An orderly end ---------------------------------------------------------------------


@pytest.mark.product(each=6)
@pytest.mark.parametrize(
    ("scheme", "last"),
    [
        ("wfbp", 5),
        ("dear", 6),
        ("topka2a(0.2)", 5),
        ("exdyna(0.2, schedule='local')", 5),
        ("diloco(every=4)", 8),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_at_one_rank_has_all_save_and_leave(
    scheme: str, last: int, number: int, tmp_path: Path
) -> None:
    def ended() -> tuple[int, Any]:
        whole = Run(tmp_path / "whole", scheme)
        whole.go()
        expected = whole.end()
        before = signal.getsignal(number)
        run = Run(tmp_path / "parts", scheme, signals=(signal.SIGTERM, signal.SIGUSR1))
        run.go(end=4)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        stopped = run.go(4)
        run.end()
        assert signal.getsignal(number) == before
        again = Run(tmp_path / "parts", scheme)
        assert again.resume() == stopped
        again.go(stopped)
        return stopped, again.end() == expected

    assert run_ranks(3, ended) == [(last, True)] * 3


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    def ended() -> None:
        Run(tmp_path, signals=(signal.SIGTERM,))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, ended)


def test_a_process_that_was_forked_ends_at_the_first(tmp_path: Path) -> None:
    def ended() -> None:
        run = Run(tmp_path, signals=(signal.SIGTERM,))
        worker = os.fork()
        if not worker:
            signal.pause()
            os._exit(0)
        time.sleep(0.2)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not run.sync.stopping
        run.go()
        run.end()

    run_ranks(1, ended)


def test_signals_of_another_thread_are_not_watched() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    told: list[Any] = []

    def work() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Signals([signal.SIGUSR1], lambda: None).restore()
        told.extend(found)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "not the main thread" in str(told[0].message)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_handler_that_came_later_stays() -> None:
    signals = Signals([signal.SIGUSR1], lambda: None)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert before == signals._handle
    signals.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_stop_by_a_call_saves_what_was_never_due(tmp_path: Path) -> None:
    def ended() -> None:
        run = Run(tmp_path, every=None)
        run.go(end=2)
        if dist.get_rank() == 1:
            run.keeper.stop()
        assert run.go(2) == 3
        run.end()
        with Run(tmp_path, every=None).keeper as keeper:
            assert keeper.resume() == 3

    run_ranks(2, ended)


# - torch.distributed.checkpoint -------------------------------------------------------


@pytest.mark.parametrize("scheme", ["exdyna(0.2)", "diloco(every=4)", "dear"])
def test_it_is_a_part_of_what_torch_saves(scheme: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def twice() -> bool:
        run = Run(tmp_path / "own", scheme, every=None)
        run.go(end=5)
        dcp.save({"run": run.keeper}, checkpoint_id=tmp_path / "dcp")
        run.go(5)
        expected = run.end()
        again = Run(tmp_path / "own", scheme, every=None)
        dcp.load({"run": again.keeper}, checkpoint_id=tmp_path / "dcp")
        assert again.keeper.steps == 5
        again.go(5)
        return again.end() == expected

    assert run_ranks(2, twice) == [True, True]
