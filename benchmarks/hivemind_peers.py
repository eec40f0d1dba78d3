"""hivemind beside the league: peers that train alone and average every so many steps.

    pip install hivemind
    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/hivemind_peers.py --rate 50mbit \
        --out benchmarks/records/hivemind_202611.json

Each peer steps by itself; when all of them together have seen enough samples, they find
each other over libp2p and average parameters and what optimizers remember (hivemind's
`use_local_updates`). Training is that of `league.py`, in real time over the links.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

import hivemind
import torch
import torch.distributed as dist
from league import train
from rivals import RIVALS, Entrant, Make, clipped
from torch import nn
from torch.optim import Optimizer

from gradtide.lab.record import machine, versions


def own_address() -> str:
    """That from which this host reaches rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.connect((os.environ["MASTER_ADDR"], 9))
        return str(door.getsockname()[0])


def meet() -> Any:
    """The peers' hash table; the others join rank 0's."""
    named: dict[str, Any] = {
        "host_maddrs": [f"/ip4/{own_address()}/tcp/0"],
        "start": True,
        "use_relay": False,
        "use_auto_relay": False,
    }
    first: list[Any] = [None]
    if dist.get_rank() == 0:
        dht = hivemind.DHT(**named)
        first = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(first, src=0)
    if dist.get_rank() > 0:
        dht = hivemind.DHT(initial_peers=first[0], **named)
    return dht


def peers(dht: Any, every: int) -> Make:
    """Peers that average after every so many steps of each."""

    def make(
        model: nn.Module, optimizer: Optimizer, steps: int, max_norm: float
    ) -> Entrant:
        outer = hivemind.Optimizer(
            dht=dht,
            run_id="league",
            batch_size_per_step=1,
            target_batch_size=dist.get_world_size() * every,
            optimizer=optimizer,
            use_local_updates=True,
            matchmaking_time=4.0,  # above its request timeout, as it advises
            averaging_timeout=60.0,
        )
        return Entrant(model, clipped(model, outer, max_norm), leave=outer.shutdown)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt-small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps of a round")
    parser.add_argument("--factor", type=float, default=0.5, help="of the rate")
    parser.add_argument("--rate", required=True, help="as the lab was told")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dht, name = meet(), f"hivemind, every {args.every}"
    RIVALS[name] = peers(dht, args.every)
    curve = train(args.workload, name, args.factor, 0, args.steps, args.steps)
    if dist.get_rank() == 0:
        record: dict[str, Any] = {
            "command": f"gradtide lab run --hosts {dist.get_world_size()} --rate "
            f"{args.rate} -- python benchmarks/hivemind_peers.py --rate {args.rate} "
            f"--every {args.every} --factor {args.factor:g}",
            "versions": versions() | {"hivemind": hivemind.__version__},
            "machine": machine(),
            "workload": args.workload,
            "name": name,
            "factor": args.factor,
            "curve": curve,
        }
        print(curve)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dht.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
