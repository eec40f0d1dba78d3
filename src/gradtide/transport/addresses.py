"""This host's interfaces, and the address that Gloo takes of them.

[Note: Gloo's choice] torch has Gloo listen at the interfaces in GLOO_SOCKET_IFNAME.
Without that, it is the first address that the host's own name stands for, if it is one
of this host's, and else the loopback. Debian's installer lets the name stand for
127.0.1.1 in /etc/hosts: every rank then offers the others an address that leads back to
themselves. (Guard: tests/transport/test_addresses.py, beside what Gloo connects to.)
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GLOO_SOCKET_IFNAME"
ASKED = 0x8915  # SIOCGIFADDR of Linux
SIXES = Path("/proc/net/if_inet6")
GLOBAL = "00"  # the scope of an address that leads to other hosts
LINK = "20"  # of one that leads to those on the same link
LOOPBACK = "127.0.0.1"
INSIDE = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")


@dataclass(frozen=True)
class Chosen:
    """What Gloo takes, and why; without an address there is an `error`."""

    address: str
    interface: str
    why: str
    error: str = ""


def interfaces() -> dict[str, str]:
    """An address of each interface that has one: IPv4, or IPv6 where it has no other.

    Empty where the system does not tell (it is not Linux).
    """
    try:
        import fcntl
    except ImportError:
        return {}
    found = _sixes(GLOBAL)
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), ASKED, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _sixes(scope: str) -> dict[str, str]:
    if not SIXES.exists():
        return {}
    rows = (line.split() for line in SIXES.read_text().splitlines())
    return {
        row[5]: str(ipaddress.IPv6Address(bytes.fromhex(row[0])))
        for row in rows
        if row[3] == scope
    }


def chosen(there: dict[str, str] | None = None) -> Chosen:
    """What Gloo takes on this host, see [Note: Gloo's choice]."""
    there = interfaces() if there is None else there
    asked = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if asked:
        near = _sixes(LINK)
        missing = [name for name in asked if name not in there and name not in near]
        if missing and there:
            error = (
                f"{VARIABLE} names {', '.join(missing)}, which this host does not have "
                f"(it has {', '.join(f'{at} {there[at]}' for at in sorted(there))})"
            )
            return Chosen("", missing[0], VARIABLE, error)
        name = asked[0]
        address = there.get(name) or (f"{near[name]}%{name}" if name in near else "")
        return Chosen(address or LOOPBACK, name, VARIABLE)
    name = socket.gethostname()
    for address in _resolved(name):
        if _is_own(address):
            return Chosen(address, _holder(address, there), f"what {name} stands for")
    why = f"{name} stands for no address of this host"
    return Chosen(LOOPBACK, _holder(LOOPBACK, there), why)


def loops(address: str) -> bool:
    """Whether an address leads nowhere but to the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def public(there: dict[str, str]) -> dict[str, str]:
    """The addresses of this host that are of no private network, and their interfaces.

    Private are also those that tunnels and providers share out (100.64.0.0/10), and
    those that are valid on a link or this host alone. `there` are the `interfaces`; an
    interface with an IPv4 address may have one of IPv6 besides.
    """
    found = [*there.items(), *_sixes(GLOBAL).items()]
    return {at: name for name, at in found if ipaddress.ip_address(at).is_global}


def from_here(address: str) -> str:
    """An address as this host calls it: one that is valid on a link names that link."""
    bare, _, link = address.partition("%")
    return f"{bare}%{chosen().interface}" if link else bare


def outward(there: dict[str, str]) -> dict[str, str]:
    """The interfaces that may lead to other hosts, by their names."""
    return {name: at for name, at in there.items() if not name.startswith(INSIDE)}


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(each[4][0]) for each in found]


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        try:
            trying.bind((address, 0))
        except OSError:
            return False
    return True


def _holder(address: str, there: dict[str, str]) -> str:
    """The interface that has an address; the loopback has more than it lists."""
    known = {at: name for name, at in there.items()}
    return known.get(address, "lo" if loops(address) else "?")
