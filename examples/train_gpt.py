"""Train a small byte-level GPT data-parallel, over a network that cannot keep up.

On a laptop:    torchrun --nproc-per-node 2 examples/train_gpt.py --scheme dear
On many hosts:  the same script, with torchrun's --nnodes and --rdzv-endpoint.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist

import gradtide
from gradtide.lab.workloads import gpt
from gradtide.lab.workloads.workload import classification_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="dear", help="how gradients are averaged")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=gpt.BATCH_SIZE)
    parser.add_argument("--checkpoint", default="gpt.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train, held_out = gpt.corpus()
    model = gpt.GPT()
    optimizer = gpt.adamw(model)
    scheduler = gpt.warm_up_cosine(optimizer)

    sync = gradtide.replicate(model, optimizer, args.scheme)  # the one line for many

    for step in range(args.steps):
        batch = gpt.sample(train, 0, rank, args.batch_size, step)  # this rank's own
        loss = classification_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        sync.clip_grad_norm_(1.0)  # the norm of the average, over all ranks
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    nats = gpt.held_out_loss(held_out, model)["loss"]  # on all ranks: none leaves early
    state = model.state_dict()
    if rank == 0:
        print(f"held out: {nats / math.log(2):.3f} bits a byte")
        torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
