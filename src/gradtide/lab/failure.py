"""How a run in the lab ends when it does not end well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class LabError(RuntimeError):
    """A rank failed; or, with `rank` and `code` None, the lab or the time ran out.

    `what` says it in one line, `lines` are the last ones that the rank wrote.
    """

    def __init__(
        self,
        what: str,
        rank: int | None = None,
        code: int | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        super().__init__("\n".join([what, *lines]))
        self.what, self.rank, self.code, self.lines = what, rank, code, tuple(lines)
