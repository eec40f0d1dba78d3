"""An emulated cluster whose hosts are far from each other, as a shell script.

    lab-host0                 lab-internet                    lab-host1
    eth0 ─► port0 ─ up0 ── tbf ─► mid0 ─ delay, loss ─ port1 ── tbf ─► eth0

Hosts are not on one switch but behind a router, which passes what a host sends on
through a queue of the host's own (`up`), delays and loses packets by where they come
from and go to, and puts them into the queue of the host that they go to (`port`).

[Note: How distance is emulated]

- *Queues.* A queue holds `Internet.queue` seconds of its link, as a router's does, and
  loses what comes on top: senders then find out by themselves how much fits, which is
  what costs them time on a real way. Hosts do not feel the queues: as the packets pass
  the router, they are no longer the sending socket's (on a switch they are, and Linux
  keeps a socket from filling what it knows to be its own queue).
- *Sockets.* Hosts have what a kernel as it is shipped gives them: windows that grow
  with use, slow starts after a pause, Cubic where there is one. A connection has up to
  some 3 MB under way: 600 Mb/s at 40 ms, 120 Mb/s at 200 ms.
- *Packets* have 1500 bytes unless told otherwise. As between the hosts of a switch,
  they travel in bundles of a millisecond of the link, two packets at least, to save
  CPU. Where packets are lost, each is alone, so that one that is lost is one.
- *Delay* is half there and half back. Packets wait in a queue of the kernel's for the
  verdict of `delayer`, one queue for all paths that are alike: what is in one leaves in
  the order of coming.
- *Jitter* is different for every packet, evenly distributed. Since none overtakes the
  one before it, a dense stream is later rather than earlier. It has a queue for each
  pair of hosts.
- *Loss* is the kernel's, by chance, one packet independently of the other.
- *Addresses.* The two ends of a link have the same hardware address: whatever is sent
  arrives, without anybody having asked for it first.
"""

from __future__ import annotations

import json
from dataclasses import replace

from gradtide.lab.cluster import INTERFACE, NETWORK, Cluster, address, host_name
from gradtide.lab.events import Cut, OfLink
from gradtide.lab.internet import Internet, Path
from gradtide.lab.wiring import FOLDER, batch, names, shape, within

ROUTER = "lab-internet"  # the namespace
_TABLE = 1000  # from here on: by host, where to what it sends goes first
# Of the router, and of hosts what a kernel as it is shipped has, however this machine
# has been set.
_FORWARD = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}
_SHIPPED = {
    "tcp_rmem": "4096 131072 6291456",
    "tcp_wmem": "4096 16384 4194304",
    "tcp_slow_start_after_idle": "1",
    "tcp_no_metrics_save": "0",
}
# A namespace may not choose Cubic for all of its sockets where its machine has chosen
# another; it may for a route.
_CONTROL = """found=/proc/sys/net/ipv4/tcp_available_congestion_control
if grep -qw cubic "$found"; then control="congctl cubic"; else control=; fi"""


def routed_script(cluster: Cluster, internet: Internet) -> str:
    """Builds the cluster in the mount and user namespaces that it is run in."""
    hosts = internet.hosts
    spaces = [f"netns add {name}" for name in [ROUTER, *map(host_name, hosts)]]
    routes = [line for host in hosts for line in _routes(cluster, internet, host)]
    buckets = [line for host in hosts for line in _buckets(cluster, internet, host)]
    return "\n".join(
        [
            *FOLDER,
            *names(hosts),
            *batch("ip", spaces),
            _set(ROUTER, _FORWARD),
            *batch(f"ip -netns {ROUTER}", routes),
            *batch(f"tc -netns {ROUTER}", buckets),
            *_rules(internet),
            _CONTROL,
            *(line for host in hosts for line in _host(cluster, host)),
        ]
    )


def queues(internet: Internet) -> dict[tuple[int, int], int]:
    """By pair of hosts, the number of the queue in which packets wait.

    Pairs that are as far from each other share one, unless the distance varies.
    """
    numbers: dict[object, int] = {}
    found = {}
    for pair, path in internet.paths().items():
        if path.delay:
            alike = pair if path.jitter else path.delay
            found[pair] = numbers.setdefault(alike, len(numbers))
    return found


def delays(internet: Internet) -> str:
    """What `delayer` is told: by queue, the seconds of a way, and how they vary.

    Empty where nothing is delayed.
    """
    found = {}
    for pair, number in queues(internet).items():
        path = internet.path(*pair)
        found[number] = round(path.delay / 2, 9), round(path.jitter / 2, 9)
    return json.dumps(found) if found else ""


def needs_rules(internet: Internet) -> bool:
    """Whether packets are delayed or lost, which takes iptables."""
    return internet.cut or any(
        path.delay or path.loss for path in internet.paths().values()
    )


def changed(cluster: Cluster, internet: Internet, change: OfLink) -> list[str]:
    """The lines of a shell, in the router's namespace, that change a link."""
    port, up = f"port{change.host}", f"up{change.host}"
    if isinstance(change, Cut):
        chains = f"PREROUTING -i {port}", f"FORWARD -o {port}"
        how = "-I" if change.down else "-D"
        return [f"iptables -w -t mangle {how} {chain} -j DROP" for chain in chains]
    rates = (port, change.rate), (up, change.up)
    return [f"tc {_bucket(cluster, internet, *of, 'change')}" for of in rates]


def _set(name: str, settings: dict[str, str]) -> str:
    """Writes settings of a namespace's network."""
    writes = [f"echo {v} > /proc/sys/net/ipv4/{k}" for k, v in settings.items()]
    return f"ip netns exec {name} sh -ec '{'; '.join(writes)}'"


def _routes(cluster: Cluster, internet: Internet, host: int) -> list[str]:
    """A host's link, and the way of its packets through the router."""
    bundle = f"gso_max_size {shape(internet.links[host].sends, cluster.mtu).segment}"
    if internet.loses:
        bundle = "gso_max_segs 1"
    ends = f"address 02:00:00:00:00:{host:02x} mtu {cluster.mtu}"
    own = f"address 02:00:00:00:01:{host:02x} mtu {cluster.mtu}"
    peer = f"name {INTERFACE} {ends} {bundle} netns {host_name(host)}"
    port, up, middle = f"port{host}", f"up{host}", f"mid{host}"
    up_now = "arp off addrgenmode none up"
    return [
        f"link add {port} {ends} type veth peer {peer}",
        f"link add {up} {own} type veth peer name {middle} {own}",
        *(f"link set {device} {up_now}" for device in (port, up, middle)),
        f"route add {address(host)} dev {port}",
        f"route add default dev {up} table {_TABLE + host}",
        f"rule add iif {port} lookup {_TABLE + host}",
    ]


def _buckets(cluster: Cluster, internet: Internet, host: int) -> list[str]:
    """The two queues of a host's link."""
    link = internet.links[host]
    rates = (f"port{host}", link.rate), (f"up{host}", link.sends)
    return [_bucket(cluster, internet, *of) for of in rates]


def _bucket(
    cluster: Cluster, internet: Internet, device: str, rate: float, verb: str = "add"
) -> str:
    shaped = shape(rate, cluster.mtu)
    limit = max(internet.queue * rate / 8, 2 * shaped.segment)
    burst = shaped.burst
    if verb == "change":
        # What waits may be larger than the new bucket, in front of which it would stay
        # for ever: hosts bundle packets as it suited their links at first.
        bundles = (shape(link.sends, cluster.mtu).burst for link in internet.links)
        burst = max(burst, *bundles)
    return replace(shaped, burst=burst).bucket(device, max(int(limit), burst), verb)


def _rules(internet: Internet) -> list[str]:
    """Who loses packets on which way, and where they wait."""
    if not needs_rules(internet):
        return []
    waits, paths = queues(internet), internet.paths()
    ways = {pair: _way(path, waits.get(pair)) for pair, path in paths.items()}
    lines: list[str] = []
    if len({tuple(way) for way in ways.values()}) == 1:
        lines = [f"-A PREROUTING -i mid+ {part}" for part in next(iter(ways.values()))]
    else:
        for host in internet.hosts:
            lines += [f":from{host} -", f"-A PREROUTING -i mid{host} -j from{host}"]
        for (sender, receiver), way in ways.items():
            to = f"-A from{sender} -d {address(receiver)}"
            lines += [f"{to} {part}" for part in way]
    # Chains are named before they are used.
    lines.sort(key=lambda line: not line.startswith(":"))
    command = f"ip netns exec {ROUTER} iptables-restore <<'END'"
    return [command, "*mangle", *lines, "COMMIT", "END"]


def _way(path: Path, queue: int | None) -> list[str]:
    found = []
    if path.loss:
        chance = f"--mode random --probability {path.loss:.9f}"
        found.append(f"-m statistic {chance} -j DROP")
    if queue is not None:
        found.append(f"-j NFQUEUE --queue-num {queue}")
    return found


def _host(cluster: Cluster, host: int) -> list[str]:
    name = host_name(host)
    loopback, buckets = within(cluster)
    lines = [
        "link set lo up",
        f"link set {INTERFACE} arp off addrgenmode none up",
        f"address add {address(host)}/32 dev {INTERFACE}",
        *loopback,
    ]
    return [
        _set(name, _SHIPPED),
        *batch(f"ip -netns {name}", lines),
        # Without quotes: the words for the congestion control are put in.
        f"ip -netns {name} route add {NETWORK} dev {INTERFACE} $control",
        *(batch(f"tc -netns {name}", buckets) if buckets else []),
    ]
