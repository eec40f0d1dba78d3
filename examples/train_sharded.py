"""Train a model that FSDP2 shards inside hosts, and average between hosts by gradtide.

On a laptop:    torchrun --nproc-per-node 4 examples/train_sharded.py --hosts 2
On many hosts:  the same script, with torchrun's --nnodes and --rdzv-endpoint.
Needs scikit-learn, for its data: pip install scikit-learn
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradtide

NUM_HELD_OUT = 360  # the last 20 %: other writers than those trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="wfbp", help="what travels between hosts")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = args.hosts, size // args.hosts
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    train = torch.arange(len(x) - NUM_HELD_OUT)[rank::size]  # this rank's images
    own = torch.Generator().manual_seed(1 + rank)

    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh["inner"])
    fully_shard(model, mesh=mesh["inner"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sync = gradtide.replicate(
        model, optimizer, args.scheme, process_group=mesh["outer"]
    )

    for step in range(args.steps):
        drawn = torch.randint(len(train), (args.batch_size,), generator=own)
        loss = F.cross_entropy(model(x[train[drawn]]), y[train[drawn]])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = sync.clip_grad_norm_(1.0)  # over all parts and hosts
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}, gradient norm {norm:.3f}")

    with torch.no_grad():  # on every rank: FSDP2 gathers the parameters
        right = model(x[-NUM_HELD_OUT:]).argmax(1) == y[-NUM_HELD_OUT:]
    if rank == 0:
        print(f"held-out accuracy {right.float().mean():.3f}")
    sync.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
