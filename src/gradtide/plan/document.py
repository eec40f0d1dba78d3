"""What a profile writes and a planner reads: JSON that says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Document:
    """A kind of file; `noun` is what users call it, `command` makes one."""

    noun: str
    format: str
    version: int
    command: str

    def save(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write `content`, which has JSON's types."""
        head = {"format": self.format, "version": self.version}
        path.write_text(json.dumps({**head, **content}, indent=1) + "\n", "utf-8")

    def read(self, path: Path) -> dict[str, Any]:
        """What was saved; `ValueError` says what is wrong with the file."""
        found = read_json(path, self.noun)
        if not isinstance(found, dict) or found.pop("format", None) != self.format:
            raise ValueError(f"{path} is no {self.format}: {self.remedy(path)}")
        if (version := found.pop("version", None)) != self.version:
            raise ValueError(
                f"{path} has version {version} of the format, this gradtide reads "
                f"{self.version}: {self.remedy(path)}"
            )
        return found

    def remedy(self, path: Path) -> str:
        return f"make one with `{self.command} --out {path}`"


def read_json(path: Path, noun: str) -> Any:
    """What a file holds; `ValueError` if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the {noun} {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
