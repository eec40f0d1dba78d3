"""What takes the place of a replica in copies."""

from __future__ import annotations

from typing import Any


class Unlinked:
    """What a copy has in the place of a `Replica`: of a model that holds its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this is a copy of a Replica, or was loaded from a pickle, and "
            "has no link to the other ranks: call replicate() for the copied model; "
            "what a run needs to go on is saved by sync.state_dict()"
        )
