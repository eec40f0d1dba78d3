"""A small model, by two workers of Ray Train: python examples/ray_train.py"""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import gradtide


def work(config: dict[str, Any]) -> None:
    """What every worker runs: Ray has set RANK and the rest, and made the group."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = gradtide.DistributedDataParallel(layers, scheme=config["scheme"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(128, 8)[rank::size]
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with TemporaryDirectory() as folder:  # Ray keeps the numbers of checkpoints alone
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
        saved = None if rank else train.Checkpoint.from_directory(folder)
        train.report({"loss": loss.item()}, checkpoint=saved)


if __name__ == "__main__":
    trainer = TorchTrainer(
        work,
        train_loop_config={"scheme": "dear"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=2),
    )
    print(dict(trainer.fit().metrics or {}))
