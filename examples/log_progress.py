"""Show on a line how training gets on: torchrun --nproc-per-node 2"""

import torch
import torch.distributed as dist

import gradtide
from gradtide.integrations.metrics import progress


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # for data of its own
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gradtide.replicate(model, optimizer, "topka2a(0.02, warmup=10)")
    for x in progress(torch.randn(20, 32, 256), sync, every=0.5):  # 20 batches of 32
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
