"""Log what a training costs: to TensorBoard if that is installed, otherwise as text.

Start it with torchrun --nproc-per-node 2; see it with tensorboard --logdir out."""

import torch
import torch.distributed as dist

import gradtide


def main() -> None:
    dist.init_process_group("gloo")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # pip install tensorboard
        writer = None
    else:
        writer = SummaryWriter(f"out/metrics/rank{dist.get_rank()}")
    torch.manual_seed(dist.get_rank())  # for data of its own
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gradtide.replicate(model, optimizer, "topka2a(0.02, warmup=40)")
    for x in torch.randn(60, 32, 256):  # 60 batches of 32
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = {"loss": loss.item(), **sync.metrics()}
        for name, value in numbers.items():
            if writer is not None:
                writer.add_scalar(name, value, int(numbers["step"]))
            elif dist.get_rank() == 0:
                print(f"{name}: {value:.4g}")
    if writer is not None:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
