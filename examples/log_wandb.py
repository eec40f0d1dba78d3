"""Log what a training costs to Weights & Biases.

Start it with torchrun --nproc-per-node 2, and WANDB_MODE=offline without an account."""

import torch
import torch.distributed as dist
import wandb

import gradtide


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # for data of its own
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gradtide.replicate(model, optimizer, "topka2a(0.02, warmup=10)")
    config = {"scheme": repr(sync.scheme), "ranks": dist.get_world_size()}
    # A run of all ranks is logged by one of them: its numbers are its own.
    run = (
        wandb.init(project="gradtide", config=config) if dist.get_rank() == 0 else None
    )
    for x in torch.randn(20, 32, 256):  # 20 batches of 32
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.log({"loss": loss.item(), **sync.metrics()})
    if run is not None:
        run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
