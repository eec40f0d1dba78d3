"""An MLP learns a photograph, from places to colours: plain DDP, as people write it.

torchrun --nproc-per-node 4 benchmarks/advised/field.py --steps 300
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Field(nn.Module):
    """Places (batch, 2), from 0 to 1, to colours (batch, 3)."""

    def __init__(self, features: int = 128, width: int = 320) -> None:
        super().__init__()
        self.waves = nn.Buffer(12.0 * torch.randn(2, features))
        layers: list[nn.Module] = [nn.Linear(2 * features, width), nn.GELU()]
        for _ in range(3):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        angles = 6.2832 * x @ self.waves
        return self.layers(torch.cat([angles.sin(), angles.cos()], 1))  # type: ignore[no-any-return]


def pixels(
    photo: Tensor, count: int, generator: torch.Generator, odd: bool
) -> tuple[Tensor, Tensor]:
    """Places and colours; of odd columns, or of even ones."""
    height, width, _ = photo.shape
    row = torch.randint(height, (count,), generator=generator)
    column = 2 * torch.randint(width // 2, (count,), generator=generator) + odd
    place = torch.stack([row / height, column / width], 1)
    return place, photo[row, column]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()
    photo = torch.tensor(load_sample_images().images[0]).float() / 64 - 2
    held_out = pixels(photo, 4096, torch.Generator().manual_seed(1000), True)
    model = DistributedDataParallel(Field(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        place, colour = pixels(photo, 128, generator, False)
        optimizer.zero_grad()
        F.mse_loss(model(place), colour).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 1 or step % 20 == 0:
            with torch.no_grad():
                loss = F.mse_loss(model.module(held_out[0]), held_out[1])
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step} loss={loss.item() / dist.get_world_size():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
