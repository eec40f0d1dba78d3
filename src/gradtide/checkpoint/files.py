"""Files that are whole or not there: what ranks save, wherever they save it.

A file is written under another name, brought to the disk, and only then renamed: who is
killed meanwhile leaves the file that was there before. Behind what was saved stands a
line about it, with checksums of both, so that a file that was cut, mixed or changed
since is no file at all. Nothing in it is executed: torch reads it with `weights_only`.

[Note: bytes] Torch writes bytes as a text, in 1.5 times the room, and is slow to read
that. So in a file they are tensors.

A folder is a path, or an address of fsspec's ("s3://..."), which torch requires.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

About: TypeAlias = dict[str, Any]
NEW = ".new"  # behind the name of a file that is being written
# Behind all: how long the state and the line about it are, their checksums, and a mark.
END = struct.Struct("<QIII8s")
MARK = b"gradtide"
PIECE = "gradtide.bytes"  # see [Note: bytes]
LINE = 1 << 12  # bytes that a line may have
UNREADABLE = OSError, ValueError  # what comes of a file that is gone, or not whole


class Writable(Protocol):
    """What torch saves into."""

    def write(self, data: Any, /) -> Any: ...


class Folder:
    """A folder and the files in it. All of it is local."""

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.files, self.root = fsspec.url_to_fs(os.fspath(address))
        self.is_local = isinstance(self.files, LocalFileSystem)

    def path(self, name: str) -> str:
        """Where a file is; for messages, too."""
        return f"{self.root}/{name}" if name else str(self.root)

    def make(self) -> None:
        """Have the folder, if it is local; OSError if nothing can be written in it."""
        if not self.is_local:
            return
        os.makedirs(self.root, exist_ok=True)
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), self.root)

    def write(self, name: str, state: object, about: Mapping[str, Any]) -> None:
        """Write a file; one that is there stays whole until the new one is.

        Raises OSError, with the file's name, or what torch raises for what it cannot
        save.
        """
        with self.new(name) as file:
            write(file, state, about)

    @contextmanager
    def new(self, name: str, ending: str = NEW) -> Iterator[Writable]:
        """What is written becomes the file of that name, if nothing is raised.

        Until then there is a file with another `ending`. OSError has the file's name.
        """
        path = self.path(name)
        parent = self.files._parent(path)
        self.files.makedirs(parent, exist_ok=True)
        try:
            with self._open(f"{path}{ending}", "wb") as file:
                yield file
                if self.is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if self.is_local:
                os.replace(f"{path}{ending}", path)
                for folder in (parent, os.path.dirname(parent)):
                    _sync(folder)
            else:
                self.files.mv(f"{path}{ending}", path)
        except BaseException as error:
            self.remove(f"{name}{ending}")
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = path
            raise

    def about(self, name: str) -> About:
        """What stands behind a file's state, which is not read.

        Raises OSError or ValueError for a file that is not there or not whole.
        """
        with self._open(self.path(name), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            length = min(size, LINE + END.size)
            file.seek(size - length)
            return _split(file.read(length), size)[0]

    def seal(self, name: str) -> tuple[int, bytes]:
        """How long a file is, and its end, which tells it from every other one.

        Raises OSError or ValueError for a file that is not there or not whole.
        """
        with self._open(self.path(name), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - min(size, LINE + END.size))
            end = file.read()
        _, length, _ = _split(end, size)
        return size, end[length - size :]

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """A whole file, in pieces of so many bytes at the most."""
        with self._open(self.path(name), "rb") as file:
            while piece := file.read(size):
                yield piece

    def read(self, name: str) -> bytes:
        """A whole file, to be given to `unpacked`, or sent to another rank."""
        with self._open(self.path(name), "rb") as file:
            data: bytes = file.read()
        return data

    def names(self, under: str = "") -> list[str]:
        """What is in the folder, or in one inside; nothing if that is not there."""
        path = self.path(under)
        self.files.invalidate_cache()
        try:
            found = self.files.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it, if it is there."""
        path = self.path(name)
        if self.is_local and os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)  # others may be about it, too
            return
        with suppress(OSError):
            if self.files.exists(path):
                self.files.rm(path, recursive=True)

    def remove_empty(self, name: str = "") -> None:
        """Remove a folder if nothing is in it."""
        with suppress(OSError):  # other ranks' files are, or another rank was faster
            self.files.rmdir(self.path(name))

    def exists(self, name: str) -> bool:
        """Whether there is such a file, whole or not."""
        return bool(self.files.exists(self.path(name)))

    @contextmanager
    def _open(self, path: str, mode: str) -> Iterator[Any]:
        with open(path, mode) if self.is_local else self.files.open(path, mode) as file:
            yield file


def write(file: Writable, state: object, about: Mapping[str, Any]) -> None:
    """Write a state, and what is said about it."""
    summed: Any = _Summed(file)
    try:
        torch.save(_mapped(state, _as_tensor), summed)
    except RuntimeError:
        if summed.error is not None:  # torch tells of where it was in the file
            raise summed.error from None
        raise
    line = json.dumps(dict(about)).encode()
    end = summed.length, len(line), summed.total, crc32(line), MARK
    file.write(line + END.pack(*end))


def said(seal: bytes, size: int) -> About:
    """What is said at the end of a file of `size` bytes; ValueError if that is no end.

    `seal` is what `Folder.seal` returned.
    """
    return _split(seal, size)[0]


def copy(file: Writable, pieces: Iterable[memoryview], size: int, seal: bytes) -> None:
    """Write what arrives of a file that is `size` bytes long and ends as in `seal`.

    Raises ValueError if it is not that file, whole.
    """
    _, length, total = _split(seal, size)
    summed, end, left = 0, b"", length
    for piece in pieces:
        file.write(piece)
        state, left = piece[:left], left - min(left, len(piece))
        summed, end = crc32(state, summed), end + piece[len(state) :]
    if summed != total or end != seal:
        raise ValueError("it has arrived changed")


def packed(state: object, about: Mapping[str, Any]) -> bytes:
    """The bytes of such a file."""
    buffer = io.BytesIO()
    write(buffer, state, about)
    return buffer.getvalue()


def check(data: bytes) -> tuple[About, memoryview]:
    """What is said about a state, and its bytes; ValueError if it is not whole."""
    about, length, total = _split(data, len(data))
    state = memoryview(data)[:length]
    if crc32(state) != total:
        raise ValueError("it was changed since, or mixed with another one")
    return about, state


def unpacked(data: bytes, name: str) -> tuple[About, Any]:
    """What is said about a state, and the state; ValueError if it is not whole."""
    try:
        about, state = check(data)
        return about, _mapped(loaded(state), _as_bytes)
    except ValueError as error:
        raise ValueError(f"{name} is not whole: {error}") from error


def loaded(state: memoryview | bytes) -> Any:
    """What torch has saved, on the CPU; ValueError for anything else."""
    if bytes(state[:2]) != b"PK":
        raise ValueError("torch has not saved this")
    try:
        return torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds, for many kinds of damage
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all that is in its containers changed, the innermost first."""
    if isinstance(value, dict):
        inner = {key: _mapped(each, change) for key, each in value.items()}
        return change(inner if type(value) is dict else type(value)(inner))
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return change(value)


def _as_tensor(value: Any) -> Any:
    """Bytes as a tensor, see [Note: bytes]."""
    if not isinstance(value, bytes):
        return value
    kind = torch.uint8
    empty = torch.empty(0, dtype=kind, device="cpu")
    held = torch.frombuffer(bytearray(value), dtype=kind) if value else empty
    return {PIECE: held.to(kind)}


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {PIECE}:
        return value
    held = value[PIECE]
    is_piece = isinstance(held, Tensor) and held.dtype == torch.uint8
    return held.contiguous().numpy().tobytes() if is_piece else value


def _split(data: bytes, size: int) -> tuple[About, int, int]:
    """What is said at the end of a file of `size` bytes.

    Beside it how long the state is, and its checksum. ValueError if it is not whole.
    """
    if len(data) < END.size:
        raise ValueError("it is cut")
    length, line, total, sum_of_line, mark = END.unpack_from(data, len(data) - END.size)
    if mark != MARK or length + line + END.size != size:
        raise ValueError("it is cut, or no such file")
    text = bytes(data[len(data) - END.size - line : len(data) - END.size])
    if len(text) != line or line > LINE or crc32(text) != sum_of_line:
        raise ValueError("it was changed since")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ValueError("it says nothing of itself")
    return about, length, total


def is_sealed(data: bytes) -> bool:
    """Whether the last bytes of a file are those of such a one."""
    return data.endswith(MARK)


class _Summed:
    """A file that counts what is written into it, and keeps why it cannot be."""

    def __init__(self, file: Writable) -> None:
        self._file, self.length, self.total = file, 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        self.total = crc32(piece, self.total)
        self.length += len(piece)
        try:
            self._file.write(piece)
        except OSError as error:
            self.error = error
            raise
        return len(piece)

    def flush(self) -> None: ...


def _sync(folder: str) -> None:
    """Bring to the disk which files a folder has."""
    with suppress(OSError):  # some file systems have no such thing
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
