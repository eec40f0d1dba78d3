"""Train a small convolutional network on handwritten digits, data-parallel.

On a laptop:    torchrun --nproc-per-node 2 examples/train_digits.py --scheme dear
On many hosts:  the same script, with torchrun's --nnodes and --rdzv-endpoint.
Needs scikit-learn, for its data: pip install scikit-learn
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gradtide

NUM_HELD_OUT = 360  # the last 20 %: other writers than those trained on


def network() -> nn.Sequential:
    """Images (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def images() -> tuple[Tensor, Tensor]:
    """All images, with pixels from 0 to 1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8)
    return x, torch.from_numpy(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="dear", help="how gradients are averaged")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", default="digits.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = images()
    train = torch.arange(len(x) - NUM_HELD_OUT)[rank::size]  # this rank's images
    own = torch.Generator().manual_seed(1 + rank)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    sync = gradtide.replicate(model, optimizer, args.scheme)  # the one line for many

    for step in range(args.steps):
        chosen = train[torch.randperm(len(train), generator=own)[: args.batch_size]]
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        sync.clip_grad_norm_(5.0)  # the norm of the average, over all ranks
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():  # on all ranks: none leaves early
        right = model(x[-NUM_HELD_OUT:]).argmax(-1) == y[-NUM_HELD_OUT:]
    state = model.state_dict()
    if rank == 0:
        print(f"held out: accuracy {right.double().mean():.3f}")
        torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
