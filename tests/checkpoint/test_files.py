"""Files are whole or not there, and nothing of what is in them is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import runpy
import sys
import zipfile
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks

from gradtide.checkpoint import files
from gradtide.checkpoint.files import END, NEW, Folder

MUTATIONS = Path(__file__).parents[2] / "benchmarks" / "mutations.py"
STATE = {"x": torch.arange(300.0), "n": 3, "text": "ä"}
ABOUT = {"step": 7, "run": "a", "size": 2, "rank": 1, "kind": "rank"}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for address in (tmp_path / "new" / "folder", "memory://checkpoints"):
        folder = Folder(address)
        assert folder.names() == []
        folder.write("step-7/rank1.pt", STATE, ABOUT)
        assert folder.names() == ["step-7"]
        assert folder.names("step-7") == ["rank1.pt"]
        assert folder.about("step-7/rank1.pt") == ABOUT
        data = folder.read("step-7/rank1.pt")
        about, state = files.unpacked(data, "rank1.pt")
        assert about == ABOUT
        assert torch.equal(state.pop("x"), STATE["x"])
        assert state == {"n": 3, "text": "ä"}
        assert files.packed(STATE, ABOUT) == data
        folder.remove("step-7")
        folder.remove("step-7")
        assert folder.names() == []


def test_what_fails_while_it_is_written_leaves_what_was_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a.pt", STATE, ABOUT)

    class Full:
        def __reduce__(self) -> Any:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.write("a.pt", {"x": torch.ones(99), "y": Full()}, {})
    assert folder.names() == ["a.pt"]
    assert folder.about("a.pt") == ABOUT


@pytest.mark.parametrize("room", [0, 5000, 9000])
def test_a_full_disk_is_called_so(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own words are those of where it was in the file."""

    class Disk(io.BytesIO):
        def write(self, data: Any, /) -> int:
            if self.tell() + len(data) > room:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            return super().write(data)

    folder = Folder(tmp_path)
    monkeypatch.setattr(folder, "_open", lambda *_: Disk())
    words = r"No space left on device: '.*a\.pt'"
    with pytest.raises(OSError, match=words):
        folder.write("a.pt", {"x": torch.ones(1000), "y": torch.ones(1000)}, ABOUT)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/inside"):
        Folder(tmp_path / "file" / "inside").make()
    Folder(tmp_path / "new" / "folder").make()
    assert (tmp_path / "new" / "folder").is_dir()


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(number: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{number}").removeprefix(str(tmp_path)))
        fsync(number)

    def noted_replace(old: str, new: str) -> None:
        done.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    Folder(tmp_path).write("step-7/rank1.pt", STATE, ABOUT)
    assert done == [f"/step-7/rank1.pt{NEW}", "renamed", "/step-7", ""]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def grown(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes(rng.randrange(1, 99)) + data[at:]


def mixed(data: bytes, rng: random.Random) -> bytes:
    other = files.packed({**STATE, "x": torch.ones(300)}, {**ABOUT, "step": 8})
    assert len(other) == len(data)
    odd = [i for i in range(len(data)) if data[i] != other[i]]
    at = rng.randrange(odd[0] + 1, odd[-1] + 1)
    return data[:at] + other[at:]


@pytest.mark.parametrize("harm", [cut, flipped, grown, mixed])
def test_what_is_not_whole_is_a_value_error(
    harm: Callable[[bytes, random.Random], bytes],
) -> None:
    data = files.packed(STATE, ABOUT)
    for seed in range(500):
        odd = harm(data, random.Random(seed))
        with pytest.raises(ValueError, match=r"rank1\.pt is not whole"):
            files.unpacked(odd, "rank1.pt")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def sealed(state: bytes, about: bytes = b"{}") -> bytes:
    from zlib import crc32

    end = len(state), len(about), crc32(state), crc32(about), files.MARK
    return state + about + END.pack(*end)


def test_nothing_in_a_file_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = io.BytesIO()
    torch.save({"x": Evil()}, archive)
    legacy = io.BytesIO()
    torch.save({"x": Evil()}, legacy, _use_new_zipfile_serialization=False)
    bare = io.BytesIO()
    with zipfile.ZipFile(bare, "w") as plain:
        plain.writestr("archive/data.pkl", pickle.dumps(Evil()))
    loaded = set(sys.modules)
    for state in (archive, legacy, bare, io.BytesIO(b""), io.BytesIO(b"PK")):
        with pytest.raises(ValueError, match="x is not whole"):
            files.unpacked(sealed(state.getvalue()), "x")
    assert not Path("executed").exists()
    assert not {m for m in set(sys.modules) - loaded if not m.startswith("torch")}


@pytest.mark.parametrize("about", [b"", b"[]", b"{", b"nan", b"\xff", b"[" * 99_999])
def test_a_line_that_is_none_is_a_value_error(about: bytes, tmp_path: Path) -> None:
    data = sealed(b"PK", about)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="x is not whole"):
        files.unpacked(data, "x")
    with pytest.raises(ValueError, match="it"):
        Folder(tmp_path).about("x")


def test_a_long_line_is_not_read() -> None:
    with pytest.raises(ValueError, match="x is not whole"):
        files.unpacked(sealed(b"PK", json.dumps({"a": "b" * (1 << 21)}).encode()), "x")


def test_bytes_take_their_own_room() -> None:
    noise = random.Random(0).randbytes(100_000)
    data = files.packed({"piece": noise}, {})
    assert len(data) < 102_000
    assert files.unpacked(data, "x")[1] == {"piece": noise}


def test_any_saved_run_is_loaded_or_refused_at_once_and_imports_nothing() -> None:
    """By a rank of its own, as what is mutated trains."""

    def survey() -> dict[str, Any]:
        found = runpy.run_path(str(MUTATIONS))["survey_states"](2500, seed=1)
        return {key: found[key] for key in ("outcomes", "wrong", "imported")}

    (found,) = run_ranks(1, survey)
    assert not found["wrong"]
    assert not found["imported"]
    assert found["outcomes"].keys() == {"ValueError", "loaded", "whole"}
