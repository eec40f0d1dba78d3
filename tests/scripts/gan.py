"""As DCGAN: two networks, two optimizers, and gradients that no step takes."""

import torch
from common import batch, begin, values
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> dict[str, object]:
    begin()
    netg = nn.Sequential(
        nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12)
    )
    netd = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    netg, netd = DDP(netg, broadcast_buffers=False), DDP(netd)
    optd = torch.optim.Adam(netd.parameters(), lr=5e-3, betas=(0.5, 0.999))
    optg = torch.optim.Adam(netg.parameters(), lr=5e-3, betas=(0.5, 0.999))
    real, fake = torch.ones(8, 1), torch.zeros(8, 1)
    losses = []
    for step in range(14):
        netd.zero_grad()
        lossd = bce(netd(batch(step)[0]), real)
        lossd.backward()
        made = netg(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
        lossf = bce(netd(made.detach()), fake)
        lossf.backward()  # added to the first
        optd.step()
        netg.zero_grad()
        lossg = bce(netd(made), real)
        lossg.backward()
        optg.step()
        losses.append((lossd + lossf).item())
    return {"losses": losses, "weights": values(netd, netg)}


if __name__ == "__main__":
    main()
