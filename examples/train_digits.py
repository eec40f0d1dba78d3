"""Train a small convolutional network on handwritten digits, data-parallel.

On a laptop:    torchrun --nproc-per-node 2 examples/train_digits.py --scheme dear
On many hosts:  the same script, with torchrun's --nnodes and --rdzv-endpoint.
Needs scikit-learn: pip install 'gradtide[lab]'
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional as F

import gradtide
from gradtide.lab.workloads import digits
from gradtide.lab.workloads.workload import classification_scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="dear", help="how gradients are averaged")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=digits.BATCH_SIZE)
    parser.add_argument("--checkpoint", default="digits.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, held_out = digits.images()
    model = digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    sync = gradtide.replicate(model, optimizer, args.scheme)  # the one line for many

    for step in range(args.steps):
        x, y = digits.shard(train, 0, rank, size, args.batch_size, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        sync.clip_grad_norm_(5.0)  # the norm of the average, over all ranks
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    scores = classification_scores(model, held_out)  # on all ranks: none leaves early
    state = model.state_dict()
    if rank == 0:
        print(f"held out: accuracy {scores['accuracy']:.3f}")
        torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
