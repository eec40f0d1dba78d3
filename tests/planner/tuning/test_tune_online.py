"""A search for the size of buckets while a model trains, on real ranks.

Times are made up, as a function of the fusion in use, so that what is found is known.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn

import gradtide
from gradtide.fusion import BySize, Trial, best
from gradtide.planner.tuning import online

SEARCH = "BinarySearch(trials=4, steps=3, smallest=0.001, ends=0.001)"
BOTTOM = 0.004  # MB: where steps are shortest
LONG = 28  # steps: more than any search here takes


class MadeUp:
    """A clock on which a step takes as long as its fusion says."""

    replica: Any = None
    laps: list[float]

    def __init__(self, device: torch.device) -> None:
        self.laps = []

    def reset(self) -> None:
        pass

    def lap(self) -> float | None:
        size = MadeUp.replica.scheme.fusion.megabytes
        self.laps.append(size)
        stall = 10.0 if len(self.laps) % 4 == 3 else 1.0  # every fourth step, by far
        return stall * seconds(size)


def seconds(megabytes: float) -> float:
    return 1 + 0.2 * abs(math.log2(megabytes / BOTTOM))


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "Clock", MadeUp)
    monkeypatch.setattr(online, "SETTLE", 1)
    monkeypatch.setattr(online, "START", 2)
    monkeypatch.setattr(online, "AGAIN", 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(24, 24), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(step: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 24, generator=rng)


class Run:
    def __init__(self, scheme: str) -> None:
        self.model = network()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = gradtide.replicate(self.model, self.opt, scheme)
        self.step = 0
        MadeUp.replica = self.sync

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self.model(batch(self.step)).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
        return self

    def weights(self) -> list[float]:
        self.sync.flush()
        return [x for p in self.model.parameters() for x in p.flatten().tolist()]

    def found(self) -> Any:
        assert self.sync.tuning is not None
        return self.sync.tuning


def scheme(collective: str = "Dense()", schedule: str = "WFBP") -> str:
    return f"Scheme({collective}, fusion={SEARCH}, schedule={schedule})"


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_find_the_best_and_nothing_else_changes(size: int) -> None:
    def run() -> list[Any]:
        results = []
        for schedule in ("WFBP", "DEAR")[size > 2 :]:
            tuned = Run(scheme("Dense()", schedule)).go(LONG)
            fixed = Run(f"Scheme(fusion=BySize(0.004, 0.001, 1), schedule={schedule})")
            fixed.go(LONG)
            assert tuned.found().done
            if size <= 2:  # of more than two numbers, sums depend on their order
                assert tuned.weights() == fixed.weights()
            torch.testing.assert_close(
                torch.tensor(tuned.weights()), torch.tensor(fixed.weights())
            )
            tried = [tuple(trial) for trial in tuned.found().tried]
            results.append((tried, repr(tuned.sync.scheme), tuned.weights()))
        return results

    ranks = run_ranks(size, run)
    for tried, adopted, _ in ranks[0]:
        sizes = [megabytes for megabytes, _ in tried]
        assert len(set(sizes)) >= 3
        best = min(tried, key=lambda trial: trial[1])[0]
        assert f"BySize(megabytes={best!r}" in adopted
        assert seconds(best) < 1.1
        for megabytes, measured in tried:  # stalls are no medians
            assert measured == pytest.approx(seconds(megabytes))
    assert all(rank == ranks[0] for rank in ranks)


def test_hopeless_trials_are_cut_short_and_close_ones_repeated() -> None:
    def run() -> Any:
        found = Run(scheme()).go(LONG).found()
        return found.tried, found._clock.laps

    tried, laps = run_ranks(2, run)[0]  # rank 1 has no times
    first = {size: laps.count(size) for size in dict.fromkeys(laps)}
    settled = 2 * online.SETTLE
    for i, (size, measured) in enumerate(tried):
        before = [trial.seconds for trial in tried[:i]]
        if before and measured > 1.5 * online.HOPELESS * min(before):
            assert first[size] < settled / 2 + 3, size
    sizes = [size for size, _ in tried]
    assert sizes.count(sizes[0]) == 2  # it was tried when all was cold
    best = min(tried, key=lambda trial: trial.seconds).megabytes
    assert [size for size, _ in tried].count(best) == 2 or all(
        trial.seconds > online.CLOSE * seconds(best)
        for trial in tried
        if trial.megabytes != best
    )


def test_a_search_is_resumed_with_what_was_tried() -> None:
    def run() -> None:
        for steps in (13, LONG):
            run = Run(scheme("TopK(0.1)")).go(steps)
            state = copy.deepcopy(run.sync.state_dict())
            tried = list(run.found().tried)
            other = Run(scheme("TopK(0.1)"))
            other.sync.load_state_dict(state)
            assert other.found().tried == tried
            assert other.found().done == (steps == LONG)
            # It goes on with the best, not with what was being tried.
            best = other.found().best.megabytes
            assert other.sync.scheme.fusion == other.found().fusion.at(best)
            other.go(LONG)
            assert other.found().done
            assert other.found().tried[: len(tried)] == tried
            whole = Run(scheme("TopK(0.1)")).go(LONG)
            assert other.found().best.megabytes == whole.found().best.megabytes
        # Not with another search's, nor with one among other ranks.
        third = Run(scheme("TopK(0.1)").replace("trials=4", "trials=3"))
        third.sync.load_state_dict(state)
        assert not third.found().tried

    run_ranks(2, run)


def test_what_a_resumed_run_computes_is_the_same() -> None:
    def run() -> None:
        for kind in ("OkTopk(0.05)", "PowerSGD(2)"):
            one = Run(scheme(kind, "DEAR")).go(LONG)
            assert one.found().done
            saved = copy.deepcopy(
                [one.model.state_dict(), one.opt.state_dict(), one.sync.state_dict()]
            )
            other = Run(scheme(kind, "DEAR"))
            for to, state in zip(
                (other.model, other.opt, other.sync), saved, strict=True
            ):
                to.load_state_dict(state)  # type: ignore[attr-defined]
            other.step = one.step
            assert one.go(5).weights() == other.go(5).weights(), kind

    run_ranks(2, run)


def test_another_scheme_ends_a_search_or_begins_one() -> None:
    def run() -> None:
        run = Run(scheme()).go(9)
        run.sync.adopt("Scheme(TopK(0.1), PerTensor(), DEAR)")
        assert run.sync.tuning is None
        run.go(2)
        run.sync.adopt(scheme("TopK(0.1)", "DEAR"))
        assert run.go(LONG).found().done
        run.sync.adopt(scheme("TopK(0.1)"))
        run.go(7).sync.remove()  # in the middle of a search
        gradtide.replicate(run.model, run.opt, "wfbp").remove()

    run_ranks(2, run)


def test_it_says_what_it_tried(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> tuple[str, list[str]]:
        with caplog.at_level(logging.INFO, logger="gradtide"):
            found = Run(scheme()).go(LONG).found()
        return str(found), [record.getMessage() for record in caplog.records]

    (table, lines), (_, silent) = run_ranks(2, run)
    lines = [line for line in lines if "is replicated" not in line]
    assert table.count(" ms\n") == len(lines) - 1
    assert "best: BySize(" in table
    assert "BySize(" in lines[-1]
    assert not silent


def test_of_what_was_tried_twice_the_shorter_time_counts() -> None:
    tried = [Trial(1.0, 3.0), Trial(2.0, 2.5), Trial(2.0, 3.9)]
    found = list(map(best, online._by_size(tried)))
    assert found == [Trial(1.0, 3.0), Trial(2.0, 2.5)]
    assert BySize(1.0) != BySize(2.0)
