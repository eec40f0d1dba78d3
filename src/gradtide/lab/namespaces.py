"""Carries out a cluster's plan with kernel namespaces, and undoes it whatever happens.

[Note: Nothing is left behind]

One holder process is process 1 of a process namespace and owns a private mount
namespace in which the hosts' network namespaces have their names. So nothing shows on
the machine, two labs cannot meet, and there is nothing stale to sweep up: the holder
reads from a pipe, and when the launcher ends in any way (SIGKILL too) the pipe closes,
the holder ends, and the kernel kills every process of the lab and drops its networks.
Guarded by tests/lab/test_endings.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from gradtide.lab import delayer
from gradtide.lab.cluster import Cluster, LabError, host_name
from gradtide.lab.router import ROUTER, delays, needs_rules, routed_script
from gradtide.lab.wiring import setup_script

# A host; None is the router.
Enter: TypeAlias = Callable[[int | None], list[str]]

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
# With a network of its own although it uses none: `ip` comes back to it from each that
# it makes, and a user may not come back to the machine's.
_NEW = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
_AS_USER = ("--user", "--map-root-user")
# The first line runs while /proc is still the machine's, and so learns the holder's
# process id as the launcher sees it.
_HOLDER = """read -r self rest < /proc/self/stat
mount -t proc proc /proc
{setup}
{hold}
"""
_HOLD = """echo "ready $self"
exec cat > /dev/null"""
# It says itself when it is ready, and ends with its input, too.
_DELAY = f"""exec nsenter --net=/run/netns/{ROUTER} {{command}} "$self" {{delays}}"""


@contextmanager
def networks(cluster: Cluster) -> Iterator[Enter]:
    """Builds the cluster; gives the words that start a command on a host of it.

    On loopback, where nothing is slowed down, there is nothing to build.
    """
    if cluster.rate is None:
        yield lambda host: []
        return
    _check_tools(cluster)
    holder, inside = _hold(_script(cluster))
    try:
        yield lambda host: [
            *(*inside, "ip", "netns", "exec"),
            ROUTER if host is None else host_name(host),
        ]
    finally:
        holder.kill()  # takes the holder with it (--kill-child), and that all others
        holder.communicate()


def _check_tools(cluster: Cluster) -> None:
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        raise LabError(
            f"the lab needs the commands {', '.join(missing)}: install iproute2 and "
            "util-linux, or use --rate none to run on loopback"
        )
    internet = cluster.internet
    if internet and needs_rules(internet) and not shutil.which("iptables-restore"):
        raise LabError(
            "delay and loss need the command iptables-restore: install iptables, or "
            "leave out --delay, --jitter, --loss, and events of links"
        )


def _script(cluster: Cluster) -> str:
    """What the holder does: builds the cluster, and keeps it until its input ends."""
    internet = cluster.internet
    if internet is None:
        return _HOLDER.format(setup=setup_script(cluster), hold=_HOLD)
    hold = _HOLD
    if told := delays(internet):
        command = shlex.join([sys.executable, "-I", "-S", delayer.__file__])
        hold = _DELAY.format(command=command, delays=shlex.quote(told))
    return _HOLDER.format(setup=routed_script(cluster, internet), hold=hold)


def _hold(script: str) -> tuple[subprocess.Popen[str], list[str]]:
    """What keeps the holder, and the words that start a command beside it."""
    refusal = ""
    for user in (False, True) if os.geteuid() == 0 else (True,):
        holder = subprocess.Popen(
            [*_NEW, *(_AS_USER if user else ()), "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        assert holder.stdout is not None
        word, _, target = holder.stdout.readline().partition(" ")
        if word == "ready":
            beside = ["--user", "--preserve-credentials"] if user else []
            beside += ["--mount", "--pid", "--wd", f"--target={target.strip()}"]
            return holder, ["nsenter", *beside]
        refusal = " / ".join(holder.communicate()[1].split("\n")).strip(" /")
    raise LabError(
        f"this machine refuses the namespaces that the lab needs ({refusal}): run as "
        "root, allow user namespaces (sysctl user.max_user_namespaces and "
        "kernel.apparmor_restrict_unprivileged_userns), or use --rate none to run on "
        "loopback"
    )
