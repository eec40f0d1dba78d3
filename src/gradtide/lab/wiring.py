"""The network of an emulated cluster, as a shell script for `ip` and `tc`.

    lab-host0             lab-switch             lab-host1
    eth0 ── tbf ─►            ┌── tbf ─►
         ◄─ tbf ── port0 ── bridge0 ── port1 ◄─ tbf ── eth0

Every link has a token bucket in both directions: what a host sends waits at the host,
what many send to one host waits at the switch's port to it. Nothing is dropped.

[Note: How the links are shaped]

`tbf` is the only shaper that one can rely on; there is no delay to add (no netem), so
a round trip costs 0.04 ms and the links are slow but near.

- *Packets.* With an MTU of 9000 the headers cost 0.7 % (3.9 % with 1500). The stack
  hands over up to 64 KB at once (GSO), which the links pass on whole: per-packet work
  is what fills the CPU when eight hosts share two cores. At low rates 64 KB would keep
  the link from others for milliseconds (5.2 ms at 100 Mb/s), so a packet is limited to
  one millisecond of the link, but not below two MTUs.
- *Burst.* A bucket smaller than a packet makes tbf cut it up in software; a bucket
  larger than what late timers need lets small messages pass for nothing. Two packets,
  or one millisecond, is both enough to reach the full rate and small.
- *Window.* One socket may have 8 ms of the link under way, 256 KB at least: the queue
  is then as long as a switch's would be, not seconds: a small message waits 5 to 9 ms
  behind one that fills the link. It is there from the start, not grown into, so that
  the first step is like the others.
- *Limit.* Never reached: the windows bound the queue. A drop would stop a flow for
  200 ms, and that is what would be measured.
- *Congestion control.* Reno, which every kernel has and allows in a namespace. Without
  drops it only opens its window; BBR paces by its own estimate of the rate and loses
  8 to 17 % when all send to all.

Measured with 8 hosts on 2 cores (busy with other work too), messages of 0.82 s at the
link's rate on each host, times the limit given by the rate alone, median of 5:

    rate                              100 Mb/s   250 Mb/s   1 Gb/s
    all-reduce (Gloo)                   1.013      1.015     1.017
    ring of isend/irecv, 4 segments     1.038      1.032     1.085
    all-to-all, plain sockets           1.029      1.021     1.041
    all-to-all of irecv, then isend     1.039      1.031     1.040
    all-to-all (Gloo's own)             1.45       1.42      1.39

[Note: Inside a host] The ranks of a host talk to each other by its own address, which
the kernel takes over loopback: as fast as the machine is, or, with a local rate,
through a bucket as well, which all of them share.

Gloo's own all-to-all sends before it says what it can receive, so that these words wait
behind its data and links stand idle meanwhile: the loss is Gloo's, not the lab's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradtide.lab.cluster import INTERFACE, Cluster, address, host_name

SWITCH = "lab-switch"  # the namespace that holds the bridge
LOOPBACK_MTU = 9000  # where it is shaped: as between hosts
_LIMIT = 256 << 20  # bytes that may queue; above the sum of all windows
# Named namespaces live in /run/netns, which a user cannot make: the names are then put
# over all of /run.
FOLDER = [
    "if [ -d /run/netns ]; then over=/run/netns; else over=/run; fi",
    'mount -t tmpfs tmpfs "$over"',
]


@dataclass(frozen=True)
class Shape:
    """What a link of `rate` bits/s and the sockets behind it are set to, in bytes."""

    rate: float
    segment: int  # the largest packet that the stack hands to the link
    burst: int  # what an idle link lets pass at once
    window: int  # what one socket may have under way

    def bucket(self, device: str, limit: int = _LIMIT, verb: str = "add") -> str:
        """For `tc`: what the device sends goes through a bucket; bytes may wait."""
        size = f"burst {self.burst} limit {limit}"
        return f"qdisc {verb} dev {device} root tbf rate {self.rate:.0f}bit {size}"


def shape(rate: float, mtu: int) -> Shape:
    """See [Note: How the links are shaped]."""
    millisecond = rate / 8 / 1000
    segment = min(max(millisecond, 2 * mtu, 8192), 65536)
    burst = max(millisecond, 2 * segment)
    window = min(max(8 * millisecond, 256 << 10), 4 << 20)
    return Shape(rate, int(segment), int(burst), int(window))


def setup_script(cluster: Cluster) -> str:
    """Builds the cluster in the mount and user namespaces that it is run in."""
    assert cluster.rate is not None
    link = shape(cluster.rate, cluster.mtu)
    hosts = range(cluster.hosts)
    ports = [f"port{host}" for host in hosts]
    return "\n".join(
        [
            *FOLDER,
            *names(hosts),
            *batch("ip", [f"netns add {n}" for n in [SWITCH, *map(host_name, hosts)]]),
            *batch(f"ip -netns {SWITCH}", _switch(ports, cluster.mtu, link)),
            *batch(f"tc -netns {SWITCH}", map(link.bucket, ports)),
            *(line for host in hosts for line in _host(cluster, host, link)),
        ]
    )


def names(hosts: range) -> list[str]:
    """Gives the addresses names: c10d asks for them, and nobody else can answer."""
    found = [
        f"{mapped}{address(host)} {host_name(host)}"
        for host in hosts
        for mapped in ("", "::ffff:")
    ]
    return [
        "{ cat /etc/hosts || :; cat <<'END'; } > \"$over/hosts\"",
        *found,
        "END",
        'mount --bind "$over/hosts" /etc/hosts',
        'rm "$over/hosts"  # ip takes every file there for a namespace',
    ]


def batch(command: str, lines: Iterable[str]) -> list[str]:
    """The lines as one command's input."""
    return [f"{command} -batch - <<'END'", *lines, "END"]


def _switch(ports: list[str], mtu: int, link: Shape) -> list[str]:
    end = f"mtu {mtu} gso_max_size {link.segment}"
    lines = [f"link add bridge0 mtu {mtu} type bridge"]
    for host, port in enumerate(ports):
        peer = f"name {INTERFACE} {end} netns {host_name(host)}"
        lines.append(f"link add {port} {end} type veth peer {peer}")
        lines.append(f"link set {port} master bridge0 addrgenmode none up")
    return [*lines, "link set bridge0 addrgenmode none up"]


def within(cluster: Cluster) -> tuple[list[str], list[str]]:
    """For `ip` and for `tc`, on a host: what its ranks send each other is shaped.

    It goes over the host's loopback.
    """
    if cluster.local_rate is None:
        return [], []
    link = shape(cluster.local_rate, LOOPBACK_MTU)
    size = f"mtu {LOOPBACK_MTU} gso_max_size {link.segment}"
    return [f"link set lo {size}"], [link.bucket("lo")]


def _host(cluster: Cluster, host: int, link: Shape) -> list[str]:
    name = host_name(host)
    settings = {
        "tcp_congestion_control": "reno",
        "tcp_slow_start_after_idle": "0",  # steps pause between bursts of traffic
        "tcp_no_metrics_save": "1",  # a new socket starts as the first one did
        "tcp_rmem": f"4096 {link.window} {2 * link.window}",
        "tcp_wmem": f"4096 {link.window} {link.window}",
    }
    writes = [f"echo {v} > /proc/sys/net/ipv4/{k}" for k, v in settings.items()]
    loopback, buckets = within(cluster)
    lines = [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none up",
        f"address add {address(host)}/16 dev {INTERFACE}",
        *loopback,
    ]
    return [
        *batch(f"ip -netns {name}", lines),
        *batch(f"tc -netns {name}", [link.bucket(INTERFACE), *buckets]),
        f"ip netns exec {name} sh -ec '{'; '.join(writes)}'",
    ]
