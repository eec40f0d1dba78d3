"""The network that is asked about, from one that was measured or from a rate alone."""

from __future__ import annotations

from gradtide.plan.network import Network


def imagine(
    measured: Network | None,
    ranks: int | None,
    ranks_per_host: int | None,
    rate: float | None,
) -> Network:
    """`measured` (None: an ideal one) with other ranks or links; `rate` in bits/s.

    Hosts hold as many ranks as in the measured network (one, if there is none) unless
    `ranks_per_host` says otherwise. Raises ValueError where something has to be said.
    """
    if measured is None and (rate is None or ranks is None):
        raise ValueError(
            "say for which network: --network FILE (made by `gradtide profile "
            "network`), or --ranks 32 --rate 10gbit for one as it should be"
        )
    known = measured and measured.ranks_per_host
    per_host = ranks_per_host or known or 1
    if ranks is None:
        assert measured is not None
        ranks = measured.hosts * per_host
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: one rank has nobody to average with")
    if ranks % per_host:
        raise ValueError(
            f"--ranks {ranks} on hosts of {per_host}: choose a multiple, or say "
            "--ranks-per-host"
        )
    hosts = ranks // per_host
    if measured is None:
        assert rate is not None
        return Network.ideal(hosts, per_host, rate)
    return measured.scaled(hosts=hosts, ranks_per_host=per_host, rate=rate)
