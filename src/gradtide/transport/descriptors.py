"""How many files a process may have open: each connection is one."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

from gradtide.transport.links import LANES

OPEN = Path("/proc/self/fd")
SPARE = 16  # descriptors beside those of connections: stores, doors, Gloo's own
ROOM = 1 << 16  # descriptors that a process asks for: see `short_of`


def short_of(size: int) -> str:
    """What to say if this process may not open what a replica of `size` ranks takes.

    The limit is raised as far as the system lets a process raise its own, also for
    strangers who call at Gloo's port: it keeps a descriptor for each who says anything,
    and ends the process when there are no more.
    """
    if sys.platform == "win32" or not OPEN.exists():
        return ""
    import resource

    needed = (len(LANES) + 2) * (size - 1) + SPARE
    taken = len(os.listdir(OPEN))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(taken + needed, ROOM)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY or taken + needed <= soft:
        return ""
    return (
        f"a replica of {size} ranks takes up to {needed} file descriptors, and of "
        f"{soft} that a process may open {taken} are taken: start it after "
        f"`ulimit -n {max(4096, 4 * soft)}`, or call sync.remove() where a replica has "
        "done its work"
    )


def limit_reads(host: str, port: int, seconds: float) -> None:
    """Have this process's reads from an address fail that take longer.

    Where the system does not tell which files are open it does nothing.
    """
    if sys.platform == "win32" or not OPEN.exists():
        return
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for number in map(int, os.listdir(OPEN)):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family == socket.AF_UNIX:
                    continue
                there, to = found.getpeername()[:2]
                if (there.removeprefix("::ffff:"), to) == (host, port):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def left() -> int:
    """How many more this process may open."""
    if sys.platform == "win32" or not OPEN.exists():
        return ROOM
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir(OPEN))
    return ROOM if soft == resource.RLIM_INFINITY else max(soft - taken, 0)
