"""Train an autoencoder of handwritten digits with K-FAC, data-parallel.

On a laptop:    torchrun --nproc-per-node 2 examples/train_kfac.py --scheme pad_kfac
To compare:     --scheme wfbp --lr 0.002, without K-FAC: larger rates diverge.
Needs scikit-learn, for its data: pip install scikit-learn
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradtide


def autoencoder() -> nn.Sequential:
    widths = (64, 128, 32, 8, 32, 128, 64)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scheme", default="spd_kfac", help="such as pad_kfac(schedule='dear')"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().data).float() / 16  # (1797, 64), 0 to 1
    mine = images[rank::size]
    own = torch.Generator().manual_seed(1 + rank)
    model = autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    sync = gradtide.replicate(model, optimizer, args.scheme)  # gradients and curvature

    for step in range(args.steps):
        x = mine[torch.randperm(len(mine), generator=own)[:32]]
        # A mean over samples: K-FAC takes each sample's own gradient from it.
        loss = F.mse_loss(model(x), x, reduction="none").sum(1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    sync.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
