"""A small model, by two workers of Ray Train: python examples/ray_train.py"""

from typing import Any

import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import gradtide


def work(config: dict[str, Any]) -> None:
    """What every worker runs: Ray has set RANK and the rest, and made the group."""
    context = train.get_context()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = gradtide.DistributedDataParallel(layers, scheme=config["scheme"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(128, 8)[context.get_world_rank() :: context.get_world_size()]
    for _ in range(config["steps"]):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        train.report({"loss": loss.item()})


def main(scheme: str = "dear", steps: int = 20) -> dict[str, Any]:
    trainer = TorchTrainer(
        work,
        train_loop_config={"scheme": scheme, "steps": steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=2),
    )
    return dict(trainer.fit().metrics or {})


if __name__ == "__main__":
    print(main())
