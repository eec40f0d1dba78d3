"""Packages that only an extra installs: what to say where they are missing."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *packages: str) -> None:
    """Raise ValueError, with what to install, where one of `packages` is missing.

    They are names to import, and those of an extra of gradtide. Nothing is imported, so
    a command asks before it measures anything.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"this needs {' and '.join(missing)}: pip install 'gradtide[{extra}]'"
        )
