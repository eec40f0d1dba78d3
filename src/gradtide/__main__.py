"""`gradtide`, and `python -m gradtide`: the command line, if its extra is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from gradtide.lab.checks import require


def command() -> Callable[[], None]:
    """What was asked for, loaded; exit with status 2, and say why, where it cannot be.

    See `gradtide_command`, which is what pip installs a script for.
    """
    if sys.argv[1:2] == ["run"]:  # on every worker, perhaps: it needs no extra
        from gradtide import run

        return partial(run.main, sys.argv[2:])
    try:
        require("cli", "typer", "rich")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from gradtide.cli import app

    return app


def main() -> None:
    """Run the command line."""
    command()()


if __name__ == "__main__":
    main()
