"""A GAN with one backward pass for each network; its generator's step comes first."""

import torch
from common import batch, begin, values
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> dict[str, object]:
    begin()
    generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 12)))
    critic = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)))
    first = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    losses = []
    for step in range(14):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        made = generator(noise)
        first.zero_grad()
        critic.requires_grad_(False)
        softplus(-critic(made)).mean().backward()
        critic.requires_grad_(True)
        first.step()
        second.zero_grad()
        both = critic(torch.cat([batch(step)[0], made.detach()]))
        loss = softplus(-both[:8]).mean() + softplus(both[8:]).mean()
        loss.backward()
        second.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": values(generator, critic)}


if __name__ == "__main__":
    main()
