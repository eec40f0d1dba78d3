"""A race of a script that prints its losses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gradtide.lab.cluster import LabError
from gradtide.lab.race.script import LOSS, check_contestant, command, points, race
from gradtide.lab.spec import RaceSpec
from gradtide.scheme import parse

SCRIPT = """
import os, sys, time
assert not os.environ["GRADTIDE_SCHEME"]
name, rank = sys.argv[1], int(os.environ["RANK"])
for step in range(10000):
    time.sleep(0.01 if name == "dear" else 0.1)
    print(f"step {step} loss: {(1 if rank else 5) / (1 + step):.4f}", flush=True)
"""


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("step 3, loss: 1.25", "1.25"),
        ("step=3 loss=2e-3 lr=0.1", "2e-3"),
        ("{'loss': 3.5, 'grad_norm': 1}", "3.5"),
        ("Loss 4", "4"),
        ("closs 4", None),
        ("loss is nan", None),
    ],
)
def test_losses_are_found_in_what_scripts_print(line: str, loss: str | None) -> None:
    found = re.search(LOSS, line, re.IGNORECASE)
    assert (found and found[1]) == loss


def test_a_look_is_the_mean_of_several_losses() -> None:
    seen = [(10.0 + i, 6.0 - i) for i in range(5)]
    first, second = points(seen, 2)
    assert first == (1.0, 2, 0.0, 5.5)
    assert second == (3.0, 4, 0.0, 3.5)


def test_what_is_started() -> None:
    here = sys.executable
    taken = command("dear", ["train.py", "--scheme={scheme}"])
    assert taken == [here, "train.py", "--scheme=dear"]
    assert command("ddp", ["train.py"]) == [here, "train.py"]
    run = [here, "-m", "gradtide", "run", "--scheme", "dear", "--", "train.py"]
    assert command("dear", ["train.py"]) == run


def test_a_hook_of_ddp_is_the_scripts_own_business() -> None:
    check_contestant("ddp", None, ["train.py"])
    check_contestant("dear", parse("dear"), ["train.py"])
    check_contestant("ddp(wire='bf16')", None, ["train.py", "{scheme}"])
    with pytest.raises(ValueError, match="which the script itself"):
        check_contestant("ddp(wire='bf16')", None, ["train.py"])


@pytest.mark.waits
def test_who_prints_low_losses_sooner_is_sooner_and_all_are_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spec = RaceSpec(("ddp", "dear"), "script:train.py", 2, 1, None, 2.0, every=2)
    words = [str(tmp_path / "train.py"), "{scheme}"]
    race(spec, words, LOSS, tmp_path / "out", ["gradtide", "race"], resume=False)
    told = json.loads((tmp_path / "out" / "record.json").read_text())
    ddp, dear = told["results"]
    assert dear["times_sooner"]["median"] > 1.5
    assert ddp["course"]["steps"][-1] < 50  # of 10000
    # Rank 0's: another rank's are lower.
    assert ddp["course"]["loss"][0] == pytest.approx((5 + 2.5) / 2)


def test_a_script_without_losses_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("print('done')")
    spec = RaceSpec(("ddp",), "script:quiet.py", 2, 1, None, 2.0, every=2)
    with pytest.raises(LabError, match="0 losses in the lines of rank 0"):
        race(spec, [str(tmp_path / "quiet.py")], LOSS, tmp_path / "o", [], False)


@pytest.mark.parametrize(
    ("pattern", "words"), [("loss=(", "no regular"), ("loss", "into a group")]
)
def test_what_finds_no_number_is_refused(
    pattern: str, words: str, tmp_path: Path
) -> None:
    spec = RaceSpec(("ddp",), "script:x.py", 2, 1, None, 2.0, every=2)
    with pytest.raises(ValueError, match=words):
        race(spec, ["x.py"], pattern, tmp_path / "o", [], False)
