"""Checked before anything is measured: where results go, and packages of extras."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path


def require(extra: str, *packages: str) -> None:
    """Raise ValueError, with what to install, where one of `packages` is missing.

    They are names to import, and those of an extra of gradtide. Nothing is imported.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"this needs {' and '.join(missing)}: pip install 'gradtide[{extra}]'"
        )


def check_file(option: str, path: Path) -> None:
    """Raise ValueError where a file cannot be written; leaves nothing behind.

    `option` is what the user gave it by, such as --out.
    """
    with _told(option, path, "name a file in a folder that is there"):
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists():
            if not os.access(path, os.W_OK):
                raise PermissionError(None, "it is not yours to write")
        else:
            path.open("xb").close()
            path.unlink()


def check_folder(option: str, path: Path) -> None:
    """Raise ValueError where a folder cannot be made, or nothing be written into it.

    `option` is what the user gave it by. Leaves nothing behind.
    """
    with _told(option, path, "choose another folder"):
        made = [each for each in (path, *path.parents) if not each.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        finally:
            for each in made:  # the innermost first
                with suppress(OSError):
                    each.rmdir()


@contextmanager
def _told(option: str, path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}): {remedy}"
        ) from None
