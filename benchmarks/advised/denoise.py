"""A U-Net takes noise off patches of photographs: plain DDP, as people write it.

torchrun --nproc-per-node 4 benchmarks/advised/denoise.py --steps 300
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SIDE = 24  # pixels of a patch, each way


class Block(nn.Module):
    """Two convolutions, normalised in groups, and what came in."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norm = nn.GroupNorm(4, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(F.silu(self.norm(self.first(x))))
        return F.silu(inner + self.skip(x))


class UNet(nn.Module):
    """Noisy patches (batch, 3, SIDE, SIDE) to the noise in them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.start = Block(3, width)
        self.down = Block(width, 2 * width)
        self.middle = Block(2 * width, 4 * width)
        self.up = Block(6 * width, 2 * width)
        self.end = Block(3 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.start(x)
        half = self.down(F.avg_pool2d(whole, 2))
        quarter = self.middle(F.avg_pool2d(half, 2))
        half = self.up(torch.cat([F.interpolate(quarter, scale_factor=2), half], 1))
        whole = self.end(torch.cat([F.interpolate(half, scale_factor=2), whole], 1))
        return self.head(whole)  # type: ignore[no-any-return]


def patches(photos: Tensor, count: int, generator: torch.Generator) -> Tensor:
    _, _, height, width = photos.shape
    rows = []
    for _ in range(count):
        photo = torch.randint(2, (), generator=generator)
        top = torch.randint(height - SIDE, (), generator=generator)
        left = torch.randint(width - SIDE, (), generator=generator)
        rows.append(photos[photo, :, top : top + SIDE, left : left + SIDE])
    return torch.stack(rows)


def noisy(clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    noise = torch.randn(clean.shape, generator=generator)
    return clean + 0.3 * noise, noise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()
    photos = torch.stack([torch.tensor(i) for i in load_sample_images().images])
    photos = photos.permute(0, 3, 1, 2).float() / 64 - 2
    train, rest = photos[..., :500], photos[..., 500:]
    fixed = torch.Generator().manual_seed(1000)
    held_out = noisy(patches(rest, 64, fixed), fixed)
    model = DistributedDataParallel(UNet(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        x, noise = noisy(patches(train, 4, generator), generator)
        optimizer.zero_grad()
        F.mse_loss(model(x), noise).backward()  # type: ignore[no-untyped-call]
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
