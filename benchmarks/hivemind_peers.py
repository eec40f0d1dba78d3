"""hivemind beside the league: peers that train alone and average every so many steps.

    pip install hivemind
    gradtide lab run --hosts 4 --rate 50mbit -- \
        python benchmarks/hivemind_peers.py --rate 50mbit \
        --out benchmarks/records/hivemind_202611.json

Each peer steps by itself; when all of them together have seen enough samples, they find
each other over libp2p and average parameters and what optimizers remember (hivemind's
`use_local_updates`). Numbers of steps, learning rates, loss and clipping are those of
`league.py`, and the loss is the mean of what the peers find at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
import torch.distributed as dist
from league import _shared_loss
from torch import nn

from gradtide.lab.record import machine, versions
from gradtide.lab.workloads import build


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


def train(dht: Any, workload: str, steps: int, every: int, factor: float) -> Any:
    """Seconds, rounds of averaging and the loss of one training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    work = build(workload, rank=rank, size=size, seed=0)
    for group in work.optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] = group["lr"]
    assert work.scheduler is not None
    scheduler = work.scheduler(work.optimizer)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=f"every {every} at {factor:e}".replace(".", "_"),
        batch_size_per_step=1,
        target_batch_size=size * every,
        optimizer=work.optimizer,
        use_local_updates=True,
        matchmaking_time=2.0,
        averaging_timeout=60.0,
    )
    try:
        dist.barrier()
        begin = time.perf_counter()
        for step in range(steps):
            work.loss(work.model, work.batch(step)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(work.model.parameters(), work.max_norm or 1e9)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        dist.barrier()
        seconds = round(time.perf_counter() - begin, 1)
        found = {"every": every, "factor": factor, "seconds": seconds}
        return found | {"rounds": optimizer.local_epoch} | _shared_loss(work)
    finally:
        optimizer.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt-small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", default="10,50")
    parser.add_argument("--factors", default="0.5,1")
    parser.add_argument("--rate", required=True, help="as the lab was told")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dht = meet()
    record: dict[str, Any] = {
        "command": f"gradtide lab run --hosts {dist.get_world_size()} --rate "
        f"{args.rate} -- python benchmarks/hivemind_peers.py --rate {args.rate} "
        f"--every {args.every} --factors {args.factors}",
        "versions": versions() | {"hivemind": hivemind.__version__},
        "machine": machine(),
        "workload": args.workload,
        "steps": args.steps,
        "runs": [],
    }
    for every in map(int, args.every.split(",")):
        for factor in map(float, args.factors.split(",")):
            run = train(dht, args.workload, args.steps, every, factor)
            record["runs"].append(run)
            if dist.get_rank() == 0:
                print(run, flush=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")
            dist.barrier()
    dht.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
