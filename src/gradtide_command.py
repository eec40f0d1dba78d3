"""The command `gradtide`: Ctrl-C while torch is loaded ends it without a traceback.

This is no module of the package, for whatever of that is imported loads torch first.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Load the command line, and run it. A SIGINT before is the end: nothing has begun.

    Who started it may have SIGINT ignored, or handled: that is left as it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    from gradtide.__main__ import command

    run = command()
    signal.signal(signal.SIGINT, before)
    run()
