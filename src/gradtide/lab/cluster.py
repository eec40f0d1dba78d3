"""The plan of an emulated cluster: addresses, each rank's environment, and failure.

Pure functions of a `Cluster`; `wiring` writes the plan down, `namespaces` carries it
out, `launch` starts the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gradtide.lab.internet import Internet

INTERFACE = "eth0"  # the link's name inside every host
NEAR, FAR = 9000, 1500  # bytes of packets: on a switch, and through the internet
NETWORK = "10.99.0.0/16"  # of all hosts
PORT = 29500  # free by construction in a namespace that was just made


@dataclass(frozen=True)
class Cluster:
    """So many hosts on one switch, each behind a link of `rate` bits/s each way.

    A rate of None means loopback: one machine, no namespaces, nothing slowed down. The
    ranks of a host send each other up to `local_rate` bits/s, all together; None: as
    much as the machine can. Where there is an `internet`, it says what links are like
    and how far apart hosts are, and `rate` is that of its slowest link.
    """

    hosts: int
    ranks_per_host: int = 1
    rate: float | None = None
    mtu: int = NEAR
    local_rate: float | None = None
    internet: Internet | None = None

    @staticmethod
    def emulating(
        hosts: int,
        ranks_per_host: int,
        rate: float | None,
        *,
        mtu: int | None = None,
        local_rate: float | None = None,
        internet: Internet | None = None,
    ) -> Cluster:
        """One whose packets are as large as they are on such a network."""
        if mtu is None:
            mtu = NEAR if internet is None else FAR
        return Cluster(hosts, ranks_per_host, rate, mtu, local_rate, internet)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250:
            raise ValueError(f"{self.hosts} hosts: choose 1 to 250")
        if not 1 <= self.ranks_per_host <= 250:
            raise ValueError(f"{self.ranks_per_host} ranks per host: choose 1 to 250")
        if not 1280 <= self.mtu <= 65000:
            raise ValueError(f"an MTU of {self.mtu}: choose 1280 to 65000 bytes")
        links = () if self.internet is None else self.internet.links
        rates = [rate for link in links for rate in (link.rate, link.sends)]
        for rate in (self.rate, self.local_rate, *rates):
            if rate is not None and not 1e5 <= rate <= 1e11:
                raise ValueError(
                    f"a rate of {rate:g} bits/s: choose 100kbit to 100gbit, or none"
                )
        if self.local_rate is not None and self.rate is None:
            raise ValueError(
                "a local rate without a rate: links inside hosts are shaped where "
                "those between them are; give both"
            )

        if self.internet is not None:
            assert len(self.internet.links) == self.hosts
            assert self.internet.slowest == self.rate
            for event in self.internet.events:
                rank = getattr(event.change, "rank", 0)
                if rank >= self.size:
                    raise ValueError(
                        f"an event is of rank {rank}: choose 0 to {self.size - 1}"
                    )

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host


@final
class Unfit(ValueError):
    """What a user gave does not fit, and only ranks find out: told in one line."""


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


def host_name(host: int) -> str:
    return f"lab-host{host}"


def address(host: int) -> str:
    return f"10.99.0.{host + 1}"


def rank_environment(cluster: Cluster, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set for this rank, and the link that its traffic takes."""
    shaped = cluster.rate is not None
    host, local_rank = divmod(rank, cluster.ranks_per_host)
    interface = INTERFACE if shaped else "lo"
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": cluster.size,
        "LOCAL_WORLD_SIZE": cluster.ranks_per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": cluster.hosts,
        "NODE_RANK": host,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": cluster.size,
        "MASTER_ADDR": address(0) if shaped else "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"gradtide-lab-{port}",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 hosts the store itself
        "GLOO_SOCKET_IFNAME": interface,
        "PYTHONUNBUFFERED": 1,
        "GRADTIDE_LAB_RATE": "" if cluster.rate is None else f"{cluster.rate:.0f}",
        "GRADTIDE_LAB_INTERFACE": interface,
        "GRADTIDE_LAB_HOSTS": cluster.hosts,
    }
    return {name: str(value) for name, value in values.items()}
