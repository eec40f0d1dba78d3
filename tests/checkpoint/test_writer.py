"""A thread writes, one save after the other; what all ranks have stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gradtide.checkpoint.files import Folder
from gradtide.checkpoint.writer import Writer, kept


def test_the_newest_whole_ones_and_those_to_come() -> None:
    saved = [(0, 3), (1, 6), (2, 9), (3, 12)]
    assert kept(saved, 2, 1) == {9, 12}
    assert kept(saved, 2, 2) == {6, 9, 12}
    assert kept(saved, 0, 2) == {3, 6, 9, 12}
    assert kept([], 0, 2) == set()


def about(step: int) -> dict[str, Any]:
    return {"run": "a", "size": 1, "rank": 0, "step": step}


def test_saves_follow_each_other_in_the_background(tmp_path: Path) -> None:
    folder, go = Folder(tmp_path), threading.Event()
    write = folder.write

    def slow(*arguments: Any) -> None:
        go.wait()
        write(*arguments)

    folder.write = slow  # type: ignore[method-assign]
    writer = Writer(folder, 0, keep=1)
    assert (writer.begun, writer.torn, writer.failures) == (0, 0, 0)
    writer.save(about(3), {"rank": {}})
    assert (writer.begun, writer.torn) == (1, 1)
    go.set()
    writer.wait()
    assert (writer.begun, writer.torn) == (1, 0)
    writer.save(about(6), {"rank": {}, "common": {}})
    writer.close()
    assert folder.names() == ["step-3", "step-6"]
    assert folder.names("step-6") == ["common0.pt", "rank0.pt"]


def test_what_fails_is_counted_with_its_reason(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    writer = Writer(folder, 0, keep=1)
    (tmp_path / "step-3").write_text("in the way")
    writer.save(about(3), {"rank": {}})
    writer.wait()
    assert (writer.torn, writer.failures) == (1, 1)
    assert "FileExistsError" in writer.reasons[0]
    writer.save(about(6), {"rank": {}})
    writer.wait()
    assert (writer.torn, writer.failures) == (0, 1)
    writer.close()
    with pytest.raises(RuntimeError):
        writer.save(about(9), {})


def test_what_is_not_to_stay_goes_when_all_have_a_later_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    writer = Writer(folder, 0, keep=1)
    for step in (3, 6, 9):
        writer.save(about(step), {"rank": {}})
    (tmp_path / "step-4").mkdir()  # of an interrupted run
    (tmp_path / "notes").mkdir()
    writer.confirm(2)
    writer.confirm(1)
    writer.save(about(12), {"rank": {}})
    writer.wait()
    assert folder.names() == ["notes", "step-12", "step-6", "step-9", "whole0.pt"]
    writer.give_up()  # the last one has failed somewhere
    writer.save(about(15), {"rank": {}})
    writer.confirm(5)
    writer.close()
    assert folder.names() == ["notes", "step-15", "whole0.pt"]


def test_saves_that_fail_elsewhere_do_not_fill_the_folder(tmp_path: Path) -> None:
    """What a neighbour has there of such a step is the neighbour's to remove."""
    folder = Folder(tmp_path)
    writer = Writer(folder, 0, keep=1)
    writer.save(about(3), {"rank": {}, "common": {}})
    writer.confirm(1)
    for step in range(6, 60, 3):
        writer.save(about(step), {"rank": {}, "common": {}})
        if step == 6:
            writer.wait()
            (tmp_path / "step-6" / "rank1.pt").write_text("another's")
        writer.give_up()
    writer.close()
    assert folder.names() == ["step-3", "step-54", "step-57", "step-6", "whole0.pt"]
    assert folder.names("step-6") == ["rank1.pt"]


def test_what_was_given_up_and_turns_out_whole_stays(tmp_path: Path) -> None:
    """It had begun when all heard of the one that had failed."""
    folder = Folder(tmp_path)
    writer = Writer(folder, 0, keep=1)
    for step in (3, 6, 9):
        writer.save(about(step), {"rank": {}})
    writer.confirm(1)
    writer.give_up()  # as 6 has failed
    writer.confirm(3)
    for step in (12, 15, 18):
        writer.save(about(step), {"rank": {}})
        writer.give_up()
    writer.close()
    assert folder.names() == ["step-15", "step-18", "step-9", "whole0.pt"]
