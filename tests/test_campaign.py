"""benchmarks/campaign.py in short, and what it would find wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from threading import Timer
from typing import Any

import pytest

from tests.programs import imported

SHORT = (  # one row of each kind
    "SIGKILL in a first half",
    "SIGSTOP past the timeout in a forward",
    "SIGSTOP and SIGCONT before a request",
    "an exception in a backward",
    "fewer batches, then its end",
    "NaN in a gradient",
    "a parameter edited",
    "another shape",
    "a state that has a changed bit in a piece",
    "a state that is whole",
    "a full disk, which it survives",
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    with imported("campaign", "campaign_faults", "campaign_rank", "soak") as found:
        yield found


@pytest.mark.product
@pytest.mark.waits
@pytest.mark.parametrize("row", SHORT)
def test_a_trial_of_each_kind_ends_as_it_has_to(row: str, program: Any) -> None:
    program.torch.set_num_threads(1)
    (found,) = program.campaign(7, iter([0]), row, float("inf"))
    assert not found["why"], found["scheme"]
    assert found["fault"] == row


def test_a_trial_follows_from_its_seed_and_number(program: Any) -> None:
    trials = [program.draw_trial(3, number) for number in range(200)]
    assert trials == [program.draw_trial(3, number) for number in range(200)]
    assert trials != [program.draw_trial(4, number) for number in range(200)]
    assert len({trial.fault.name for trial in trials}) > 50
    assert {trial.ranks for trial in trials} == {2, 3, 4, 5, 8}
    assert {trial.levels for trial in trials} >= {1, 2, 4}


def told(rank: int, **changed: Any) -> dict[str, Any]:
    """What a rank has told that has ended well."""
    return {"pid": rank, "ended": "done", "at": 1.0, "digest": "a", **changed}


def failed(rank: int, text: str, at: float = 1.0, **changed: Any) -> dict[str, Any]:
    own = {"ended": "error", "kind": "CommunicationError", "text": text}
    return told(rank, at=at, **own, **changed)


GOOD = "rank 1: Mean failed in step 3: rank 0 is gone"


def judged(program: Any, row: str, ranks: list[Any], **changed: Any) -> dict[str, int]:
    drawn = program.draw_trial(0, 0, row)
    trial = replace(drawn, ranks=len(ranks), dead=0, tcp=False)
    job = program.Job(trial, ranks, fault=0.5, **changed)
    quiet = program.Job(trial, [told(rank) for rank in range(len(ranks))])
    found: dict[str, int] = program.judge(job, quiet)["wrong"]
    return found


def test_what_is_wrong_where_ranks_have_to_fail_is_told(program: Any) -> None:
    def wrong(*ranks: Any, **changed: Any) -> dict[str, int]:
        return judged(program, "SIGKILL in a forward", [{}, *ranks], **changed)

    assert wrong(failed(1, GOOD)) == {}
    assert wrong(failed(1, GOOD), {}) == {"unclear": 1}
    assert wrong(failed(1, GOOD), failed(2, GOOD.replace("0", "2"))) == {"unclear": 1}
    assert wrong(failed(1, "rank 1: rank 0 is gone")) == {"unclear": 1}
    assert wrong(failed(1, GOOD, at=9.0)) == {"late": 1}
    assert wrong(failed(1, GOOD), hung=[1]) == {"hung": 1}
    assert wrong(failed(1, GOOD), left=["process 7"]) == {"left": 1}
    assert wrong(failed(1, GOOD, threads=["gradtide 1"])) == {"left": 1}
    assert wrong(told(1, digest="b")) == {"diverged": 1}


def test_what_is_wrong_where_ranks_have_to_go_on_is_told(program: Any) -> None:
    def wrong(*ranks: Any) -> dict[str, int]:
        return judged(program, "SIGSTOP and SIGCONT in a forward", list(ranks))

    assert wrong(told(0), told(1)) == {}
    assert wrong(told(0), told(1, digest="b")) == {"diverged": 1}
    assert wrong(told(0, digest="b"), told(1, digest="b")) == {"diverged": 1}
    assert wrong(failed(0, GOOD), failed(1, GOOD)) == {"stopped": 1}


def test_what_is_wrong_with_a_mistake_is_told(program: Any) -> None:
    def wrong(row: str, *ranks: Any) -> dict[str, int]:
        return judged(program, row, list(ranks))

    words = "parameter a differs between ranks: rank 0 has 3, rank 1 has 4"
    assert wrong("another shape", failed(0, words), failed(1, words)) == {}
    assert wrong("another shape", told(0), told(1)) == {"diverged": 1}
    row = "a state that is a text"
    assert wrong(row, told(0, refused="no"), told(1, refused="rank 0: no")) == {}
    assert wrong(row, told(0, refused="no"), told(1, refused="")) == {"unclear": 1}


def test_a_rank_that_hangs_is_told_with_where_it_is(program: Any) -> None:
    log = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 7 in f\n'
    trial = replace(program.draw_trial(0, 0, "nothing"), ranks=2)
    job = program.Job(trial, [{}, told(1)], hung=[0], logs=[log, ""])
    assert program.judge(job, None)["why"] == ['hung: rank 0 File "a.py", line 7 in f']


def test_links_that_this_machine_cannot_change_are_no_fault_of_ranks(
    program: Any,
) -> None:
    trial = replace(program.draw_trial(0, 0, "1 % of packets lost"), ranks=2)
    logs = ["error: delay and loss need the command iptables-restore\n"]
    job = program.Job(trial, [{}, {}], hung=[0, 1], logs=logs)
    found = program.judge(job, None)
    assert (found["ended"], found["happened"], found["wrong"]) == ("not run", False, {})
    assert "iptables" in found["why"][0]


def test_no_fault_comes_before_all_ranks_have_met(program: Any, tmp_path: Any) -> None:
    """Torch hangs where a rank is lost in `init_process_group`."""
    trial = program.draw_trial(0, 0, "SIGKILL before the first exchange")
    rank_of: Any = sys.modules["campaign_rank"]
    points = rank_of.Points(trial, trial.dead, tmp_path)
    struck: list[bool] = []
    points.strike = lambda: struck.append(program.are_ready(tmp_path, trial.ranks))
    for rank in range(trial.ranks):
        Timer(0.1 * rank, rank_of.note, (tmp_path, f"ready{rank}")).start()
    points.reached("connect")
    assert struck == [True]


@pytest.mark.slow
def test_a_process_knows_for_how_long_it_has_been_there(program: Any) -> None:
    words = "import campaign_rank as c, time; time.sleep(1); print(c.age())"
    folder, begin = program.HERE.parent, time.monotonic()
    told = subprocess.run(
        [sys.executable, "-c", words], cwd=folder, capture_output=True, check=True
    )
    assert 1 <= float(told.stdout) <= time.monotonic() - begin + 0.1


def test_shared_memory_of_other_programs_is_not_left_behind(
    program: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    for name in ("sem.mp-ngi25abz", "torch_25_7_0", "torch_250_25_1"):
        (memory / name).touch()
    real = program.Path
    monkeypatch.setattr(
        program, "Path", lambda name: memory if name == "/dev/shm" else real(name)
    )
    (tmp_path / "tmp").mkdir()
    found = program.left_behind([25], tmp_path / "tmp")
    assert sorted(each for each in found if "memory" in each) == [
        "shared memory torch_250_25_1",
        "shared memory torch_25_7_0",
    ]


@pytest.mark.slow
@pytest.mark.waits
def test_a_soak_in_short(program: Any) -> None:
    found = program.soaks.soak("topka2a(0.1, schedule='local')", 120, 0, 60.0)
    assert [text for text in found["wrong"] if "memory" not in text] == [], found
    assert found["restarts"] == 12


def test_a_soak_tells_what_grew(program: Any) -> None:
    small = {"memory": 1 << 28, "descriptors": 20, "threads": 5, "objects": 9}
    more = {**small, "memory": 1 << 29, "descriptors": 23}
    good = {"digest": "a", "threads": [], "seen": [small] * 8}
    grown = {"digest": "b", "threads": ["gradtide 1"], "seen": [small] * 7 + [more]}
    verdict = program.soaks.verdict
    assert verdict([0, 0], [good, good]) == []
    assert verdict([0, 1], [good, None]) == ["rank 1 ended with 1"]
    apart, threads, *more = verdict([0, 0], [good, grown])
    assert "different parameters" in apart
    assert "gradtide 1" in threads
    assert [text.split()[2] for text in more] == ["memory", "descriptors"]
